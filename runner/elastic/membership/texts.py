"""What an elastic run says at its end, in words that name the setting and the next step."""

from __future__ import annotations

from collections.abc import Iterable

from spark_hvd.runner.elastic.membership.events import Limits
from spark_hvd.world.words import count


def not_started(there: int, limits: Limits) -> str:
    """Fewer than the minimum of tasks have started."""
    return (
        f"{count(there, 'task')} had started after start_timeout={limits.start_timeout:g} s, "
        f"min_num_proc={limits.min_num_proc}: give the application more executors or cores, wait for the jobs that "
        "hold them, or ask for fewer ranks"
    )


def too_few(there: int, limits: Limits, last: str) -> str:
    """Fewer than the minimum of ranks, for too long."""
    return (
        f"{count(there, 'rank')} for elastic_timeout={limits.elastic_timeout:g} s, "
        f"min_num_proc={limits.min_num_proc}: no more executors have come. Give the application "
        f"more, or a smaller min_num_proc=; last: {last}"
    )


def all_excluded(there: int, limits: Limits, hosts: Iterable[str], last: str) -> str:
    """No host is left where ranks could be started."""
    return (
        f"{count(there, 'rank')} left, min_num_proc={limits.min_num_proc}, and hosts get no new ones after "
        f"{limits.host_failure_limit} failures without a commit: {', '.join(sorted(set(hosts)))}; last: {last}"
    )


def excluded(host: str, limits: Limits, seconds: float) -> str:
    """A host gets no new ranks."""
    how_long = "for ever" if seconds == float("inf") else f"for {seconds:.0f} s"
    return (
        f"host {host} gets no new ranks {how_long}: {limits.host_failure_limit} of its ranks have failed without a "
        "commit in between"
    )


def reset_limit(resets: int, limits: Limits, last: str) -> str:
    """What is told where there were more failures than `reset_limit`."""
    return f"the ranks had to meet again {resets} times after a failure, reset_limit={limits.reset_limit}; last: {last}"


def state_lost(commits: int, last: str) -> str:
    """Nobody is left who has the state."""
    return (
        f"all ranks that had the state are gone ({commits} commits are lost), and ranks that start anew do not have "
        f"it; last: {_brief(last)}. Save checkpoints (hvd.checkpoint) if all executors may go at once"
    )


def all_raised(name: str, error: str) -> str:
    """No rank is left whose state is sound."""
    return f"fn raised an exception on every rank; last: {name}: {_brief(error)}"


def no_progress(times: int) -> str:
    """What is told where generations fail one after the other without a commit."""
    return f"{times} times in a row a rank failed before anything was committed"


def never_met(limits: Limits, last: str) -> str:
    """There are enough ranks, and they do not reach each other."""
    return (
        f"the ranks could not meet for elastic_timeout={limits.elastic_timeout:g} s, though there were enough; last: "
        f"{last}. Check that the executors' hosts reach each other (spark-hvd doctor tries it), and which network "
        "interface ranks use (interfaces=)"
    )


def returned_early(name: str) -> str:
    """Fn has returned on a rank, and others wait for it."""
    return (
        f"{name} returned from fn without having called its elastic function to the end, for which other ranks wait. "
        "Every rank has to call the function decorated with hvd.elastic.run"
    )


def behind(name: str) -> str:
    """A new rank cannot catch up with the others."""
    return (
        f"{name} takes no part: the others are in a later elastic function of fn, and a rank that starts anew begins "
        "with the first. Train in one elastic function, with what was done in its state, so that new ranks can join"
    )


def value_lost(name: str, why: str) -> str:
    """A rank's value cannot reach the driver any more."""
    return f"{name} had returned from fn, but its value is lost: {why}"


def failed_after(name: str, error: str) -> str:
    """A rank has failed when there was nothing left to train."""
    return f"{name}, after the elastic function had returned on all ranks: {error}"


def _brief(error: str) -> str:
    """Its beginning: the rank's own report, where there is one, has all of it."""
    return error.partition("\n")[0][:200]
