"""Turns the end of an elastic run and its agents' reports into what the caller gets: values, or one exception."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spark_hvd.runner.elastic.agent import AgentReport
from spark_hvd.runner.elastic.membership.events import End, Verdict
from spark_hvd.runner.outcome.collect import value_of
from spark_hvd.runner.outcome.errors import (
    ElasticError,
    RankFailedError,
    ResetLimitError,
    RunError,
    StartTimeoutError,
    StateLostError,
    TooFewRanksError,
)
from spark_hvd.runner.outcome.payload import load_exception
from spark_hvd.runner.outcome.report import Where, failure_report
from spark_hvd.runner.outcome.rows import Failed
from spark_hvd.runner.watch.hang.verdict import HangVerdict

if TYPE_CHECKING:
    from spark_hvd.runner.elastic.hub import ElasticHub

_ERRORS: dict[End, type[ElasticError | RankFailedError]] = {
    End.TOO_FEW: TooFewRanksError,
    End.RESET_LIMIT: ResetLimitError,
    End.STATE_LOST: StateLostError,
    End.FAILED: RankFailedError,
}


def elastic_results(
    hub: ElasticHub,
    reports: Sequence[AgentReport],
    hang: HangVerdict | None = None,
    where: Callable[[], Where] | None = None,
) -> list[Any]:
    """Unpack the values that the ranks of the last generation returned.

    Args:
        hub: The run's hub, which knows how it ended, and has the failures.
        reports: The values of each agent's workers, as far as the hub does not have them.
        hang: The last verdict on a hang, for the error.
        where: Says where to look for details; called only if the run failed.

    Returns:
        The values in rank order.

    Raises:
        RankFailedError: Ranks failed, and continuing without them would not have helped.
        ElasticError: The run could not continue.
        StartTimeoutError: The run never began.
        RunError: A value is missing, or cannot be unpickled here.
    """
    verdict, kept = hub.verdict, hub.outcomes
    assert verdict is not None
    if verdict.end is End.NOT_STARTED:
        raise StartTimeoutError(verdict.text)
    if verdict.end is not End.DONE:
        opened = {worker: packed.open() for worker, packed in kept.items() if not packed.ok}
        failures = {worker: failed for worker, failed in opened.items() if isinstance(failed, Failed)}
        raise _error(verdict, failures, hub.culprit, hang, None if where is None else where())
    values = {**kept, **dict(item for each in reports for item in each.values)}
    missing = [rank for rank, worker in enumerate(verdict.ranks) if worker not in values]
    if missing:
        raise RunError(
            f"rank {missing[0]} had returned from fn, but Spark lost the executor and the value with it. Save what "
            "matters inside fn, for example in a checkpoint"
        )
    return [value_of(values[worker]) for worker in verdict.ranks]


def _error(
    verdict: Verdict,
    failures: dict[int, Failed],
    culprit: Failed | None,
    hang: HangVerdict | None,
    where: Where | None,
) -> ElasticError | RankFailedError:
    error_class = _ERRORS[verdict.end]
    first = None if verdict.culprit is None else failures.get(verdict.culprit)
    others = [failed for worker, failed in sorted(failures.items()) if worker != verdict.culprit]
    if first is None:
        return error_class(verdict.text, tuple(others if culprit is None else [culprit, *others]), hang)
    size = max(failed.rank for failed in failures.values()) + 1
    text = failure_report([first, *others], size, (), hang, where)
    cause, _, rest = text.partition("\n")
    error = error_class(f"{cause}\n{verdict.text}\n{rest}", (first, *others), hang)
    error.__cause__ = load_exception(first.exception, first.error)
    return error
