"""One start of a run's ranks on Spark: a hub, a barrier stage, and the results or the error."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import zmq

from spark_hvd.runner.channel.hub import Hub
from spark_hvd.runner.channel.state import FALLBACK_AFTER, FALLBACK_AFTER_HERE, HubState
from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.launch.attend import Grace, attend
from spark_hvd.runner.launch.data import RunData
from spark_hvd.runner.launch.feeding import Feeding, SlotAllocation
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
"""Seconds without a report from any task after which we warn; after three times that, the tasks count as cut off."""
_ASK_EVERY = 0.2
"""Seconds between two questions to Spark whether the ranks' input has been computed."""
_PATIENCE_HERE = 3
"""Factor for that time on a local master, where a silent task is slow rather than cut off."""


@dataclass(frozen=True)
class Attempt:
    """The settings that are the same for every start of a run's ranks."""

    session: SparkSession
    config: RunConfig
    payload: bytes
    name: str
    run_id: str
    resources: TaskResources
    monitor: Monitor
    data: RunData
    allocation: SlotAllocation

    def run(self, tasks: int, generation: int) -> list[Any]:
        """Start the ranks once, and return their values in rank order.

        Raises:
            RunError: As raised by :func:`spark_hvd.run`.
            DataError: The DataFrames have no rows, so Spark has started no ranks.
            KeyboardInterrupt: after every rank has been stopped.
        """
        session, config, monitor = self.session, self.config, self.monitor
        size, tag = tasks * config.procs_per_task, f"{self.run_id}.{generation}"
        rows = None
        if self.data.frames:
            from spark_hvd.runner.spark.input import InputRows

            rows = InputRows.of(self.data.frames, tasks)
        with ExitStack() as closing:
            local = on_spark.is_local(session)
            if local:
                check_system()
            if (hub := self._open_hub(size, local)) is not None:
                closing.callback(hub.close)
            feeding = None
            if self.allocation.feeders:
                feeding = Feeding(session, config, self.data.maps, self.allocation, self.name, tag)
                closing.callback(feeding.close)
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
                maps=self.data.maps,
                feed=None if feeding is None else feeding.address,
            )
            again = f", restart {generation}" if generation else ""
            job = TaskJob(
                session,
                tasks,
                task_of(
                    "supervise.task",
                    "run_task",
                    pickle.dumps(spec),
                    self.payload,
                    spool=spool,
                    has_input=rows is not None,
                ),
                f"spark_hvd: {self.name} on {size} ranks{again}",
                tag,
                self.resources.profile,
                input_frame=None if rows is None else rows.frame,
            )
            looks = [_look(job, hub, size, config, local)]
            if feeding is not None:
                looks.append(partial(feeding.look, lambda: bool(hub and hub.snapshot()[0]) or bool(job.placed)))
            attend(job, hub, monitor, _STOP_GRACE, lambda: _each(looks))
            if job.error is not None:
                if hub is not None:  # tell the other tasks now, because Spark takes its time to kill them
                    hub.stop("lost")
                    hub.wait_gone(_STOP_GRACE.ranks / 2)
                lost = None if hub is None else hub.lost
                raise (silent(lost) if lost else translate(job.error, size, job.placement())) from job.error
            if rows is not None and not job.rows:  # Spark 3.5 runs no tasks if the input is empty
                from spark_hvd.data.loader import too_few
                from spark_hvd.data.readers.errors import DataError

                raise DataError(too_few(next(iter(self.data.frames)), 0, size))
            order, values = ([], {}) if hub is None else (hub.snapshot()[1], hub.values())
            where = partial(job.where, size)
            return results(from_rows(job.rows, values), size, order, config.timeout, monitor.hang, where)

    def _open_hub(self, size: int, local: bool) -> Hub | None:
        ports = self.config.port_range
        state = HubState(
            size,
            timeout=self.config.timeout,
            may_fall_back=True,
            max_result_bytes=None if local else on_spark.max_result_bytes(self.session),
            fallback_after=FALLBACK_AFTER_HERE if local else FALLBACK_AFTER,
        )
        try:
            return open_hub(self.session, lambda bind, public: Hub(state, bind, public, self.monitor.hear, ports))
        except ClusterError as error:
            _log.warning("%s. Training continues, but the ranks' output stays in the executors' logs", error)
            return None


