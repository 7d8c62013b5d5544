"""``run``: runs a function on every rank of a Spark barrier stage, and returns the values in rank order."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

from spark_hvd.runner.config import Network, Reporting, RunConfig
from spark_hvd.runner.launch.arguments import adapted, launcher
from spark_hvd.runner.launch.attempt import Attempt
from spark_hvd.runner.launch.data import run_data_of
from spark_hvd.runner.launch.feeding import allocate_slots
from spark_hvd.runner.launch.monitor import make_monitor
from spark_hvd.runner.launch.prestart import torch_loading
from spark_hvd.runner.launch.restart import check_least, tasks_again, with_restarts
from spark_hvd.runner.launch.result import RunResult
from spark_hvd.runner.outcome.errors import RunError
from spark_hvd.runner.outcome.payload import dump_call, name_of
from spark_hvd.runner.spark import session as on_spark
from spark_hvd.runner.spark.profiles import ResourceRequest, TaskResources, task_resources
from spark_hvd.runner.spark.slots import task_slots, wait_for_slots
from spark_hvd.runner.stopping import check_stop
from spark_hvd.runner.tracebacks import briefly

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)
_LOOK_EVERY = 0.1


class SlotShares:
    """Shares the slots of a Spark application among the runs of one program: a run waits until enough are free.

    Spark would make it wait, too, but only after its processes have started, and within its ``start_timeout``. Runs are
    served in order, so large runs do not starve.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._free = Fraction(1)
        self._queue: list[object] = []
        self._threads: list[int] = []
        """The threads of the runs that hold slots."""
        self._warned = False

    @contextmanager
    def held(self, tasks: int, slots: int | None, more: Fraction = Fraction(0)) -> Iterator[None]:
        """Wait until slots for this run are free, and hold them.

        Tasks of different runs differ in cores and GPUs, so this compares shares of the slots. If ``slots`` is None, it
        does not wait. ``more`` is the share of the run's other tasks.

        Raises:
            KeyboardInterrupt: see :mod:`spark_hvd.runner.stopping`.
        """
        share = Fraction(0) if slots is None else min(Fraction(1), Fraction(tasks, max(slots, 1)) + more)
        me, thread = object(), threading.get_ident()
        with self._changed:
            if thread in self._threads:  # a run within a run, for example in a tracker, would wait forever
                share = Fraction(0)
            self._queue.append(me)
            try:
                if not self._may(me, share):
                    _log.log(
                        logging.INFO if self._warned else logging.WARNING,
                        "a run waits for %d of the %s slots, which other runs of this program hold; it starts once "
                        "they are free, and Ctrl-C ends it",
                        tasks,
                        slots,
                    )
                    self._warned = True
                while not self._may(me, share):
                    self._changed.wait(_LOOK_EVERY)
                    check_stop()
                self._free -= share
                self._threads.append(thread)
            finally:
                self._queue.remove(me)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += share
                self._threads.remove(thread)
                self._changed.notify_all()

    def _may(self, me: object, share: Fraction) -> bool:
        return share == 0 or (self._queue[0] is me and share <= self._free)


slot_shares = SlotShares()
"""The shares of this program, which has one Spark application at a time."""


R = TypeVar("R")


@launcher(RunConfig)
@briefly
def run(
    config: RunConfig,
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    data: Mapping[str, Any] | None = None,
    feeders: int = 0,
    spark: SparkSession | None = None,
    backend: str | None = None,
    procs_per_task: int = 1,
    env: Mapping[str, str | None] | None = None,
    start_timeout: float = 600.0,
    timeout: float | None = None,
    verbose: int = 1,
    seed: int | None = None,
    cpus_per_proc: int | None = None,
    gpus_per_proc: int | None = None,
    max_restarts: int = 0,
    min_num_proc: int | None = None,
    network: Network | None = None,
    reporting: Reporting | None = None,
) -> RunResult[R]:
    """Run ``fn(*args, **kwargs)`` on ``num_proc`` ranks of the Spark cluster, all at the same time.

    Each rank is a separate process, a child of a task of one barrier stage. When fn starts, the ranks are connected:
    ``import spark_hvd.torch as hvd`` works at once, and the default process group of ``torch.distributed`` is
    initialised. Ranks on the same host have consecutive numbers.

    fn, its arguments and its return values are pickled by cloudpickle, so functions and classes defined in a notebook
    or script work.

    Returns:
        The return values of fn, in rank order: a list that also records how the run went.

    Raises:
        ValueError, TypeError: An argument is wrong; nothing was started.
        UnpicklableError: fn or an argument cannot be pickled; the message names the part. Nothing was started.
        ClusterError: The application cannot run this (no session, too few slots, cores or GPUs, dynamic allocation,
            something missing on an executor).
        StartTimeoutError: Not all ranks started within ``start_timeout``.
        RankFailedError: A rank raised, exited or was killed; has its traceback, host and last output.
        RunTimeoutError: ``timeout`` expired.
        ExecutorLostError: Spark lost an executor, and no restart was left.
        HubError: The hub between ranks and driver failed.
        KeyboardInterrupt: after every rank has been stopped.
    """
    config = adapted(config)
    sets = run_data_of(data)
    payload = dump_call(fn, args, kwargs or {})
    session = on_spark.active_session(spark)
    sets = sets.read_by(session)
    on_spark.check_barrier_possible(session)
    tasks, resources = tasks_of(session, config)
    allocation = allocate_slots(session, config, sets, tasks, resources)
    tasks = allocation.tasks
    check_least(config, tasks)
    name, run_id = name_of(fn), f"spark_hvd-{uuid.uuid4().hex[:12]}"
    with (
        slot_shares.held(tasks, task_slots(session, resources), allocation.share),
        torch_loading(session, config.env),
        make_monitor(config, fn, tasks * config.procs_per_task) as monitor,
    ):
        sets = sets.in_spark(session)
        attempt = Attempt(session, config, payload, name, run_id, resources, monitor, sets, allocation)

        def start(generation: int, lost: RunError | None) -> list[R]:
            number = tasks if lost is None else tasks_again(session, config, resources, allocation, lost)
            return attempt.run(number, generation)

        return monitor.result(with_restarts(start, config.max_restarts))


def tasks_of(session: SparkSession, config: RunConfig) -> tuple[int, TaskResources]:
    """Wait for room for a run, and return the number of its tasks and the resources of each.

    Raises:
        ClusterError: The application cannot provide them; NotEnoughSlotsError if there are too few slots.
    """
    request = ResourceRequest(config.cpus_per_proc, config.gpus_per_proc, config.procs_per_task)
    resources = task_resources(session, request)
    return wait_for_slots(session, config.num_tasks, config.start_timeout, resources), resources
