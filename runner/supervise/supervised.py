"""A rank's process under its supervisor, in static and elastic runs: its frames, output, examination and end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import zmq

from spark_hvd.runner.channel.examination import Examination
from spark_hvd.runner.channel.frames import FrameReader, send_frame
from spark_hvd.runner.channel.link import Link
from spark_hvd.runner.outcome.endings import trim_stacks
from spark_hvd.runner.outcome.rows import Failed, FailureKind
from spark_hvd.runner.rank.spec import RankSpec
from spark_hvd.runner.supervise.output import RankOutput
from spark_hvd.runner.supervise.processes import ForkServer, RankProcess
from spark_hvd.world.layout import RankInfo

if TYPE_CHECKING:
    from spark_hvd.runner.supervise.mpi.launcher import MpiPlan

_SECONDS = 1.0
"""Seconds for which an examination measures CPU usage."""
_STACKS_SECONDS = 0.3
"""Seconds that the rank's fault handler gets to write the stacks."""


class Probe:
    """An examination in progress, which never blocks. Call :meth:`turn` when :attr:`due`, until it has a result."""

    def __init__(self, process: RankProcess) -> None:
        self._process = process
        self._started = time.monotonic()
        self._used = _cpu_seconds(process.pid)
        self._cpu: float | None = None
        self.due = self._started + _SECONDS
        """When to call :meth:`turn`, on the monotonic clock."""

    def turn(self, now: float) -> Examination | None:
        """Do the next part of the examination.

        Returns:
            The result once it is complete, otherwise None.
        """
        if now < self.due:
            return None
        if self._cpu is None:
            self._cpu = max(0.0, _cpu_seconds(self._process.pid) - self._used) / (now - self._started)
            self._process.ask_for_stacks()
            self.due = now + _STACKS_SECONDS
            return None
        stacks = trim_stacks(self._process.stacks())
        self._process.clear_stacks()  # stacks found there later must come from a crash
        return Examination(self._cpu, _status(self._process.pid), stacks)


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its child processes, in seconds."""
    total = 0.0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return total
    for process in family:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def _status(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


_EXIT_GRACE = 5.0  # seconds that a finished rank may take for its exit handlers
_KILL_GRACE = 5.0  # seconds that the kernel may take to end a killed process
_BEHIND_SECONDS = 0.02  # between two attempts to send output while the hub is slow


@dataclass(frozen=True, slots=True)
class RankJob:
    """A rank for a supervisor to run.

    ``start_timeout`` also limits the time to join the others' world. ``timeout`` is the run's, and only for messages.
    """

    spec: RankSpec
    env: Mapping[str, str] = field(repr=False)
    payload: bytes = field(repr=False)
    start_timeout: float
    timeout: float | None = None
    mpi: MpiPlan | None = None

    @property
    def me(self) -> RankInfo:
        """The rank of this process."""
        return self.spec.me


class SupervisedRank:
    """A rank's process under its supervisor.

    ``on_frame`` gets the rank's frames, except its records, and may end the rank. ``poller`` is the supervisor's.

    Raises:
        ForkServerError: The process could not be started.
    """

    def __init__(
        self,
        job: RankJob,
        server: ForkServer,
        link: Link,
        poller: zmq.Poller,
        on_frame: Callable[[dict[str, Any], memoryview], None],
        on_lines: Callable[[str, list[str]], None] | None = None,
    ) -> None:
        self.process = process = server.spawn(job.env, job.start_timeout)
        self.output = RankOutput({process.stdout_fd: "out", process.stderr_fd: "err"}, link, on_lines)
        self.exitcode: int | None = None
        """The exit code of the process once it has ended; negative if a signal killed it."""
        self.ended = False
        self._frames = FrameReader(process.control)
        self._link, self._poller, self._on_frame = link, poller, on_frame
        self._probe: Probe | None = None
        for fd in (*self.output.fds, process.control.fileno(), process.status_fd):
            poller.register(fd, zmq.POLLIN)
        self.send(job.spec.to_message(), job.payload)

    def send(self, message: dict[str, Any], payload: bytes = b"") -> None:
        """Send the rank a frame. For a dead rank this does nothing; its exit status is reported elsewhere."""
        with contextlib.suppress(OSError):
            send_frame(self.process.control, message, payload)

    def wait(self, seconds: float) -> float:
        """Return the number of seconds to poll, at most ``seconds``."""
        if self.output.waiting:
            return _BEHIND_SECONDS
        return seconds if self._probe is None else max(min(seconds, self._probe.due - time.monotonic()), 0.0)

    def take(self, events: Mapping[Any, int]) -> None:
        """Handle the poller's events, and try to send output that the hub has not taken yet."""
        self.output.flush()
        if self.process.control.fileno() in events:
            self._read_frame()
        if self.ended:
            return
        if not self.output.waiting:
            for fd in [fd for fd in self.output.fds if fd in events]:
                self._read_output(fd)
        if self.process.status_fd in events:
            self._read_status()

    def drain(self) -> None:
        """Read the rest of an ended rank's socket and pipes."""
        while not self.ended and not self._frames.closed and _readable(self.process.control.fileno()):
            self._read_frame()
        if not self.ended:
            self._drain_output()

    def examine(self) -> None:
        """Begin an examination; its result goes to the hub."""
        self._probe = self._probe or Probe(self.process)

    def look(self, now: float) -> None:
        """Continue the examination if there is one."""
        if self._probe is not None and (found := self._probe.turn(now)) is not None:
            self._probe = None
            self._link.send("examined", **asdict(found))

    def await_stacks(self, seconds: float, meanwhile: Callable[[float], object] = time.sleep) -> str:
        """Return the stacks of the rank's threads; see :meth:`RankProcess.await_stacks`."""
        return trim_stacks(self.process.await_stacks(seconds, meanwhile))

    def failed(self, place: RankInfo, kind: FailureKind, error: str, trace: str = "", **more: Any) -> Failed:
        """Return a failure of this rank, with its last output so far."""
        return Failed(place.rank, place.host, kind, error, trace, str(self.output.tail), ended_at=time.time(), **more)

    def let_exit(self, meanwhile: Callable[[float], object] | None = None) -> None:
        """Let a rank whose fn has returned run its exit handlers.

        ``meanwhile`` is called repeatedly, with seconds to wait for events; None handles this rank's events only.
        """
        self.process.control.shutdown(2)  # the rank waits for this before it exits
        self._await_exit(_EXIT_GRACE, meanwhile)

    def end(self, term_grace: float, output_grace: float) -> None:
        """End the process and its child processes, and take its last output. Call it once.

        SIGKILL follows SIGTERM after ``term_grace`` seconds. A slow hub gets ``output_grace`` seconds to take the
        output.
        """
        if self.ended:
            return
        self.ended = True
        for signum, grace in ((signal.SIGTERM, term_grace), (signal.SIGKILL, _KILL_GRACE)):
            if self.exitcode is None and grace:
                self.process.signal_group(signum)
                self._await_exit(grace)
        fds = (self.process.stdout_fd, self.process.stderr_fd, self.process.control.fileno(), self.process.status_fd)
        self._drain_output()
        self.output.end(output_grace)
        for fd in fds:
            self._forget(fd)
        self.process.close()

    def _await_exit(self, grace: float, meanwhile: Callable[[float], object] | None = None) -> None:
        deadline = time.monotonic() + grace
        while self.exitcode is None and (left := deadline - time.monotonic()) > 0:
            if meanwhile is not None:
                meanwhile(min(left, 0.2))
            elif _readable(self.process.status_fd, min(left, 0.05)):
                self._read_status()
            else:
                self.drain()

    def _read_frame(self) -> None:
        frame = self._frames.read()
        if self._frames.closed:
            self._forget(self.process.control.fileno())
        if frame is not None and frame[0]["type"] == "vitals":
            self._link.try_send("vitals", vitals=frame[0]["vitals"])
        elif frame is not None and frame[0]["type"] == "profile":
            frame[0].pop("type")
            self._link.try_send("profile", **frame[0])
        elif frame is not None:
            self._on_frame(*frame)

    def _drain_output(self) -> None:
        for fd in [*self.output.fds]:
            while fd in self.output.fds and _readable(fd):
                self._read_output(fd)

    def _read_output(self, fd: int) -> None:
        if not self.output.read(fd):
            self._forget(fd)

    def _read_status(self) -> None:
        self._forget(self.process.status_fd)
        self.exitcode = self.process.exit_code()

    def _forget(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._poller.unregister(fd)


def _readable(fd: int, seconds: float = 0.0) -> bool:
    poller = zmq.Poller()
    poller.register(fd, zmq.POLLIN)
    return bool(poller.poll(int(seconds * 1000)))