@dataclass
class Contact:
    """Warns about tasks that have not reported, and withdraws the warning when they do.

    ``address`` is where this program listens. For ``patience``, in seconds, see ``_UNHEARD``.
    """

    size: int
    address: str
    patience: float
    _warnings: int = 0

    def without_us(self, started: Collection[int], fell_back: bool, unheard: float) -> bool:
        """Tell whether the ranks may be training without this program.

        ``unheard`` is the number of seconds since the tasks began to run, if no rank has reported.
        """
        if started and self._warnings and not fell_back:
            _log.warning("ranks %s have reported now, and are watched from here on", sorted(started))
            self._warnings = 0
        cut_off = fell_back or unheard > 3 * self.patience
        if cut_off and self._warnings < 2:
            self._warnings = 2
            _log.warning(
                "ranks %s cannot reach this program at %s; training continues, but their output stays in the "
                "executors' logs",
                sorted(set(range(self.size)) - set(started)),
                self.address,
            )
        elif unheard > self.patience and not self._warnings:
            self._warnings = 1
            _log.warning(
                "no rank has reported yet, %.0f s after Spark started their tasks. They may be slow to start on a busy "
                "machine; otherwise check whether they can reach this program at %s",
                unheard,
                self.address,
            )
        return cut_off or unheard > self.patience


def open_hub(session: SparkSession, make: Callable[[str, str], H]) -> H:
    """Open a hub on this program's side of a session's network.

    ``make`` gets the address to listen on, and the one that tasks connect to.

    Raises:
        ClusterError: This program cannot listen there, or has no address for executors.
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


def _each(looks: Sequence[Callable[[], None]]) -> None:
    for look in looks:
        look()


def _look(job: TaskJob, hub: Hub | None, size: int, config: RunConfig, local: bool) -> Callable[[], None]:
    """Return a function for :func:`attend` that raises if ranks are lost, cannot start, or start too slowly."""
    deadline = time.monotonic() + config.start_timeout
    address = "" if hub is None else f"{hub.address.host}:{hub.address.port}"
    # Without a hub, the warning has been given.
    contact = Contact(size, address, _UNHEARD * (_PATIENCE_HERE if local else 1), 2 if hub is None else 0)
    reach = Reach(size, job.placement)
    next_look, placed_at = 0.0, None
    next_question, computing = 0.0, False

    def unheard(now: float) -> float:
        """Return for how many seconds the tasks have been running."""
        nonlocal next_look, placed_at
        if now >= next_look:
            next_look = now + 1
            placed = job.placed
            if not placed and (placed is not None or now <= deadline):
                placed_at = None
            elif placed_at is None:
                placed_at = now if placed else 0.0
        return 0.0 if placed_at is None else now - placed_at

    def look() -> None:
        nonlocal deadline, next_question, computing
        if hub is not None and (lost := hub.lost) is not None:
            raise silent(lost)
        started: Collection[int] = () if hub is None else hub.snapshot()[0]
        now = time.monotonic()
        if not started:
            if now >= next_question:  # a question takes many messages to the JVM
                next_question = now + _ASK_EVERY
                computing = job.computing
            if computing:
                deadline = now + config.start_timeout
                return
        if len(started) < size and (missing := reach.missing(started)) is not None:
            raise silent(missing)
        running = 0.0 if started else unheard(now)
        fell_back = placed_at is not None if hub is None else hub.fell_back
        without_us = contact.without_us(started, fell_back, running)
        if len(started) < size and not without_us and now > deadline:
            raise StartTimeoutError(
                f"{len(started)} of {size} ranks had started after start_timeout={config.start_timeout:g} s. "
                f"{reach.absent(started)}All ranks start together once enough task slots are free: wait for the jobs "
                "that hold them, ask for fewer ranks, or give a larger start_timeout=."
            )

    return look
