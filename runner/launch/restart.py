"""Restarts the ranks of a static run: decides after which failures, how often, and with how many ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.launch.feeding import SlotAllocation, slots_left
from spark_hvd.runner.outcome.errors import ExecutorLostError, NotEnoughSlotsError, RankFailedError, RunError
from spark_hvd.runner.outcome.rows import FailureKind
from spark_hvd.runner.spark import session as on_spark
from spark_hvd.runner.spark.profiles import TaskResources
from spark_hvd.runner.spark.reach import unanswered
from spark_hvd.runner.spark.slots import task_slots
from spark_hvd.runner.stopping import check_stop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
_log = logging.getLogger(__name__)
_ANSWER = 3.0
"""Seconds that an executor gets to answer."""


def with_restarts(start: Callable[[int, RunError | None], T], max_restarts: int) -> T:
    """Call ``start(generation, loss)`` until it returns, with at most ``max_restarts`` repetitions.

    ``generation`` is the number of earlier calls, and ``loss`` the error that ended the last one.

    Raises:
        RunError: The error of the last start. It says how many restarts were made, if any.
    """
    loss: RunError | None = None
    for made in range(max_restarts + 1):
        try:
            return start(made, loss)
        except RunError as error:
            reason = reason_to_restart(error)
            if reason is None or made == max_restarts:
                if text := _note(error, made, max_restarts):
                    error.args = (f"{error}\n{text}", *error.args[1:])
                raise
            _log.warning("restart %d of %d: %s", made + 1, max_restarts, reason)
            loss = error
    raise AssertionError("unreachable")


def reason_to_restart(error: RunError) -> str | None:
    """Say in a line why a restart may help after ``error``; None if the same would happen again.

    A lost executor or process may be back the next time. An exception, an exit code or a timeout comes from the
    program.
    """
    if isinstance(error, ExecutorLostError):
        return str(error).splitlines()[0]
    if isinstance(error, RankFailedError) and error.first.kind in (FailureKind.SIGNAL, FailureKind.LOST):
        return f"rank {error.rank} on host {error.host}: {error.first.error}"
    return None


def _note(error: RunError, made: int, max_restarts: int) -> str:
    """Return the sentence about restarts for the last error."""
    if made:
        return f"This was after {made} restart{'s' if made > 1 else ''} (max_restarts={max_restarts})."
    if isinstance(error, ExecutorLostError):
        return (
            "fn does not run again unless you give max_restarts=, because it may have side effects. Give it if fn "
            "resumes from a checkpoint (hvd.checkpoint)."
        )
    return ""


def check_least(config: RunConfig, tasks: int) -> None:
    """Check that ``min_num_proc`` does not exceed a number of ranks that came from the cluster.

    Raises:
        ValueError: It does.
    """
    size = tasks * config.procs_per_task
    if config.min_num_proc is not None and config.min_num_proc > size:
        raise ValueError(f"min_num_proc={config.min_num_proc}: expected at most {size}, the ranks this run starts with")


def tasks_again(
    session: SparkSession, config: RunConfig, resources: TaskResources, allocation: SlotAllocation, loss: RunError
) -> int:
    """Return the number of rank tasks for which there is room after a loss, besides the feeders.

    It returns as soon as there is room for as many as before. Otherwise it waits up to ``start_timeout`` for executors
    to come back. If some do not answer, it waits longer, until Spark has noticed, which would place ranks on them.

    Raises:
        NotEnoughSlotsError: There is room for fewer ranks than ``min_num_proc``. Its cause is ``loss``.
    """
    begun = time.monotonic()
    each, wanted = config.procs_per_task, allocation.tasks
    least = wanted if config.min_num_proc is None else config.min_num_proc // each
    while True:
        executors = set(on_spark.executor_addresses(session).values())
        silent = unanswered(executors, _ANSWER)
        slots = task_slots(session, resources)  # after that, because Spark may drop a silent one meanwhile
        if slots is None:  # Spark Connect does not say
            return wanted
        if allocation.resources is not None:
            slots = slots_left(allocation.feeders, task_slots(session, allocation.resources) or 0, slots)
        if slots >= wanted and not silent:
            return wanted
        # If none answers, a firewall may protect all.
        longer = on_spark.loses_executors_after(session) if silent and silent < executors else 0.0
        waited = time.monotonic() - begun
        if on_spark.is_local(session) or waited > config.start_timeout + longer:
            break
        check_stop()
        time.sleep(0.2)
    if slots >= least:
        ranks = min(slots, wanted) * each
        _log.warning("continuing with %d of %d ranks: no more slots after %.0f s", ranks, wanted * each, waited)
        return min(slots, wanted)
    beside, fewer = (f" besides feeders={allocation.feeders}", " ranks or feeders") if allocation.feeders else ("", "")
    raise NotEnoughSlotsError(
        f"{slots * each} of {wanted * each} ranks find a slot{beside} {waited:.0f} s after a loss "
        f"(start_timeout={config.start_timeout:g}), but at least {least * each} are needed "
        f"(min_num_proc={config.min_num_proc}). Allow fewer{fewer}, give executors more time to come back, or find out "
        f"why they do not. The loss: {str(loss).splitlines()[0]}"
    ) from loss
