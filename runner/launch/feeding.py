"""The driver's side of a run's feeders: slots for them, their Spark job, and its end."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import zmq

from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.outcome.errors import ClusterError, NotEnoughSlotsError, RunError, StartTimeoutError
from spark_hvd.runner.spark import session as on_spark
from spark_hvd.runner.spark.entry import task_of
from spark_hvd.runner.spark.job import TaskJob
from spark_hvd.runner.spark.profiles import ResourceRequest, TaskResources, task_resources
from spark_hvd.runner.spark.slots import task_slots
from spark_hvd.runner.stopping import check_stop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_hvd.data.feeders.mapping import RowMap
    from spark_hvd.runner.launch.data import RunData

_log = logging.getLogger(__name__)
_SETTLE = 10.0
"""Seconds that executors get to register for the feeders, once there are enough for the ranks."""
_STARTS = 4
"""How often the feeders' job is started before its failure ends the run: as often as Spark tries a task on a cluster.
On a local master, Spark tries a task only once."""
_ASK_EVERY = 0.2
_GRACE, _KILL = 2.0, 10.0
"""Seconds that feeders get to end when they are told to, and after their job was cancelled."""


@dataclass(frozen=True)
class SlotAllocation:
    """The slots of ranks and feeders.

    Attributes:
        tasks: Number of Spark tasks of ranks.
        feeders: Number of Spark tasks of feeders.
        share: The feeders' share of the application's slots.
        resources: Resources of each feeder; None without feeders.
    """

    tasks: int
    feeders: int = 0
    share: Fraction = Fraction(0)
    resources: TaskResources | None = None


def allocate_slots(
    session: SparkSession, config: RunConfig, sets: RunData, tasks: int, of_ranks: TaskResources
) -> SlotAllocation:
    """Check that feeders find slots besides those of ``tasks`` rank tasks, for which there is room.

    If the number of ranks is open, ranks leave as much room as the feeders need.

    Raises:
        ValueError: feeders would have nothing to do.
        NotEnoughSlotsError: There are too few slots. The text has the numbers, and says what to change.
    """
    feeders = config.feeders
    if not feeders:
        return SlotAllocation(tasks)
    if not sets.maps:
        raise ValueError(
            f"feeders={feeders}: no data set of data= goes through a function. Give "
            'data={"train": spark_hvd.data.Mapped(rows, function)}, or leave feeders= out'
        )
    try:
        mine = task_resources(session, ResourceRequest(gpus_per_proc=0))
    except ClusterError:  # before PySpark 4, all stages of an application get the same number of GPUs
        mine = task_resources(session, ResourceRequest())
    deadline = time.monotonic() + min(config.start_timeout, _SETTLE)
    while True:
        slots, feeder_slots = task_slots(session, of_ranks), task_slots(session, mine)
        if slots is None or feeder_slots is None:  # Spark Connect does not say
            return SlotAllocation(tasks, feeders, resources=mine)
        share, left = Fraction(feeders, max(feeder_slots, 1)), slots_left(feeders, feeder_slots, slots)
        if left >= (1 if config.num_proc is None else tasks):
            return SlotAllocation(min(tasks, left), feeders, share, mine)
        if on_spark.is_local(session) or time.monotonic() > deadline:
            break
        check_stop()
        time.sleep(_ASK_EVERY)
    wanted = 1 if config.num_proc is None else tasks
    most = int((1 - Fraction(wanted, max(slots, 1))) * feeder_slots)
    fewer = f"feeders={most}" if most > 0 else "no feeders"
    raise NotEnoughSlotsError(
        f"num_proc={config.num_proc}, feeders={feeders}: {wanted + feeders} slots needed, {feeder_slots} available. "
        f"Each feeder takes a slot besides those of the ranks during the whole run. Ask for fewer, {fewer}, or "
        + (f'start the session with master("local[{wanted + feeders}]")' if on_spark.is_local(session) else _MORE)
    )


def slots_left(feeders: int, feeder_slots: int, slots: int) -> int:
    """Return how many of ``slots`` for rank tasks the feeders leave, if there are ``feeder_slots`` for feeders."""
    return max(0, int((1 - Fraction(feeders, max(feeder_slots, 1))) * slots))


_MORE = "give the application more executors or cores (spark.executor.instances, spark.executor.cores, spark.cores.max)"


class Feeding:
    """The feeders for one start of a run's ranks.

    Their job begins only when the ranks run, so that the barrier stage finds its slots free.

    Raises:
        ClusterError: This program cannot listen for them.
    """

    def __init__(
        self,
        session: SparkSession,
        config: RunConfig,
        maps: Mapping[str, RowMap],
        allocation: SlotAllocation,
        name: str,
        tag: str,
    ) -> None:
        from spark_hvd.data.feeders.directory import Directory

        self._session, self._config, self._maps, self._allocation = session, config, maps, allocation
        self._name, self._tag = name, f"{tag}.feeders"
        try:
            public, bind = on_spark.driver_hosts(session)
            self._directory = Directory(
                on_spark.address_of(bind), public, config.port_range, allocation.feeders, config.start_timeout
            )
        except (OSError, zmq.ZMQBaseError) as error:
            raise ClusterError(f"this program cannot listen for its feeders: {error}") from error
        self.address = self._directory.address
        """The address at which ranks find the feeders."""
        self._job: TaskJob | None = None
        self._started, self._next_look, self._deadline = 0, 0.0, 0.0

    def close(self) -> None:
        """End the feeders."""
        self._directory.end()
        try:
            if self._job is not None:
                try:
                    self._job.wait(_GRACE)
                finally:  # also after another Ctrl-C
                    if self._job.running:
                        self._job.cancel()
                        self._job.wait(_KILL)
        finally:
            self._directory.close()

    def look(self, ranks_run: Callable[[], bool]) -> None:
        """Start the job when ranks run, and again if it has failed; called many times a second.

        Raises:
            StartTimeoutError: No feeder has reported within ``start_timeout``.
            RunError: The job has failed too often. Its cause is Spark's error.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _ASK_EVERY
        if self._job is None:
            if ranks_run():
                self._start()
        elif not self._job.running:
            self._again(self._job.error)
        elif not self._directory.come and now > self._deadline:
            raise StartTimeoutError(
                f"none of {self._allocation.feeders} feeders reported within "
                f"start_timeout={self._config.start_timeout:g} s after the ranks had started. "
                "Each needs a task slot besides those of the ranks, and must reach this "
                f"program at {self.address.endpoint.host}: wait for the jobs that hold slots, ask for fewer feeders, "
                "or see spark.driver.host"
            )

    def _start(self) -> None:
        assert self._allocation.resources is not None
        from spark_hvd.runner.supervise.feeding import FeederSpec

        spec = FeederSpec(self._config, self.address, self._maps)
        self._started += 1
        self._deadline = time.monotonic() + self._config.start_timeout
        self._job = TaskJob(
            self._session,
            self._allocation.feeders,
            task_of("supervise.feeding", "run_feeder", pickle.dumps(spec), b""),
            f"spark_hvd: {self._allocation.feeders} feeders of {self._name}",
            self._tag,
            self._allocation.resources.profile,
            barrier=False,
        )

    def _again(self, error: Exception | None) -> None:
        reason = "they ended" if error is None else str(error).strip().partition("\n")[0]
        if self._started < _STARTS:
            _log.warning("restarting the feeders of this run (%d of %d): %s", self._started, _STARTS - 1, reason)
            self._start()
            return
        raise RunError(
            f"the Spark job of the feeders failed {self._started} times, the last time with: {reason}. Next: look for "
            "a process that was killed (memory, a crash in native code) in the executors' logs; try the function in "
            "run_local, where it runs in the ranks"
        ) from error
