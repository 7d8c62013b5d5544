"""Spark's side of a run: hosts with executors, attempts of tasks, and the product's agent in each."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from spark_hvd.runner.channel.liveness import HEARTBEAT_SECONDS, LivenessTracker
from spark_hvd.runner.elastic.agent import Agent, AgentReport, GivenUpError
from spark_hvd.runner.outcome.rows import Failed
from spark_hvd.runner.spark.job import TaskAttempt
from spark_hvd.runner.supervise.processes import ForkServerError
from tests.world.clock import strand
from tests.world.ranks import RankProcess, Spec
from tests.world.wire import DRIVER, Pipe

if TYPE_CHECKING:
    from spark_hvd.world.layout import RankInfo
    from tests.world.driver import Driver
    from tests.world.world import SimulatedWorld

_TURN = 0.5
_CUT_OFF = 25.0
"""Seconds after which Spark gives up an executor that it does not reach; really two minutes."""


class SimulatedLink:
    """Replaces Link, with the heartbeat's own connection."""

    def __init__(self, attempt: Attempt) -> None:
        world, host = attempt.world, attempt.host.name
        self.attempt, self.socket, self.inbox = attempt, object(), deque[bytes]()
        self._up = Pipe(world.network, host, DRIVER, world.driver.take)
        self.down = Pipe(world.network, DRIVER, host, self._arrive)
        self._beats = Pipe(world.network, host, DRIVER, world.driver.take)
        self.answers = Pipe(world.network, DRIVER, host, self._answer)
        self._liveness = LivenessTracker()
        self._answered = False

    def hello(self) -> None:
        attempt = self.attempt
        self.send("hello", attempt=attempt.number, host=attempt.host.name, task=attempt.task)
        self._liveness.record_heartbeat(0, attempt.world.clock.now)
        attempt.world.clock.after(HEARTBEAT_SECONDS / 2, self._beat)

    def send(self, type_: str, **fields: Any) -> None:
        if self.attempt.alive:
            self.attempt.world.log("{}: {} {}", self.attempt, type_, fields)
            self._up.send((self.down, json.dumps({"type": type_, "rank": self.attempt.number, **fields}).encode(), b""))

    def hand_over(self, value: bytes, **fields: Any) -> bool:
        driver = self.attempt.world.driver
        parts = [value[:8], value[8:20], value[20:]]
        kept = driver.answers and self.attempt.world.network.reaches(self.attempt.host.name, DRIVER)
        if kept:  # the real one waits for the answer
            for part, data in enumerate(parts, 1):
                message = {
                    "type": "value",
                    "rank": self.attempt.number,
                    **fields,
                    "part": part - 1,
                    "parts": len(parts),
                }
                driver.take((self.down, json.dumps(message).encode(), data))
                assert self._is_told_by(driver) == (part == len(parts)), "an agent is told that a value is kept"
        return kept

    def _is_told_by(self, driver: Driver) -> bool:
        """Return whether the driver, in its current turn, reports that it has the whole value."""
        told: list[bytes] = []
        send, self.down.send = self.down.send, told.append
        try:
            driver.turn()
        finally:
            self.down.send = send
        others = [message for message in told if json.loads(message)["type"] != "kept"]
        for message in others:
            send(message)
        return len(others) < len(told)

    def receive(self) -> dict[str, Any] | None:
        message = json.loads(self.inbox.popleft()) if self.inbox else None
        return None if message is None else {name: message[name] for name in message if name != "sequence"}

    def hub_silence(self) -> float:
        return self._liveness.expired(0.0, self.attempt.world.clock.now).get(0, 0.0)

    def _arrive(self, message: bytes) -> None:
        self.inbox.append(message)
        self.attempt.turn_soon()

    def _answer(self, message: bytes) -> None:
        self._answered = True

    def _beat(self) -> None:
        attempt, now = self.attempt, self.attempt.world.clock.now
        if not attempt.alive:
            return
        if not attempt.host.frozen:
            if self._answered:
                self._answered = False
                self._liveness.record_heartbeat(0, now)
            self._liveness.tick(now)
            self._beats.send((self.answers, b'{"type": "alive", "rank": %d}' % attempt.number, b""))
        attempt.world.clock.after(HEARTBEAT_SECONDS, self._beat)


class SimulatedServer:
    """Replaces a fork server."""

    def __init__(self, host: Host) -> None:
        self.host, self.alive = host, True
        self.children: list[RankProcess] = []

    def kill(self) -> None:
        self.alive = False
        for child in self.children:
            if child.alive:
                child.orphaned = True
                child.die(-9)


