"""Messages with which an elastic run ends, as templates for ``str.format``; they name the setting and the next step."""

from __future__ import annotations

NOT_STARTED = (
    "{tasks} had started after start_timeout={limits.start_timeout:g} s, min_num_proc={limits.min_num_proc}: give the "
    "application more executors or cores, wait for the jobs that hold them, or ask for fewer ranks"
)
TOO_FEW = (
    "{ranks} for elastic_timeout={limits.elastic_timeout:g} s, min_num_proc={limits.min_num_proc}: no more executors "
    "have come. Give the application more, or a smaller min_num_proc=; last: {last}"
)
ALL_EXCLUDED = (
    "{ranks} left, min_num_proc={limits.min_num_proc}, and hosts get no new ones after {limits.host_failure_limit} "
    "failures without a commit: {hosts}; last: {last}"
)
EXCLUDED = (
    "host {host} gets no new ranks {how_long}: {limits.host_failure_limit} of its ranks have failed without a commit "
    "in between"
)
RESET_LIMIT = (
    "the ranks had to meet again {resets} times after a failure, reset_limit={limits.reset_limit}; last: {last}"
)
STATE_LOST = (
    "all ranks that had the state are gone ({commits} commits are lost), and ranks that start anew do not have it; "
    "last: {last}. Save checkpoints (hvd.checkpoint) if all executors may go at once"
)
ALL_RAISED = "fn raised an exception on every rank; last: {name}: {error}"
NO_PROGRESS = "{times} times in a row a rank failed before anything was committed"
NEVER_MET = (
    "the ranks could not meet for elastic_timeout={limits.elastic_timeout:g} s, though there were enough; last: "
    "{last}. Check that the executors' hosts reach each other (spark-hvd doctor tries it), and which network "
    "interface ranks use (interfaces=)"
)
RETURNED_EARLY = (
    "{name} returned from fn without having called its elastic function to the end, for which other ranks wait. "
    "Every rank has to call the function decorated with hvd.elastic.run"
)
BEHIND = (
    "{name} takes no part: the others are in a later elastic function of fn, and a rank that starts anew begins "
    "with the first. Train in one elastic function, with what was done in its state, so that new ranks can join"
)
VALUE_LOST = "{name} had returned from fn, but its value is lost: {why}"
FAILED_AFTER = "{name}, after the elastic function had returned on all ranks: {error}"


def brief(error: str) -> str:
    """The beginning of an error; the rank's own report, if there is one, has all of it."""
    return error.partition("\n")[0][:200]
