"""Where ranks run, on a Spark cluster or on this machine: the interface between estimators and the runner."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from spark_hvd.runner import run, run_elastic, run_elastic_local, run_local
from spark_hvd.runner.config import Reporting, RunConfig
from spark_hvd.runner.elastic.config import ElasticConfig
from spark_hvd.runner.launch.arguments import adapted
from spark_hvd.runner.launch.prestart import torch_loading
from spark_hvd.runner.launch.run import tasks_of
from spark_hvd.runner.spark.job import inheriting
from spark_hvd.runner.spark.profiles import ResourceRequest, task_resources
from spark_hvd.runner.spark.session import active_session, is_connect
from spark_hvd.runner.spark.slots import wait_for_slots
from spark_hvd.runner.watch.tracking import Tracker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

R = TypeVar("R")

_one_training = threading.Lock()
"""Held by one training at a time if nobody counts slots: on this machine, with Spark Connect, and for elastic runs,
which take every slot they find. A CrossValidator with parallelism above 1 fits from several threads."""


class Backend(Protocol):
    """Runs a function on ranks that form one world."""

    def num_processes(self) -> int:
        """Return the number of ranks that :meth:`run` starts."""

    def run(self, fn: Callable[..., R], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[R]:
        """Run ``fn`` on every rank and return its values in rank order; raises the errors of :func:`spark_hvd.run`."""


def max_num_proc_of(backend: Backend) -> int | None:
    """Return the maximum number of ranks of an elastic backend; None for a backend with a fixed number."""
    most: int | None = getattr(backend, "max_num_proc", None)
    return most


def tracker_of(backend: Backend) -> Any:
    """Return the tracker that records a backend's runs; None if there is none."""
    options = getattr(backend, "_options", {})
    return options.get("tracker") or getattr(options.get("reporting"), "tracker", None)


class SparkBackend(Backend):
    """Ranks in one barrier stage of the Spark application, by :func:`spark_hvd.run`.

    Args:
        num_proc: Number of ranks; None for as many as can run at the same time.
        max_num_proc: Makes the run elastic, by :func:`spark_hvd.run_elastic`, with at most this number of ranks.
        spark: The session; None for the active one.
        options: Other keywords of the function that runs the ranks.
    """

    __module__ = "spark_hvd.estimators"

    def __init__(
        self,
        num_proc: int | None = None,
        *,
        max_num_proc: int | None = None,
        spark: SparkSession | None = None,
        **options: Any,
    ) -> None:
        self.max_num_proc = max_num_proc
        self._num_proc = num_proc
        self._spark = spark
        self._options = options

    def num_processes(self) -> int:
        """See base class; for an elastic run, the number of ranks at the start.

        Raises:
            ValueError: The numbers contradict each other.
            NotEnoughSlotsError: fewer tasks can run at the same time than requested.
        """
        session, config = active_session(self._spark), self._config()
        if isinstance(config, RunConfig):
            return tasks_of(session, config)[0] * config.procs_per_task
        if self._num_proc is not None:
            return self._num_proc
        assert isinstance(config, ElasticConfig)
        assert self.max_num_proc is not None
        resources = task_resources(session, ResourceRequest(config.cpus_per_proc, config.gpus_per_proc, 1))
        slots = wait_for_slots(session, None, config.start_timeout, resources)
        return max(min(slots, self.max_num_proc), config.min_num_proc or 1)

    def of(self, num_proc: int) -> SparkBackend:
        """Return the same backend with another number of ranks."""
        return SparkBackend(num_proc, max_num_proc=self.max_num_proc, spark=self._spark, **self._options)

    def torch_loading(self) -> AbstractContextManager[None]:
        """Return a context in which processes for the next run's ranks start, if possible."""
        return torch_loading(active_session(self._spark), adapted(self._config()).env)

    def _config(self) -> RunConfig | ElasticConfig:
        options = {**self._options, "num_proc": self._num_proc}
        if self.max_num_proc is None:
            return RunConfig.of(options)
        return ElasticConfig.of({**options, "max_num_proc": self.max_num_proc})

    def run(
        self,
        fn: Callable[..., R],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> list[R]:
        """See base class. Waits for other runs of this process if there are too few slots for both.

        Args:
            fn: See base class.
            args: See base class.
            kwargs: See base class.
            data: The run's ``data=``.
        """
        options = {"spark": self._spark, "data": data, **self._options}
        if self.max_num_proc is None and not is_connect(active_session(self._spark)):  # runs share the slots
            return run(fn, args, kwargs, self._num_proc, **options)
        with _one_training:
            if self.max_num_proc is None:
                return run(fn, args, kwargs, self._num_proc, **options)
            return run_elastic(fn, args, kwargs, self.num_processes(), max_num_proc=self.max_num_proc, **options)

    def run_in_background(self, fn: Callable[..., R], args: Sequence[Any], num_proc: int, tracker: Tracker) -> list[R]:
        """Run ``fn`` on other ranks, at the same time as :meth:`run`, from another thread; wait for slots."""
        return run(fn, args, None, num_proc, spark=self._spark, **_background_options(self._options, tracker))

    def inheriting(self, fn: Callable[[], None]) -> Callable[[], None]:
        """Wrap ``fn`` for another thread, with this thread's local properties of Spark."""
        return inheriting(active_session(self._spark), fn)


class LocalBackend(Backend):
    """Ranks as processes of this machine, by :func:`spark_hvd.run_local`; for tests, and for one large machine.

    Args:
        num_proc: Number of ranks.
        max_num_proc: Makes the run elastic, by :func:`spark_hvd.run_elastic_local`: lost ranks are replaced while the
            others continue.
        options: Other keywords of the function that runs the ranks.
    """

    __module__ = "spark_hvd.estimators"

    def __init__(self, num_proc: int = 2, *, max_num_proc: int | None = None, **options: Any) -> None:
        self.max_num_proc = max_num_proc
        self._num_proc = num_proc
        self._options = options

    def num_processes(self) -> int:
        return self._num_proc

    def run(self, fn: Callable[..., R], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[R]:
        """See base class. Waits for other trainings of this process."""
        with _one_training:
            if self.max_num_proc is None:
                return run_local(fn, args, kwargs, self._num_proc, **self._options)
            return run_elastic_local(fn, args, kwargs, self._num_proc, max_num_proc=self.max_num_proc, **self._options)

    def run_in_background(self, fn: Callable[..., R], args: Sequence[Any], num_proc: int, tracker: Tracker) -> list[R]:
        """Run ``fn`` on other ranks, at the same time as :meth:`run`, from another thread."""
        return run_local(fn, args, None, num_proc, **_background_options(self._options, tracker))

    def inheriting(self, fn: Callable[[], None]) -> Callable[[], None]:
        """Return ``fn`` for another thread, unchanged."""
        return fn


_INHERITED = ("backend", "env", "start_timeout", "network", "cpus_per_proc", "gpus_per_proc")
"""Options that a validation in the background takes over from the training."""


def _background_options(options: Mapping[str, Any], tracker: Tracker) -> dict[str, Any]:
    inherited = {name: options[name] for name in _INHERITED if name in options}
    return {**inherited, "verbose": 0, "reporting": Reporting(progress="off", tracker=tracker, page=False)}
