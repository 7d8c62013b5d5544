"""One start of a run's ranks on Spark: a hub, a barrier stage, and the results, or what ended it."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import zmq

from spark_hvd.runner.channel.hub import Hub
from spark_hvd.runner.channel.state import HubState
from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.launch.attend import Grace, attend
from spark_hvd.runner.launch.data import Given
from spark_hvd.runner.launch.monitor import Monitor
from spark_hvd.runner.outcome.collect import results
from spark_hvd.runner.outcome.errors import ClusterError, StartTimeoutError
from spark_hvd.runner.outcome.rows import from_rows
from spark_hvd.runner.spark import session as on_spark
from spark_hvd.runner.spark.entry import task_of
from spark_hvd.runner.spark.errors import silent, translate
from spark_hvd.runner.spark.job import TaskJob
from spark_hvd.runner.spark.profiles import TaskResources
from spark_hvd.runner.spark.reach import Reach
from spark_hvd.runner.supervise.processes import check_system
from spark_hvd.runner.supervise.task import TaskSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

H = TypeVar("H")
_log = logging.getLogger(__name__)
_STOP_GRACE = Grace(4.0, 1.0)
_UNHEARD = 20.0
"""Seconds that tasks get to be heard of. None has been, then none can reach us: they wait half of that."""


@dataclass(frozen=True)
class Attempt:
    """What is the same whenever the ranks of a run are started.

    Attributes:
        session: The Spark session.
        config: What was asked for.
        payload: The pickled call.
        name: Of the function, for Spark's UI.
        run_id: Unique name of the run.
        resources: What each task takes.
        monitor: Where output goes.
        data: What ranks are given.
    """

    session: SparkSession
    config: RunConfig
    payload: bytes
    name: str
    run_id: str
    resources: TaskResources
    monitor: Monitor
    data: Given

    def run(self, tasks: int, generation: int) -> list[Any]:
        """Start the ranks once, and return their values in rank order.

        Args:
            tasks: Number of Spark tasks.
            generation: How often they were started before.

        Raises:
            RunError: one of :func:`spark_hvd.run`.
            KeyboardInterrupt: after every rank has been stopped.
        """
        session, config, monitor = self.session, self.config, self.monitor
        size = tasks * config.procs_per_task
        rows = None
        if self.data.frames:
            from spark_hvd.runner.spark.input import InputRows

            rows = InputRows.of(self.data.frames, tasks)
        with ExitStack() as closing:
            local = on_spark.is_local(session)
            if local:
                check_system()
            if (hub := self._open_hub(size, None if local else on_spark.max_result_bytes(session))) is not None:
                closing.callback(hub.close)
            spool = closing.enter_context(on_spark.temporary_directory(session)) if local else None
            spec = TaskSpec(
                config,
                self.run_id,
                None if hub is None else hub.address,
                spool,
                may_share_gpus=self.resources.plan.may_share,
                generation=generation,
                sources=self.data.sources,
                schemas={} if rows is None else rows.schemas,
            )
            again = f", restart {generation}" if generation else ""
            job = TaskJob(
                session,
                tasks,
                task_of("supervise.task", "run_task", pickle.dumps(spec), self.payload, fed=rows is not None),
                f"spark_hvd: {self.name} on {size} ranks{again}",
                f"{self.run_id}.{generation}",
                self.resources.profile,
                input_frame=None if rows is None else rows.frame,
            )
            attend(job, hub, monitor, _STOP_GRACE, *([] if hub is None else [_look(job, hub, size, config)]))
            if job.error is not None:
                if hub is not None:  # Spark kills the other tasks in its own time; ours are told now
                    hub.stop("lost")
                    hub.wait_gone(_STOP_GRACE.ranks / 2)
                lost = None if hub is None else hub.lost
                raise (silent(lost) if lost else translate(job.error, size, job.placement())) from job.error
            order, values = ([], {}) if hub is None else (hub.snapshot()[1], hub.values())
            where = partial(job.where, size)
            return results(from_rows(job.rows, values), size, order, config.timeout, monitor.hang, where)

    def _open_hub(self, size: int, max_result_bytes: int | None) -> Hub | None:
        ports = self.config.port_range
        state = HubState(size, timeout=self.config.timeout, may_fall_back=True, max_result_bytes=max_result_bytes)
        try:
            return open_hub(self.session, lambda bind, public: Hub(state, bind, public, self.monitor, ports))
        except ClusterError as error:
            _log.warning("%s. Training goes on, but the output of the ranks stays in the executors' logs", error)
            return None


def open_hub(session: SparkSession, make: Callable[[str, str], H]) -> H:
    """Open a hub on this program's side of a session's network.

    Args:
        session: The Spark session.
        make: Given the address to listen on, and the one that tasks connect to.

    Raises:
        ClusterError: this program cannot listen there, or knows no address for executors.
    """
    bind = None
    try:
        public, bind = on_spark.driver_hosts(session)
        return make(on_spark.address_of(bind), public)
    except (OSError, zmq.ZMQBaseError) as error:
        if on_spark.is_connect(session):
            where = "" if bind is None else f" on {bind}, by which it reaches the Spark Connect server"
            raise ClusterError(f"this program cannot listen{where}: {error}") from error
        raise ClusterError(
            f"the driver cannot listen on {bind} ({error}): set spark.driver.bindAddress to an address of this machine"
        ) from error


def _look(job: TaskJob, hub: Hub, size: int, config: RunConfig) -> Callable[[], None]:
    """What may end a run early: ranks that are lost, cannot come up, or take too long to; see :func:`attend`."""
    deadline = time.monotonic() + config.start_timeout
    warned = False
    reach = Reach(size, job.placement)
    next_look, placed_at = 0.0, None

    def meet_elsewhere(now: float) -> bool:
        """Whether tasks run that cannot tell us so, since none of them reaches us."""
        nonlocal next_look, placed_at
        if now >= next_look and placed_at is None:
            next_look = now + 1
            placed = job.placed
            if placed or (placed is None and now > deadline):
                placed_at = now if placed else 0.0
        return placed_at is not None and now - placed_at > _UNHEARD

    def look() -> None:
        nonlocal warned, deadline
        if (lost := hub.lost) is not None:
            raise silent(lost)
        started = hub.snapshot()[0]
        if job.fed and not started and job.placement() is None:  # their input is still computed
            deadline = time.monotonic() + config.start_timeout
            return
        if len(started) < size and (missing := reach.missing(started)) is not None:
            raise silent(missing)
        without_us = hub.fell_back or (not started and meet_elsewhere(time.monotonic()))
        if without_us and not warned:
            warned = True
            _log.warning(
                "ranks %s cannot reach this program at %s:%d; training goes on, but their output stays in the "
                "executors' logs",
                sorted(set(range(size)) - started),
                hub.address.host,
                hub.address.port,
            )
        if len(started) < size and not without_us and time.monotonic() > deadline:
            raise StartTimeoutError(
                f"{len(started)} of {size} ranks had started after start_timeout={config.start_timeout:g} s. "
                f"{reach.absent(started)}All ranks start together, when enough task slots are free: wait for the jobs "
                "that hold them, ask for fewer ranks, or give a larger start_timeout=."
            )

    return look
