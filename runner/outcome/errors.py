"""The exceptions that a run raises in the program that called it."""

from __future__ import annotations

from typing import Any

from spark_hvd.runner.outcome.rows import Failed
from spark_hvd.runner.terminal import harmless
from spark_hvd.runner.tracebacks import Brief
from spark_hvd.runner.watch.hang.verdict import HangVerdict


class RunError(Brief, RuntimeError):
    """Base of all errors of a run after its arguments were accepted."""

    __module__ = "spark_hvd.runner"

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls.__module__ = RunError.__module__

    def __str__(self) -> str:
        return harmless(super().__str__())  # the text quotes ranks, and people read it in a terminal


class ClusterError(RunError):
    """The Spark application cannot run a barrier stage as it is configured; the message names the setting."""


class NotEnoughSlotsError(ClusterError):
    """Fewer tasks can run at the same time than ranks were requested."""


class SetupError(ClusterError):
    """An executor lacks something that ranks need: spark_hvd, torch, or one of the user's modules."""


class StartTimeoutError(RunError):
    """Not all ranks had started within ``start_timeout``."""


class ExecutorLostError(RunError):
    """Spark lost an executor during the run. fn may have had side effects, so only ``max_restarts`` runs it again."""


class HubError(RunError):
    """The hub between the driver and its tasks failed, because of a malformed message or a bug."""


def check_hub(failure: Exception | None) -> None:
    """Raise the failure of a hub, if it has failed.

    Raises:
        HubError: With the hub's own text.
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
    """A rank failed. ``__cause__`` is its own exception, if that could be pickled.

    Attributes:
        failures: Every rank without a value: the cause first, then its echoes and stopped ranks.
        hang: Which ranks waited for which, with the stacks of all, if they waited until the end; otherwise None.
    """

    @property
    def first(self) -> Failed:
        """The first failure that is not an echo of another."""
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
    """The run did not end within ``timeout``; the message has the stacks of every rank that was running.

    Attributes:
        failures: Every rank without a value.
        hang: As in :class:`RankFailedError`.
    """


class ElasticError(_FailuresError):
    """An elastic run could not continue. ``__cause__`` is the exception of the rank that failed last, if one did.

    Attributes:
        failures: Ranks that failed during the run, the decisive one first.
        hang: As in :class:`RankFailedError`.
    """


class TooFewRanksError(ElasticError):
    """Fewer than ``min_num_proc`` ranks were left for ``elastic_timeout``."""


class ResetLimitError(ElasticError):
    """More ranks were lost than ``reset_limit`` allows."""


class StateLostError(ElasticError):
    """All ranks that had a committed state were lost, so to start again would repeat the work from the beginning."""
