"""The agent, which runs in each Spark task of an elastic run and starts one rank process after another.

The driver's membership decides. The agent forwards its decisions to the worker, and the worker's messages to the hub.
It ends a worker if fn failed there, if a signal stopped it, or if the driver gives it up. It ends its own task when the
driver says so.
"""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
import zmq

from spark_hvd.runner.channel.link import Link
from spark_hvd.runner.channel.liveness import HUB_PATIENCE
from spark_hvd.runner.elastic.membership.events import Loss
from spark_hvd.runner.outcome.endings import exit_failure, trim_stacks
from spark_hvd.runner.outcome.rows import Failed, FailureKind, PickledOutcome
from spark_hvd.runner.supervise.processes import ForkServer, ForkServerError
from spark_hvd.runner.supervise.supervised import RankJob, SupervisedRank
from spark_hvd.world.layout import RankInfo

if TYPE_CHECKING:
    from spark_hvd.runner.channel.state import Message

_TICK = 0.5
_STOPPED_SECONDS = 3.0
"""Seconds for which a worker may be stopped (SIGSTOP) before the agent ends it."""
_STACKS_SECONDS = 0.3
_OUTPUT_GRACE = 5.0
_LEAVE_GRACE = 60.0
"""Seconds that a worker gets for its last commit after its executor was told to leave."""


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The result of an agent, which the driver gets when the agent ends.

    Attributes:
        values: Workers whose fn has returned, each with its pickled value.
    """

    values: tuple[tuple[int, PickledOutcome], ...] = ()


class GivenUpError(RuntimeError):
    """Spark should start this task elsewhere: the driver gave the agent up, or its executor will leave."""


@dataclass(slots=True)
class _Worker:
    """The rank process of an agent."""

    number: int
    place: RankInfo
    rank: SupervisedRank
    gpus: str
    stopped_since: float | None = None
    dismissed: bool = False


class Agent:
    """See the module's description.

    The caller has already said hello on ``link``. ``server`` returns the fork server for a worker, a new one if the
    last was killed. ``job`` returns what a worker runs, given the worker's first place, this agent's slot and the
    worker's number. Pickled values above ``value_limit`` bytes go to the hub instead of Spark; None means no limit.
    """

    def __init__(
        self,
        link: Link,
        server: Callable[[], ForkServer],
        job: Callable[[RankInfo, int, int], RankJob],
        value_limit: int | None = None,
        executor: str = "",
    ) -> None:
        self._link, self._server, self._job, self._value_limit = link, server, job, value_limit
        self._executor = executor
        self._worker: _Worker | None = None
        self._values: list[tuple[int, PickledOutcome]] = []
        self._failures: list[tuple[int, Failed]] = []
        self._ended = False
        self._report = "failures"  # for the hub; Spark gets nothing of an agent that ends by itself
        self._given_up: str | None = None
        self._notice: str | None = None
        self._leave_by: float | None = None
        self._poller = zmq.Poller()
        self._poller.register(link.socket, zmq.POLLIN)

    def run(self) -> AgentReport:
        """Work until the driver no longer needs this agent.

        Raises:
            GivenUpError: Spark should start the task elsewhere.
        """
        why = "it was interrupted"
        try:
            while not self._ended:
                self._turn()
            why = self._given_up or "the run is over"
        finally:
            if self._worker is not None:
                self._discard()
            if self._ended:
                self._hand_over()
            self._link.send("gone", why=why)
        if self._given_up is not None:
            raise GivenUpError(self._given_up)
        # The report is pickled, which a memoryview cannot be.
        values = [(number, replace(packed, data=bytes(packed.data))) for number, packed in self._values]
        return AgentReport(tuple(values))

    def notice(self, signum: int, frame: FrameType | None = None) -> None:
        """Handle a signal that announces the end of this machine."""
        self._notice = f"{signal.Signals(signum).name} to its executor"

    def _turn(self) -> None:
        worker = self._worker
        wait = _TICK if worker is None else worker.rank.wait(_TICK)
        events = dict(self._poller.poll(int(wait * 1000)))
        if self._link.socket in events:
            while not self._ended and (message := self._link.receive()) is not None:
                self._on_message(message)
        if worker is not None and worker is self._worker:
            worker.rank.take(events)
            if worker is self._worker and worker.rank.exitcode is not None:
                worker.rank.drain()
            if worker is self._worker and worker.rank.exitcode is not None:
                self._exited(worker, worker.rank.exitcode)
        self._poll_worker()

    # ---- the driver -----------------------------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        match message["type"]:
            case "start":
                self._start(message["worker"], RankInfo(**message["place"]), message["slot"])
            case "stop":
                if (worker := self._mine(message)) is not None:
                    trace = worker.rank.await_stacks(_STACKS_SECONDS)
                    self._end_worker(worker, FailureKind.STOPPED, message["why"], Loss.HUNG, trace=trace)
            case "examine":
                if self._worker is not None:
                    self._worker.rank.examine()
            case "profile":
                if self._worker is not None:
                    self._worker.rank.send(message)
            case "end":
                self._ended = True
                self._report = message["report"]
                if message["again"]:
                    self._given_up = "the driver continues without this task, which Spark should start elsewhere"
            case kind:
                if (worker := self._mine(message)) is not None:
                    worker.dismissed = worker.dismissed or kind == "dismiss"
                    if kind == "assign":
                        worker.place = RankInfo(**message["place"])
                    worker.rank.send(message)

    def _hand_over(self) -> None:
        """Send the hub what it wants, and the values that are too large for Spark."""
        for number, packed in self._values.copy():
            if self._report != "values" and (self._value_limit is None or len(packed.data) <= self._value_limit):
                continue
            if not self._link.hand_over(packed.data, worker=number, place=packed.rank, ok=True):
                return  # a confirmation that comes late must not count for the next one
            self._values.remove((number, packed))
        for number, failed in self._failures if self._report == "failures" else ():
            self._link.hand_over(pickle.dumps(failed), worker=number, place=failed.rank, ok=False)

    def _mine(self, message: Message) -> _Worker | None:
        """Return the worker that a message is for, unless it has ended in the meantime."""
        worker = self._worker
        return worker if worker is not None and worker.number == message["worker"] else None

    def _start(self, number: int, place: RankInfo, slot: int) -> None:
        job = self._job(place, slot, number)
        try:
            try:
                rank = SupervisedRank(job, self._server(), self._link, self._poller, self._on_frame)
            except ForkServerError:  # the server was just killed; the next call starts a new one
                rank = SupervisedRank(job, self._server(), self._link, self._poller, self._on_frame)
        except (ForkServerError, OSError) as error:
            failed = Failed(
                place.rank, place.host, FailureKind.SETUP, str(error), ended_at=time.time(), executor=self._executor
            )
            self._failures.append((number, failed))
            self._link.send("ended", worker=number, loss=Loss.FAILED.value, error=str(error), raised=False)
            return
        self._worker = _Worker(number, place, rank, job.env.get("CUDA_VISIBLE_DEVICES", ""))

    # ---- the worker -----------------------------------------------------------------------------------------------

    def _on_frame(self, header: dict[str, Any], payload: memoryview) -> None:
        worker = self._worker
        assert worker is not None
        if header["type"] != "outcome":
            self._link.send(header.pop("type"), worker=worker.number, **header)
        elif header["ok"]:
            self._values.append((worker.number, PickledOutcome(worker.place.rank, True, payload)))
            self._link.send("ended", worker=worker.number, loss=None, error="", raised=False)
            worker.rank.let_exit()
            self._discard()
        else:
            kind = FailureKind(header["kind"])
            self._end_worker(
                worker,
                kind,
                header["error"],
                Loss.FAILED,
                trace=header["traceback"],
                exception=bytes(payload) or None,
                echo=header["echo"],
            )

    def _exited(self, worker: _Worker, code: int) -> None:
        if worker.dismissed and code == 0:
            self._discard()
            self._link.send("ended", worker=worker.number, loss=Loss.LOST.value, error="left", raised=False)
            return
        kind, error = exit_failure(code)
        loss = Loss.FAILED
        if worker.rank.process.orphaned:  # neither the worker nor fn is to blame
            loss, error = Loss.LOST, "its fork server was killed, and the rank with it"
        self._end_worker(worker, kind, error, loss, trace=trim_stacks(worker.rank.process.stacks()))

    def _end_worker(
        self,
        worker: _Worker,
        kind: FailureKind,
        error: str,
        loss: Loss,
        *,
        trace: str = "",
        exception: bytes | None = None,
        echo: bool = False,
    ) -> None:
        """End a worker that failed or is given up, at once, so that its peers see its connections close."""
        self._discard()
        failed = worker.rank.failed(
            worker.place, kind, error, trace, echo=echo, exception=exception, executor=self._executor, gpus=worker.gpus
        )
        self._failures.append((worker.number, failed))
        raised = kind is FailureKind.EXCEPTION and not echo
        self._link.send("ended", worker=worker.number, loss=loss.value, error=error, raised=raised)

    def _discard(self) -> None:
        """Kill the worker and every process that it started, and take its last output."""
        worker, self._worker = self._worker, None
        assert worker is not None
        worker.rank.end(0.0, _OUTPUT_GRACE)

    # ---- time -----------------------------------------------------------------------------------------------------

    def _poll_worker(self) -> None:
        now = time.monotonic()
        if self._link.hub_silence() > HUB_PATIENCE:
            self._ended, self._given_up = True, f"the driver did not answer for {HUB_PATIENCE:.0f} s"
        if self._notice is not None and self._leave_by is None:
            self._leave_by = now + _LEAVE_GRACE
            self._link.send("leaving", why=self._notice)
        # Values that workers have returned leave with this agent's report, at the end of the run.
        idle = self._worker is None and not self._values
        if self._leave_by is not None and (idle or now > self._leave_by):
            self._ended, self._given_up = True, f"the executor of this task will leave: {self._notice}"
        worker = self._worker
        if worker is None:
            return
        worker.rank.look(now)
        if not _is_stopped(worker.rank.process.pid):
            worker.stopped_since = None
        elif worker.stopped_since is None:
            worker.stopped_since = now
        elif now - worker.stopped_since >= _STOPPED_SECONDS:
            error = f"was stopped by a signal (SIGSTOP) for {_STOPPED_SECONDS:.0f} s, and then ended"
            self._end_worker(worker, FailureKind.SIGNAL, error, Loss.HUNG)


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
