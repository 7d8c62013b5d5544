"""Turns the ranks' outcomes into the result for the caller: a list of values, or one exception."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spark_hvd.runner.outcome.endings import rank_failures
from spark_hvd.runner.outcome.errors import RankFailedError, RunError, RunTimeoutError
from spark_hvd.runner.outcome.payload import load_exception
from spark_hvd.runner.outcome.report import Where, failure_report, timeout_report
from spark_hvd.runner.outcome.rows import Failed, FailureKind, PickledOutcome
from spark_hvd.runner.watch.hang.verdict import HangVerdict


def results(
    packed: Sequence[PickledOutcome],
    size: int,
    order: Sequence[int],
    timeout: float | None,
    hang: HangVerdict | None = None,
    where: Callable[[], Where] | None = None,
) -> list[Any]:
    """Unpack outcomes. ``order`` has the ranks of failures in order of arrival; ``where`` is called only for failures.

    Returns:
        The values in rank order.

    Raises:
        RankFailedError: at least one rank failed. Its cause is the rank's own exception, if that could be pickled.
        RunTimeoutError: The run took longer than ``timeout``.
        RunError: An outcome is missing, or a value cannot be unpickled here.
    """
    failures = [outcome for item in packed if not item.ok and isinstance(outcome := item.open(), Failed)]
    if failures:
        finished = [item.rank for item in packed if item.ok]
        places = None if where is None else where()
        failures = rank_failures(failures if places is None else places.place(failures), order)
        if failures[0].kind is FailureKind.TIMEOUT:
            assert timeout is not None
            raise RunTimeoutError(timeout_report(failures, size, timeout, hang, places), tuple(failures), hang)
        error = RankFailedError(failure_report(failures, size, finished, hang, places), tuple(failures), hang)
        raise error from load_exception(failures[0].exception, failures[0].error)
    if [item.rank for item in packed] != list(range(size)):
        raise RunError(f"Spark returned the values of ranks {[item.rank for item in packed]}, expected 0..{size - 1}")
    return [value_of(item) for item in packed]


def value_of(item: PickledOutcome) -> Any:
    """Return the value of a rank that has one.

    Raises:
        RunError: It cannot be unpickled here.
    """
    try:
        outcome = item.open()
    except Exception as error:
        raise RunError(
            f"the value of rank {item.rank} ({len(item.data)} bytes) cannot be unpickled here: "
            f"{type(error).__name__}: {error}. Install the ranks' packages on the driver, too, or return plain data."
        ) from error
    assert not isinstance(outcome, Failed)
    return outcome.value
