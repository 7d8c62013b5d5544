"""The driver's loop: waits for a run's job, shows the ranks' output, and stops the ranks on any error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from spark_hvd.runner.channel.hub import HubServer
from spark_hvd.runner.launch.monitor import Monitor
from spark_hvd.runner.outcome.errors import RunError, StartTimeoutError, check_hub
from spark_hvd.runner.stopping import check_stop
from spark_hvd.runner.supervise.team import in_threads

if TYPE_CHECKING:
    from spark_hvd.runner.spark.job import TaskJob

T = TypeVar("T")
_LOOK_EVERY = 0.02


class Grace(NamedTuple):
    """Seconds that ranks get to end after they were told to, then their tasks, and then the cancelled job."""

    ranks: float
    tasks: float
    cancelled: float = 10.0


class ThreadJob(Generic[T]):
    """Calls in threads of this process, with the interface of a Spark job; they end when their hub does."""

    def __init__(self, work: Callable[[int], T], tasks: int) -> None:
        self._ended: list[int] = []

        def call(task: int) -> T:
            try:
                return work(task)
            finally:
                self._ended.append(task)

        self._calls = in_threads(call, tasks)

    @property
    def running(self) -> bool:
        """Whether any task still runs."""
        return not all(call.done() for call in self._calls)

    def wait(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until all calls have ended."""
        futures.wait(self._calls, timeout)

    def cancel(self) -> None:
        """Do nothing, because threads cannot be killed."""

    def results(self) -> list[T]:
        """Return the values of the calls in the order in which they ended, or raise the first exception."""
        return [self._calls[task].result() for task in tuple(self._ended)]


def attend(
    job: TaskJob | ThreadJob[Any],
    hub: HubServer | None,
    monitor: Monitor,
    grace: Grace,
    look: Callable[[], Grace | None] = lambda: None,
) -> None:
    """Wait until a job has ended, and show the output of its ranks. Any error stops the ranks before it is raised.

    ``hub`` is the ranks' hub; None if they have none. ``grace`` is their time to end after an error. ``look`` is called
    many times a second. It may raise. If the job is no longer needed, it returns the time that the job gets to end.

    Raises:
        HubError: The hub failed.
        KeyboardInterrupt: after every rank has been stopped.
    """
    if hub is not None:
        monitor.ask(hub)
    try:
        while job.running:
            job.wait(_LOOK_EVERY)
            check_stop()
            monitor.flush()
            if hub is not None:
                check_hub(hub.failure)
            if (last := look()) is not None:
                _stop(job, hub, "peer", last)
                break
        if hub is not None:
            check_hub(hub.failure)  # the job may have ended because the hub failed
    except BaseException as error:
        reason = "lost" if isinstance(error, RunError) else "interrupt"
        _stop(job, hub, "start" if isinstance(error, StartTimeoutError) else reason, grace)
        with contextlib.suppress(Exception):  # the streams themselves may have failed
            monitor.flush()
        raise
    monitor.flush()


def _stop(job: TaskJob | ThreadJob[Any], hub: HubServer | None, reason: str, grace: Grace) -> None:
    try:
        if hub is not None:
            hub.stop(reason)
            if job.running:
                hub.wait_gone(grace.ranks)
                job.wait(grace.tasks)
    finally:  # also after a second Ctrl-C, or ranks that cannot reach us would train on
        if job.running:
            job.cancel()
            job.wait(grace.cancelled)
