"""Where ranks run: a Spark cluster or this machine; the seam between estimators and the runner."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from spark_hvd.runner import run, run_local
from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.launch.run import tasks_of
from spark_hvd.runner.spark.session import active_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

R = TypeVar("R")

_turn = threading.Lock()
"""One training at a time: two barrier stages that together need more slots than there are would wait for each other's,
and with fewer each would slow the other down. A CrossValidator with parallelism above 1 fits from several threads."""


class Backend(Protocol):
    """Runs a function on ranks that form one world."""

    def num_processes(self) -> int:
        """Number of ranks that :meth:`run` starts."""
        ...

    def run(self, fn: Callable[..., R], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[R]:
        """Run ``fn`` on every rank and return its values in rank order; errors as of :func:`spark_hvd.run`."""
        ...


class SparkBackend(Backend):
    """Ranks in one barrier stage of the Spark application, by :func:`spark_hvd.run`.

    Args:
        num_proc: Number of ranks; None for as many as can run at once.
        spark: The session; None for the active one.
        options: Further keywords of :func:`spark_hvd.run`.
    """

    __module__ = "spark_hvd.estimators"

    def __init__(self, num_proc: int | None = None, *, spark: SparkSession | None = None, **options: Any) -> None:
        self._num_proc = num_proc
        self._spark = spark
        self._options = options

    def num_processes(self) -> int:
        """See base class.

        Raises:
            NotEnoughSlotsError: fewer tasks can run at once than were asked for.
        """
        config = RunConfig.of({**self._options, "num_proc": self._num_proc})
        return tasks_of(active_session(self._spark), config)[0] * config.procs_per_task

    def run(
        self,
        fn: Callable[..., R],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> list[R]:
        """See base class. Waits for other trainings that this process has under way; ``data`` is that of the run."""
        with _turn:
            return run(fn, args, kwargs, self._num_proc, spark=self._spark, data=data, **self._options)


class LocalBackend(Backend):
    """Ranks as processes of this machine, by :func:`spark_hvd.run_local`; for tests, and one large machine.

    Args:
        num_proc: Number of ranks.
        options: Further keywords of :func:`spark_hvd.run_local`.
    """

    __module__ = "spark_hvd.estimators"

    def __init__(self, num_proc: int = 2, **options: Any) -> None:
        self._num_proc = num_proc
        self._options = options

    def num_processes(self) -> int:
        """See base class."""
        return self._num_proc

    def run(self, fn: Callable[..., R], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[R]:
        """See base class. Waits for other trainings that this process has under way."""
        with _turn:
            return run_local(fn, args, kwargs, self._num_proc, **self._options)
