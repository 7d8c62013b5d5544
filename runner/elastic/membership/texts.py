"""The messages that end an elastic run, as templates for ``str.format``; they name the setting and the next step."""

from __future__ import annotations

NOT_STARTED = (
    "{tasks} had started after start_timeout={limits.start_timeout:g} s, min_num_proc={limits.min_num_proc}: give the "
    "application more executors or cores, wait for the jobs that hold them, or ask for fewer ranks"
)
TOO_FEW = (
    "{ranks} for elastic_timeout={limits.elastic_timeout:g} s, min_num_proc={limits.min_num_proc}: no more executors "
    "have arrived. Give the application more executors, or pass a smaller min_num_proc=; last: {last}"
)
ALL_EXCLUDED = (
    "{left}, and hosts get no new ranks after {limits.host_failure_limit} failures without a commit: {hosts}; last: "
    "{last}"
)
LEFT = "{ranks} left, min_num_proc={limits.min_num_proc}"
NOT_REPLACED = (
    "{left}, and no new rank has returned in place of a lost one for elastic_timeout={limits.elastic_timeout:g} s. "
    "Give the application more executors; last: {last}"
)
RETURNED_ON = "fn, which calls no elastic function, has returned on {ranks} of {first}"
EXCLUDED = (
    "host {host} gets no new ranks {how_long}: {limits.host_failure_limit} of its ranks have failed without a commit "
    "in between"
)
RESET_LIMIT = (
    "the ranks had to meet again {resets} times after a failure, reset_limit={limits.reset_limit}; last: {last}"
)
STATE_LOST = (
    "all ranks that had the state are gone ({commits} commits are lost), and new ranks do not have it; last: {last}. "
    "Save checkpoints (hvd.checkpoint) if all executors may be lost at once"
)
ALL_RAISED = "fn raised an exception on every rank; last: {name}: {error}"
NO_PROGRESS = "{times} times in a row a rank failed before anything was committed"
NEVER_MET = (
    "the ranks could not meet for elastic_timeout={limits.elastic_timeout:g} s, although there were enough; last: "
    "{last}. Check that the executors' hosts can reach each other (spark-hvd doctor tests it), and which network "
    "interface the ranks use (interfaces=)"
)
RETURNED_EARLY = (
    "{name} returned from fn without having called its elastic function to the end, and other ranks wait for it. "
    "Every rank must call the function decorated with hvd.elastic.run"
)
BEHIND = (
    "{name} takes no part: the others are in a later elastic function of fn, and a new rank begins with the first. "
    "Train in one elastic function and keep the progress in its state, so that new ranks can join"
)
VALUE_LOST = "{name} had returned from fn, but its value is lost: {why}"
FAILED_AFTER = "{name}, after the elastic function had returned on all ranks: {error}"


def brief(error: str) -> str:
    """Return the beginning of an error; the rank's own report, if there is one, has all of it."""
    return error.partition("\n")[0][:200]