class SimulatedRank:
    """Replaces SupervisedRank: the agent's end of a rank's process."""

    def __init__(
        self, job: Any, server: SimulatedServer, link: SimulatedLink, poller: Any, on_frame: Callable[..., None]
    ) -> None:
        attempt = link.attempt
        if not server.alive:
            raise ForkServerError("the fork server has gone")
        self.process = RankProcess(attempt.world, attempt.host.name, job.spec)
        server.children.append(self.process)
        self.process.on_news = attempt.turn_soon
        self.exitcode: int | None = None
        self.ended = False
        self._on_frame, self._world = on_frame, attempt.world

    def wait(self, seconds: float) -> float:
        return seconds

    def take(self, events: Any) -> None:
        if self.process.frames:
            self._on_frame(*self.process.frames.popleft())
        if not self.ended:
            self.exitcode = self.process.exitcode

    def drain(self) -> None:
        while not self.ended and self.process.frames:
            self._on_frame(*self.process.frames.popleft())

    def look(self, now: float) -> None:
        pass

    def send(self, message: dict[str, Any]) -> None:
        self.process.down.send(message)

    def await_stacks(self, seconds: float) -> str:
        return ""

    def failed(self, place: RankInfo, kind: Any, error: str, trace: str = "", **more: Any) -> Failed:
        return Failed(place.rank, place.host, kind, error, trace, "", ended_at=self._world.clock.now, **more)

    def let_exit(self) -> None:
        self.process.down.send(None)
        self.ended = True

    def end(self, term_grace: float, output_grace: float) -> None:
        if not self.ended:
            self.ended = True
            self.process.die(-9)


class SimulatedPoller:
    """Replaces zmq.Poller: returns what has arrived, and never waits."""

    def __init__(self) -> None:
        self._socket: Any = None

    def register(self, socket: Any, events: int) -> None:
        self._socket = socket

    def poll(self, milliseconds: int) -> list[tuple[Any, int]]:
        return [(self._socket, 1)]


@dataclass(eq=False)
class Host:
    """A machine with one executor.

    Attributes:
        name: Its name and address.
        slots: Number of tasks that it runs at a time.
        frozen: Whether it is suspended.
        bad: Whether ranks that start on it end at once.
        leaving: Whether Spark reports that its executor is being decommissioned.
        lost: Whether Spark knows that it is gone.
        server: Its fork server.
    """

    name: str
    slots: int
    frozen: bool = False
    bad: bool = False
    leaving: bool = False
    lost: bool = False

    def __post_init__(self) -> None:
        self.server = SimulatedServer(self)

    def fork_server(self) -> SimulatedServer:
        """Do what fork_server() does: start another one if the last was killed."""
        if not self.server.alive:
            self.server = SimulatedServer(self)
        return self.server


class Attempt:
    """One attempt of a task: an agent, run like `run_agent`."""

    def __init__(self, world: SimulatedWorld, number: int, task: int, host: Host) -> None:
        self.world, self.number, self.task, self.host = world, number, task, host
        self.alive, self.known_as_running = True, True
        self.report: AgentReport | None = None
        self._soon = False
        self.link = SimulatedLink(self)
        self.link.hello()
        self.agent = Agent(self.link, host.fork_server, self._job)  # type: ignore[arg-type]
        world.clock.after(world.clock.some(0.0, _TURN), self._regularly)
        world.log("{} starts", self)

    def __repr__(self) -> str:
        return f"agent {self.number} of task {self.task} on {self.host.name}"

    @property
    def process(self) -> RankProcess | None:
        """The process of its rank, if there is one."""
        worker: Any = self.agent._worker
        return None if worker is None else worker.rank.process

    def _job(self, place: RankInfo, slot: int, number: int) -> Any:
        plan = self.world.plan
        spec = Spec(place, self.host.name, slot, plan.limits.rejoin_timeout, plan.collective_timeout, number)
        return SimpleNamespace(spec=spec, env={})

    def turn_soon(self) -> None:
        """Let the agent take its turn soon: something has arrived."""
        if not self._soon and self.alive:
            self._soon = True
            self.world.clock.after(0.0, self._turn)

    def _regularly(self) -> None:
        if self.alive:
            self._turn()
            self.world.clock.after(_TURN, self._regularly)

    def _turn(self) -> None:
        self._soon = False
        if not self.alive or self.host.frozen:
            return
        self.agent._turn()
        worker: Any = self.agent._worker
        if self.agent._ended:
            self._end()
        elif worker is not None and (worker.rank.process.frames or worker.rank.process.exitcode is not None):
            self.turn_soon()

    def _end(self) -> None:
        try:
            self.report = self.agent.run()
        except GivenUpError:
            self.world.log("{} is given up", self)
            self.world.spark.ended(self, True)
        else:
            self.world.spark.ended(self, False)
        self.alive = False

    def kill(self) -> None:
        """End the task's process, and its rank."""
        if self.alive:
            self.world.log("{} is killed", self)
            self.alive = False
            if (process := self.process) is not None:
                process.die(-9)


