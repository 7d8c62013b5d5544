"""The exceptions that a run raises in the program that called it."""

from __future__ import annotations

from typing import Any

from spark_hvd.runner.outcome.rows import Failed
from spark_hvd.runner.terminal import harmless
from spark_hvd.runner.tracebacks import Brief
from spark_hvd.runner.watch.hang.verdict import HangVerdict


class RunError(Brief, RuntimeError):
    """Base of everything that can go wrong with a run once its arguments are accepted."""

    __module__ = "spark_hvd.runner"

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls.__module__ = RunError.__module__

    def __str__(self) -> str:
        return harmless(super().__str__())  # it quotes what ranks said, and is mostly read in a terminal


class ClusterError(RunError):
    """The Spark application cannot run a barrier stage as it is configured; the message names the setting."""


class NotEnoughSlotsError(ClusterError):
    """Fewer tasks can run at once than ranks were asked for."""


class SetupError(ClusterError):
    """An executor lacks something that ranks need: spark_hvd, torch, a module of the user's."""


class StartTimeoutError(RunError):
    """Not all ranks had started within ``start_timeout``."""


class ExecutorLostError(RunError):
    """Spark lost an executor during the run. fn is not run again but by ``max_restarts``: it may have had effects."""


class HubError(RunError):
    """The hub, through which the driver and its tasks speak, has failed: on a malformed message, or by a defect."""


def check_hub(failure: Exception | None) -> None:
    """Raise what has ended a hub's work, if anything has.

    Raises:
        HubError: with the hub's own text.
    """
    if failure is not None:
        raise HubError(str(failure)) from failure.__cause__


class ResultTooLargeError(RunError):
    """The values returned by the ranks exceed what Spark may collect."""


class _FailuresError(RunError):
    def __init__(self, message: str, failures: tuple[Failed, ...], hang: HangVerdict | None = None) -> None:
        super().__init__(message)
        self.failures = failures
        self.hang = hang

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.failures, self.hang)


class RankFailedError(_FailuresError):
    """A rank failed. ``__cause__`` is its own exception, where that could be pickled.

    Attributes:
        failures: Every rank without a value, the first cause first, echoes of it and stopped ranks after it.
        hang: Which ranks waited for which, with the stacks of all, if they did so to the end; else None.
    """

    @property
    def first(self) -> Failed:
        """The failure that came first and is no echo of another."""
        return self.failures[0]

    @property
    def rank(self) -> int:
        """Rank of the first failure."""
        return self.first.rank

    @property
    def host(self) -> str:
        """Host of the first failure."""
        return self.first.host


class RunTimeoutError(_FailuresError):
    """The run was still going when ``timeout`` was over; the message has the stacks of every rank that was running.

    Attributes:
        failures: Every rank without a value.
        hang: As of :class:`RankFailedError`.
    """


class ElasticError(_FailuresError):
    """An elastic run could not go on. ``__cause__`` is the exception of the rank that failed last, if one did.

    Attributes:
        failures: Ranks that failed in the course of the run, the one that decided first.
        hang: As of :class:`RankFailedError`.
    """


class TooFewRanksError(ElasticError):
    """Fewer than ``min_num_proc`` ranks were left for ``elastic_timeout``."""


class ResetLimitError(ElasticError):
    """More ranks were lost than ``reset_limit`` allows."""


class StateLostError(ElasticError):
    """All ranks that had the state were lost, and it had been committed: starting anew would lose what was done."""
