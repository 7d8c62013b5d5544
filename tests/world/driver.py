"""The driver: the product's hub behind a simulated socket, and the loop that stays with the run."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import zmq

from spark_hvd.runner.elastic.hub import ElasticHub, ElasticState, labelled
from spark_hvd.runner.elastic.results import elastic_results
from spark_hvd.runner.elastic.run import _watch_spark, attend_elastic
from spark_hvd.world.vitals import Vitals
from tests.world.clock import Strand
from tests.world.watched import Watched
from tests.world.wire import Pipe

if TYPE_CHECKING:
    from tests.world.world import SimulatedWorld

_TICK = 0.5
_NOTHING = zmq.Again()


class Frame:
    """Replaces zmq.Frame."""

    def __init__(self, data: Any) -> None:
        self.bytes = data

    def get(self, option: int) -> int:
        return 0


class Router:
    """Replaces the hub's socket: a message's sender is its identity."""

    def __init__(self) -> None:
        self.inbox: deque[tuple[Pipe, bytes, bytes]] = deque()

    def recv_multipart(self, flags: int, copy: bool) -> list[Frame]:
        if not self.inbox:
            raise _NOTHING
        pipe, *frames = self.inbox.popleft()
        return [Frame(pipe), *(Frame(frame) for frame in frames if frame)]

    def send_multipart(self, parts: list[Any]) -> None:
        parts[0].send(parts[1])


class Driver:
    """See the module's description."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world, self._clock = world, world.clock
        self._router = Router()
        self.hub = hub = ElasticHub.__new__(ElasticHub)
        state = ElasticState(world.plan.limits)
        state.membership = Watched(world.plan.limits, world.clock.random)
        hub._state, hub._lock = state, threading.Lock()
        hub._listener = labelled(self._heard, state.labels)
        hub._questions, hub._closing, hub._identities, hub._links = deque(), threading.Event(), {}, {}
        hub.failure, hub._observes = None, True
        hub._socket = self._router  # type: ignore[assignment]
        hub._zap = SimpleNamespace(handle_requests=lambda: None)  # type: ignore[assignment]
        hub._unauthenticated = SimpleNamespace(process_events=lambda: None, authenticated=lambda descriptor: None)  # type: ignore[assignment]
        self._poller: Any = SimpleNamespace(poll=lambda milliseconds: self._router.inbox)
        self.frozen = self.dead = self._soon = self.interrupted = False
        self.values: list[Any] | None = None
        self.error: BaseException | None = None
        self.ended_at: float | None = None

    def _heard(self, rank: int, said: Any) -> None:
        if isinstance(said, Vitals):
            self._world.checks.lives(said)
        elif said["type"] == "output":
            self._world.checks.printed(rank, said["text"])

    @property
    def membership(self) -> Any:
        """The product's membership."""
        return self.hub._state.membership

    @property
    def answers(self) -> bool:
        """Return whether the driver is alive."""
        return not self.frozen and not self.dead and self.ended_at is None

    def start(self) -> None:
        """Begin the run."""
        self._strand = Strand(self._clock, self._attend)
        self._regularly()

    def poke(self) -> None:
        """Check again: something may have ended."""
        self._strand.poke()

    def take(self, message: tuple[Pipe, bytes, bytes]) -> None:
        """Take a message from an agent."""
        self._router.inbox.append(message)
        if not self._soon and b'"alive"' not in message[1]:
            self._soon = True
            self._clock.after(0.0, self.turn)

    def freeze(self, *, frozen: bool) -> None:
        """Suspend the driver, or let it continue."""
        self.frozen = self._strand.frozen = frozen
        self._strand.poke()

    def kill(self) -> None:
        """End the driver."""
        self.dead = True
        self._strand.kill()

    def _regularly(self) -> None:
        if self.ended_at is None and not self.dead:
            self.turn()
            self._clock.after(_TICK, self._regularly)

    def turn(self) -> None:
        """Let the hub take its turn."""
        self._soon = False
        if not self.frozen and not self.dead:
            self.hub._guarded(lambda: self.hub._turn(self._poller))
            self._world.checks.decided(self.membership)

    def _attend(self) -> None:
        world, hub = self._world, self.hub
        monitor: Any = SimpleNamespace(ask=lambda hub: None, flush=lambda: None, hang=None)
        config: Any = SimpleNamespace(timeout=world.plan.timeout)
        job: Any = world.spark
        try:
            verdict = attend_elastic(job, hub, config, monitor, _watch_spark(job, hub))
            assert verdict is not None, "the job ended before the run"
            self.values = elastic_results(hub, job.reports())
        except (Exception, KeyboardInterrupt) as error:
            self.error = error
        self.ended_at = self._clock.now
        world.log("the run ends: {}", self.error or "well")