class Spark:
    """Places attempts on executors, and notices their ends; has the interface of a TaskJob."""

    error = None

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self.attempts_made: list[Attempt] = []
        self._waiting: list[int] = []
        self._cancelled = False
        self._cut_off: set[Host] = set()
        self._finished: set[int] = set()
        self._reports: list[Attempt] = []
        self._numbers = 10

    def start(self) -> None:
        for task, seconds in enumerate(self.world.plan.starts):
            self.world.clock.after(seconds, self._wants, task)

    def _wants(self, task: int) -> None:
        self._waiting.append(task)
        self.place()

    def place(self) -> None:
        """Start attempts of waiting tasks if there is room."""
        if self._cancelled or self.world.driver.dead:
            return
        for task in self._waiting.copy():
            taken = [attempt.host for attempt in self.attempts_made if attempt.known_as_running]
            free = [
                host
                for host in self.world.hosts.values()
                if not host.lost and not host.leaving and taken.count(host) < host.slots and host not in self._cut_off
            ]
            if not free:
                return
            self._waiting.remove(task)
            host = min(free, key=taken.count)
            self._numbers += 1
            attempt = Attempt(self.world, self._numbers, task, host)
            self.attempts_made.append(attempt)
            if host.name in self.world.network.down:
                attempt.kill()

    def ended(self, attempt: Attempt, again: bool) -> None:
        """End an attempt; Spark notices unless its host is cut off."""
        if not again and not self.world.network.reaches(DRIVER, attempt.host.name):
            self.world.clock.after(1.0, self.ended, attempt, again)
            return
        attempt.known_as_running = False
        if not again:
            self._finished.add(attempt.task)
            self._reports.append(attempt)
            self.place()
        elif not self._cancelled:
            self.world.clock.after(self.world.clock.some(0.2, 2.0), self._wants, attempt.task)
        self.world.driver.poke()

    def lose(self, attempt: Attempt) -> None:
        """Let Spark notice that an attempt is gone."""
        if attempt.known_as_running and attempt.task not in self._finished:
            self.ended(attempt, True)

    def cut_off(self, host: Host) -> None:
        """The driver has lost its connection to a host: its executor is lost, too, if that lasts."""
        if not self.world.network.reaches(host.name, DRIVER) and host not in self._cut_off:
            self._cut_off.add(host)
            self._look_at(host, self.world.clock.now + _CUT_OFF)

    def _look_at(self, host: Host, until: float) -> None:
        if self.world.network.reaches(host.name, DRIVER):
            self._cut_off.discard(host)
            self.place()
        elif self.world.clock.now < until:
            self.world.clock.after(1.0, self._look_at, host, until)
        else:
            self.world.lost(host)

    # ---- what the driver asks of a TaskJob --------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return not self._cancelled and len(self._finished) < len(self.world.plan.starts)

    def wait(self, seconds: float) -> None:
        driver = self.world.driver
        strand().wait(lambda: not self.running or driver.interrupted, seconds)
        if driver.interrupted:
            driver.interrupted = False
            raise KeyboardInterrupt

    def cancel(self) -> None:
        """Kill the tasks that Spark reaches."""
        self._cancelled = True
        for attempt in self.attempts_made:
            if attempt.alive and self.world.network.reaches(DRIVER, attempt.host.name):
                self.world.clock.after(self.world.clock.some(0.0, 1.0), attempt.kill)

    def attempts(self) -> list[TaskAttempt]:
        return [
            TaskAttempt(attempt.number, attempt.known_as_running, attempt.host.name, attempt.host.leaving)
            for attempt in self.attempts_made
        ]

    def reports(self) -> list[AgentReport]:
        """Return what attempts have reported: nothing before all tasks have ended."""
        reports = [attempt.report for attempt in self._reports if attempt.report is not None]
        return reports if len(self._finished) == len(self.world.plan.starts) else []
