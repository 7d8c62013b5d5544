"""One start of a run's ranks on Spark: a hub, a barrier stage, and the results, or what ended it."""

from __future__ import annotations

import logging
import pickle
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from spark_hvd.runner.channel.hub import Hub
from spark_hvd.runner.channel.state import HubState
from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.launch.monitor import Monitor
from spark_hvd.runner.outcome.collect import results
from spark_hvd.runner.outcome.errors import RunError, StartTimeoutError, check_hub
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

_log = logging.getLogger(__name__)
_STOP_GRACE = 4.0
"""Seconds that ranks get to end after a stop before Spark is asked to kill the tasks."""


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
    """

    session: SparkSession
    config: RunConfig
    payload: bytes
    name: str
    run_id: str
    resources: TaskResources
    monitor: Monitor

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
        with ExitStack() as closing:
            local = on_spark.is_local(session)
            if local:
                check_system()
            hub = _open_hub(session, size, config, monitor, None if local else on_spark.max_result_bytes(session))
            if hub is not None:
                closing.callback(hub.close)
                monitor.ask(hub)
            spool = closing.enter_context(on_spark.temporary_directory(session)) if local else None
            spec = TaskSpec(
                config,
                self.run_id,
                None if hub is None else hub.address,
                spool,
                may_share_gpus=self.resources.plan.may_share,
                generation=generation,
            )
            again = f", restart {generation}" if generation else ""
            job = TaskJob(
                session,
                tasks,
                task_of("supervise.task", "run_task", pickle.dumps(spec), self.payload),
                f"spark_hvd: {self.name} on {size} ranks{again}",
                f"{self.run_id}.{generation}",
                self.resources.profile,
            )
            _attend(job, hub, size, config, monitor)
            monitor.flush()
            if hub is not None:
                check_hub(hub.failure)  # the ranks may have been stopped before anybody looked
            if job.error is not None:
                if hub is not None:  # Spark kills the other tasks in its own time; ours are told now
                    hub.stop("lost")
                    hub.wait_gone(_STOP_GRACE / 2)
                lost = None if hub is None else hub.lost
                raise (silent(lost) if lost else translate(job.error, size, job.placement())) from job.error
            order = [] if hub is None else hub.snapshot()[1]
            where = partial(job.where, size)
            return results(from_rows(job.rows), size, order, config.timeout, monitor.hang, where)


def _open_hub(
    session: SparkSession, size: int, config: RunConfig, monitor: Monitor, max_result_bytes: int | None
) -> Hub | None:
    if on_spark.is_connect(session):
        _log.info("Spark Connect: ranks meet at rank 0; their output stays in the executors' logs")
        return None
    public, bind = on_spark.driver_hosts(session)
    state = HubState(size, timeout=config.timeout, may_fall_back=True, max_result_bytes=max_result_bytes)
    try:
        return Hub(state, on_spark.address_of(bind), public, monitor, config.port_range)
    except (OSError, zmq.ZMQBaseError) as error:
        _log.warning(
            "the driver cannot listen on %s (%s): set spark.driver.bindAddress to an address of this machine. Training "
            "goes on, but the output of the ranks stays in the executors' logs",
            bind,
            error,
        )
        return None


def _attend(job: TaskJob, hub: Hub | None, size: int, config: RunConfig, monitor: Monitor) -> None:
    """Stay with the job until it has ended: print, watch the start timeout, pass on Ctrl-C."""
    deadline = time.monotonic() + config.start_timeout
    warned = False
    reach = Reach(size, job.placement)
    try:
        while job.running:
            job.wait(0.02)
            monitor.flush()
            if hub is None:
                continue
            if hub.failure is not None:
                _end(job, hub, "lost")
                check_hub(hub.failure)
            if (lost := hub.lost) is not None:
                _end(job, hub, "lost")
                raise silent(lost)
            started = hub.snapshot()[0]
            if len(started) < size and (missing := reach.missing(started)) is not None:
                _end(job, hub, "lost")
                raise silent(missing)
            if hub.fell_back and not warned:
                warned = True
                _log.warning(
                    "ranks %s cannot reach the driver at %s:%d; training goes on, but their output stays in the "
                    "executors' logs",
                    sorted(set(range(size)) - started),
                    hub.address.host,
                    hub.address.port,
                )
            if len(started) < size and not hub.fell_back and time.monotonic() > deadline:
                absent = reach.absent(started)
                _end(job, hub, "start")
                raise StartTimeoutError(
                    f"{len(started)} of {size} ranks had started after start_timeout={config.start_timeout:g} s. "
                    f"{absent}All ranks start together, when enough task slots are free: wait for the jobs that hold "
                    "them, ask for fewer ranks, or give a larger start_timeout=."
                )
    except KeyboardInterrupt:
        _end(job, hub, "interrupt")
        monitor.flush()
        raise
    except RunError:
        raise
    except BaseException:  # a stream that cannot be written to, for example
        _end(job, hub, "interrupt")
        raise


def _end(job: TaskJob, hub: Hub | None, reason: str) -> None:
    """Stop the ranks, then, if that does not end the job, have Spark kill the tasks."""
    if hub is not None:
        hub.stop(reason)
        hub.wait_gone(_STOP_GRACE)
        job.wait(1)
    if job.running:
        job.cancel()
        job.wait(10)
