"""The supervisor: starts one rank's process, watches it, and turns its end into an outcome."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import zmq

from spark_hvd.runner.channel.link import Link
from spark_hvd.runner.channel.liveness import HEARTBEAT_SECONDS
from spark_hvd.runner.outcome.endings import exit_failure, is_echoing_abort, start_took_too_long, stopped, trim_stacks
from spark_hvd.runner.outcome.rows import Failed, FailureKind, PickledOutcome
from spark_hvd.runner.supervise.mpi.blame import Blame, Suspect
from spark_hvd.runner.supervise.processes import ForkServer, ForkServerError
from spark_hvd.runner.supervise.supervised import RankJob, SupervisedRank
from spark_hvd.world.layout import RankInfo

if TYPE_CHECKING:
    from spark_hvd.runner.channel.state import Message
    from spark_hvd.runner.supervise.mpi.launcher import MpiLauncher

_TERM_GRACE = 1.0  # seconds between SIGTERM and SIGKILL
_STACKS_WAIT = 0.5  # seconds that a fault handler may take to write the stacks
_OUTPUT_GRACE = 10.0  # seconds that a slow driver gets to take the last output
_MPI_SECONDS = 300.0  # for MPI's process manager on all hosts; rank 0's host may import torch later than the others


def supervise(
    job: RankJob, link: Link, server: ForkServer, on_lines: Callable[[str, list[str]], None] | None = None
) -> PickledOutcome:
    """Run one rank to its end.

    The caller has sent the hello message on ``link``. Output goes to ``on_lines`` (stream, lines), or to the hub if
    that is None.

    Returns:
        The outcome, once the rank's process group has ended. A failure of the rank raises no exception here.
    """
    try:
        supervision = _Supervision(job, link, server, on_lines)
    except ForkServerError as error:
        return not_started(job.me, link, str(error))
    try:
        return supervision.run()
    finally:
        supervision.end()
        link.send("gone")


def not_started(me: RankInfo, link: Link, error: str) -> PickledOutcome:
    """Report to the hub that a rank cannot be started, and return its outcome."""
    link.send("ended", ok=False, echo=False)
    link.send("gone")
    return PickledOutcome.failed(Failed(me.rank, me.host, FailureKind.SETUP, error, ended_at=time.time()))


class _Supervision:
    """The supervision of one rank."""

    def __init__(
        self, job: RankJob, link: Link, server: ForkServer, on_lines: Callable[[str, list[str]], None] | None
    ) -> None:
        self._job = job
        self._link = link
        self._outcome: PickledOutcome | None = None
        self._failure: Failed | None = None  # without the rank's last output, which comes later
        self._leaving = False  # whether the hub has released or stopped this rank
        self._hands_over = False  # whether its value goes to the hub instead of Spark
        self._mpi: MpiLauncher | None = None
        self._mpi_fds: set[int] = set()
        self._suspect = Suspect()  # the part of MPI's process manager that may have failed first
        self._ready: Message | None = None  # the rank's message, until MPI is ready, too
        self._poller = zmq.Poller()
        self._poller.register(link.socket, zmq.POLLIN)
        self._rank = SupervisedRank(job, server, link, self._poller, self._on_frame, on_lines)
        self._start_deadline = time.monotonic() + job.start_timeout
        self._mpi_deadline = self._start_deadline
        if job.mpi is not None:
            self._mpi_deadline = min(self._start_deadline, time.monotonic() + _MPI_SECONDS)
        self._deadline: float | None = self._mpi_deadline  # for being ready, and then for joining the world

    @property
    def _ended(self) -> bool:
        """Whether the rank has an outcome or has failed. Waiting for stacks may change this, as it handles events."""
        return self._outcome is not None or self._failure is not None

    def run(self) -> PickledOutcome:
        """Watch until this rank and all others have their outcomes."""
        job = self._job
        if job.mpi is not None:
            # Few runs need MPI, so only those import it.
            from spark_hvd.runner.supervise.mpi.launcher import MpiLauncher
            from spark_hvd.runner.supervise.mpi.manager import MpiMissingError

            try:
                self._mpi = MpiLauncher(job.mpi, job.me, self._link, self._mpi_failed)
            except (MpiMissingError, OSError) as error:
                self._fail_now(FailureKind.SETUP, str(error))
        # Also after the process has ended: if it failed because another rank is gone, that rank may have had the hub.
        while not self._leaving:
            self._step(self._seconds_to_next_action())
            self._check_deadlines()
            if self._rank.exitcode is not None and not self._ended:
                self._judge_exit()
            if self._link.hub_silence() > self._link.patience:
                self._cut_off()
        return self._finish()

    def _seconds_to_next_action(self) -> float:
        """Return the seconds until the next action that needs no event."""
        if self._failure is not None:
            return HEARTBEAT_SECONDS
        times = [due for due in (self._deadline, self._suspect.due) if due is not None]
        return min([HEARTBEAT_SECONDS, *(max(due - time.monotonic(), 0.0) for due in times)])

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline and self._failure is None:
            self._start_took_too_long()
        self._rank.look(now)
        if self._suspect.is_due(now) and not self._ended:
            assert self._suspect.error is not None
            self._fail_now(FailureKind.MPI, self._suspect.error, echo=self._suspect.blame is not Blame.CAUSE)

    def _step(self, timeout: float) -> None:
        """Handle events, waiting up to ``timeout`` seconds for them."""
        mpi = self._watch_mpi()
        events = dict(self._poller.poll(int(self._rank.wait(timeout) * 1000)))
        if self._link.socket in events:
            while not self._leaving and (message := self._link.receive()) is not None:
                self._on_message(message)
        self._rank.take(events)
        for fd in [fd for fd in mpi if fd in events]:
            mpi[fd]()
            if self._mpi is not None and self._mpi.variables is not None and self._deadline == self._mpi_deadline:
                self._deadline = self._mpi_deadline = self._start_deadline  # MPI is up, so the usual deadline holds
            self._tell_ready()

    def _watch_mpi(self) -> dict[int, Callable[[], None]]:
        """Register MPI's current file descriptors with the poller, and return the handler of each."""
        handlers = {} if self._mpi is None else dict(self._mpi.handlers)
        for fd in self._mpi_fds - handlers.keys():
            self._poller.unregister(fd)
        for fd in handlers.keys() - self._mpi_fds:
            self._poller.register(fd, zmq.POLLIN)
        self._mpi_fds = set(handlers)
        return handlers

    def _on_message(self, message: Message) -> None:
        match message["type"]:
            case "proxy":
                if self._mpi is not None:  # otherwise it could not start here, which the hub has been told
                    self._mpi.start_proxy(message["arguments"])
            case "go":
                self._deadline = time.monotonic() + self._job.start_timeout
                variables = None if self._mpi is None else self._mpi.variables
                self._rank.send({"type": "go", "store": message["store"], "mpi": variables})
                if self._mpi is not None:
                    with contextlib.suppress(OSError):
                        self._mpi.send_fds(self._rank.process.control)
            case "examine":
                self._rank.examine()
            case "profile":
                self._rank.send(message)
            case "release":
                self._leaving, self._hands_over = True, message["hand_over"]
            case "stop":
                self._stop(message["reason"], message.get("culprit"), message.get("lost"))
            case other:
                raise AssertionError(f"unexpected message {other!r}")

    def _on_frame(self, frame: dict[str, Any], payload: memoryview) -> None:
        if frame["type"] == "ready":
            self._ready = {"store": frame["store"]}
            self._tell_ready()
        elif frame["type"] == "joined":
            self._deadline = None
        elif frame["ok"]:
            self._outcome = PickledOutcome(self._job.me.rank, True, payload)
            self._link.send("ended", ok=True, bytes=len(payload))
        else:
            self._fail(
                FailureKind(frame["kind"]), frame["error"], frame["traceback"], frame["echo"], bytes(payload) or None
            )
            self._link.send("ended", ok=False, echo=frame["echo"])

    def _tell_ready(self) -> None:
        """Tell the hub, once, that both the rank and MPI are ready."""
        if self._ready is not None and (self._mpi is None or self._mpi.variables is not None):
            self._link.send("ready", **self._ready)
            self._ready = None

    def _mpi_failed(self, error: str, blame: Blame) -> None:
        # Another supervisor may know a likelier cause, so _check_deadlines() reports this one a little later.
        self._suspect.accuse(error, blame, time.monotonic())

    def _start_took_too_long(self) -> None:
        self._deadline = None
        waits_for_mpi = self._mpi is not None and self._mpi.variables is None
        error = start_took_too_long(self._job.start_timeout, _MPI_SECONDS if waits_for_mpi else None)
        stacks = self._take_stacks()
        if not self._ended:
            self._fail_now(FailureKind.SETUP, error, stacks)

    def _stop(self, reason: str, culprit: int | None, lost: str | None = None) -> None:
        self._leaving = True
        stacks = self._take_stacks() if reason == "timeout" and not self._ended else ""
        if self._ended:
            return
        if reason == "timeout":
            limit = "" if self._job.timeout is None else f"{self._job.timeout:g} s"
            self._fail(FailureKind.TIMEOUT, f"still running after timeout={limit}", stacks)
        elif lost is not None:
            self._fail(FailureKind.LOST, f"stopped because other ranks have fallen silent: {lost}")
        else:
            self._fail(FailureKind.STOPPED, stopped(reason, culprit))

    def _cut_off(self) -> None:
        self._leaving = True
        # A driver that is only suspended still takes the outcome. A hub in another rank's task is gone with that rank.
        if self._link.hub_at is None and self._ended:
            return
        where = "the driver" if self._link.hub_at is None else f"{self._link.hub_at}, which has the hub of this run,"
        known = "" if self._failure is None else f"; before, it failed: {self._failure.error}"
        self._outcome = None
        self._fail(
            FailureKind.LOST,
            f"stopped because {where} did not answer at {self._link.url} for {self._link.patience:.0f} s{known}",
        )

    def _take_stacks(self) -> str:
        return self._rank.await_stacks(_STACKS_WAIT, self._step)

    def _judge_exit(self) -> None:
        """Decide how a process failed that ended without an outcome."""
        self._rank.drain()  # its last output, or even an outcome, may still be unread
        if self._ended:
            return
        assert self._rank.exitcode is not None
        kind, error = exit_failure(self._rank.exitcode)
        echo = is_echoing_abort(self._rank.exitcode, str(self._rank.output.tail))
        self._fail_now(kind, error, trim_stacks(self._rank.process.stacks()), echo=echo)

    def _fail(
        self, kind: FailureKind, error: str, trace: str = "", echo: bool = False, exception: bytes | None = None
    ) -> None:
        self._failure = self._rank.failed(
            self._job.me,
            kind,
            error,
            trace,
            echo=echo,
            exception=exception,
            exitcode=self._rank.exitcode,
            gpus=", ".join(self._job.spec.gpus.assigned or ()),
        )

    def _fail_now(self, kind: FailureKind, error: str, trace: str = "", *, echo: bool = False) -> None:
        """Fail the rank, which will send no outcome, and tell the hub."""
        self._fail(kind, error, trace, echo)
        self._link.send("ended", ok=False, echo=echo)

    def _finish(self) -> PickledOutcome:
        """Let the process exit, take its last output, and pack the outcome."""
        if self._outcome is not None:
            self._rank.let_exit(self._step)
        self._rank.end(_TERM_GRACE, _OUTPUT_GRACE)
        if self._outcome is not None and self._hands_over:
            if self._link.hand_over(self._outcome.data):
                return PickledOutcome.handed_over(self._job.me.rank)
            size = len(self._outcome.data) >> 20
            self._fail(FailureKind.LOST, f"the driver stopped answering while the value of fn was sent ({size} MiB)")
        elif self._outcome is not None:
            return self._outcome
        assert self._failure is not None
        return PickledOutcome.failed(replace(self._failure, log_tail=str(self._rank.output.tail)))

    def end(self) -> None:
        """End the rank and then MPI's process manager on this host, which would otherwise stay behind."""
        self._rank.end(_TERM_GRACE, _OUTPUT_GRACE)
        if self._mpi is not None:
            self._mpi.close(0 if self._outcome is not None else 1)
