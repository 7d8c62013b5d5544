"""Which failure is the cause and which are echoes of it, and the report that a person reads."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spark_hvd.runner.outcome import Failed, FailureKind

# What torch.distributed and its backends say when the other side has gone. They say it as plain RuntimeErrors.
_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)( by peer)?|broken pipe|socket (is |was )?closed"
    r"|timed out waiting \d+ ?ms for (recv|send)|remote process exited|nccl.*(aborted|remote error)"
    r"|failed to (recv|send), got \d+ bytes|connectfullmesh",
    re.IGNORECASE,
)


def is_echo(error: BaseException) -> bool:
    """Whether an exception, or one it was raised from, only says that a peer or the network has gone."""
    seen: BaseException | None = error
    while seen is not None:
        names = {cls.__name__ for cls in type(seen).__mro__}
        if names & {"CollectiveError", "DistNetworkError", "DistBackendError"}:
            return True
        if isinstance(seen, RuntimeError) and _GONE.search(str(seen)):
            return True
        seen = seen.__cause__
    return False


def rank_failures(failures: Sequence[Failed], order: Sequence[int] = ()) -> list[Failed]:
    """Sort failures, the first cause first.

    Args:
        failures: At least one.
        order: Ranks in the order in which the hub heard of their failures; the clocks of hosts differ.
    """
    heard = {rank: position for position, rank in enumerate(order)}

    def key(failure: Failed) -> tuple[bool, bool, int, float, int]:
        stopped = failure.kind in (FailureKind.STOPPED, FailureKind.LOST, FailureKind.TIMEOUT)
        return stopped, failure.echo, heard.get(failure.rank, len(heard)), failure.ended_at, failure.rank

    return sorted(failures, key=key)


def report(failures: Sequence[Failed], size: int, finished: Sequence[int] = ()) -> str:
    """Write the failures of a run, sorted by :func:`rank_failures`, as text: the cause whole, the rest a line each.

    Args:
        failures: All failures, the cause first.
        size: World size.
        finished: Ranks whose fn returned.
    """
    first, *others = failures
    lines = [f"rank {first.rank} of {size} failed on host {first.host}: {first.error}"]
    if first.echo and finished:
        lines += [
            "",
            f"{_ranks(finished)} had already returned from fn when rank {first.rank} was still waiting for all ranks: "
            "every rank has to call the same collectives the same number of times.",
        ]
    if first.traceback:
        title = "Stacks" if first.kind in (FailureKind.SIGNAL, FailureKind.TIMEOUT) else "Traceback"
        lines += ["", f"{title} of rank {first.rank}:", _indent(first.traceback)]
    if first.log_tail:
        lines += ["", f"Last output of rank {first.rank}:", _indent(first.log_tail)]
    if others:
        lines += ["", "The other ranks:"]
        lines += [f"  {_ranks(ranks)}: {text}" for text, ranks in _grouped(others)]
    return "\n".join(lines)


def timeout_report(failures: Sequence[Failed], size: int, timeout: float) -> str:
    """Write a run that was ended because its time was up: where every rank stood."""
    running = [failure for failure in failures if failure.kind is FailureKind.TIMEOUT]
    lines = [
        f"{_ranks([f.rank for f in running])} of {size} still running after timeout={timeout:g} s; all were stopped. "
        "Give a larger timeout= if this is how long it takes; else see below where each rank stood."
    ]
    for failure in running:
        lines += ["", f"Stacks of rank {failure.rank} on host {failure.host}:", _indent(failure.traceback or "(none)")]
        if failure.log_tail:
            lines += [f"Last output of rank {failure.rank}:", _indent(failure.log_tail)]
    return "\n".join(lines)


def _grouped(failures: Sequence[Failed]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for failure in failures:
        text = failure.error.splitlines()[0][:200] + (" (an echo)" if failure.echo else "")
        groups.setdefault(text, []).append(failure.rank)
    return list(groups.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines())
