"""How a queue reaches its coordinator: alone in its world, on the coordinator's own rank, or on another."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from spark_hvd.collectives.messages import Decision
from spark_hvd.collectives.queue import NegotiatedQueue
from spark_hvd.collectives.underway.outgoing import QueueLink
from spark_hvd.collectives.underway.rounds import MEMORY_SECONDS
from spark_hvd.engine.channel import MemberSockets
from spark_hvd.engine.service import Coordination

GRACE_SECONDS = 0.5
"""How long what is under way may still succeed after a rank has vanished."""


class EngineLoop(Protocol):
    """What links ask of the engine."""

    def gather(self) -> None:
        """Calls have come that nobody waits for yet: send them in a moment. From any thread."""

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the engine's thread, soon. From any thread."""

    def later(self, queue: NegotiatedQueue, seconds: float, step: Callable[[], float | None]) -> None:
        """Take a step for a queue after some time, and again after as many seconds as it returns."""

    def decided(self, link: MemberLink, decisions: Sequence[Decision]) -> None:
        """The coordinator of this link's queue has decided."""


class LoneLink(QueueLink[NegotiatedQueue]):
    """The link of a queue without other members: every call decides and runs at once, in the caller's thread."""

    def __init__(self) -> None:
        self.coordination: Coordination
        self._lock = threading.RLock()  # the user's threads do here what else the engine's one thread does

    def notify(self, queue: NegotiatedQueue) -> None:
        self.post(queue)

    def post(self, queue: NegotiatedQueue) -> None:
        with self._lock:
            self.coordination.read_own()
            queue.resume()

    def join(self, queue: NegotiatedQueue, counts: bool) -> None:
        with self._lock:
            self.coordination.tell(self.coordination.joined(0, counts))

    def failed(self, queue: NegotiatedQueue, text: str) -> None:
        """Nobody waits for this rank."""

    def look_later(self, queue: NegotiatedQueue) -> None:
        """Nothing is ever under way."""

    def peer_lost(self, queue: NegotiatedQueue) -> None:
        """Nothing is ever under way."""


class _EngineLink(QueueLink[NegotiatedQueue]):
    """The link of a queue that the engine serves."""

    _engine: EngineLoop

    def notify(self, queue: NegotiatedQueue) -> None:
        self._engine.gather()

    def look_later(self, queue: NegotiatedQueue) -> None:
        self._engine.call(lambda: self._engine.later(queue, MEMORY_SECONDS, queue.memory.look))

    def peer_lost(self, queue: NegotiatedQueue) -> None:
        self._engine.later(queue, GRACE_SECONDS, queue.give_up)


class CoordinatorLink(_EngineLink):
    """The link of the coordinator's own queue."""

    def __init__(self, engine: EngineLoop) -> None:
        self.coordination: Coordination
        self._engine = engine

    def post(self, queue: NegotiatedQueue) -> None:
        self._engine.call(self.coordination.read_own)

    def join(self, queue: NegotiatedQueue, counts: bool) -> None:
        self._engine.call(lambda: self.coordination.tell(self.coordination.joined(0, counts)))

    def failed(self, queue: NegotiatedQueue, text: str) -> None:
        text = f"rank {queue.ranks[0]} could not do its part: {text}"
        self._engine.call(lambda: self.coordination.tell(self.coordination.failed(0, text)))


class MemberLink(_EngineLink):
    """The link of a queue whose coordinator is another rank."""

    def __init__(self, engine: EngineLoop, sockets: MemberSockets, place: int) -> None:
        self.queue: NegotiatedQueue
        self.sockets = sockets
        self.place = place
        self._engine = engine
        self._sending = threading.RLock()  # ZeroMQ's sockets are for one thread at a time; post() sends within it

    def send(self, kind: str, *fields: Any) -> None:
        """Tell the coordinator; from any thread."""
        with self._sending:
            if not self.sockets.requests.closed:
                self.sockets.send(json.dumps([self.place, kind, *fields], separators=(",", ":")).encode())

    def leave(self) -> None:
        """Take leave, and close the sockets when no other thread is sending."""
        self.send("left", self.queue.done)
        with self._sending:
            self.sockets.close()

    def give_up(self, why: str) -> None:
        """Nothing can be done here any more."""
        self.send("failed", why)

    def post(self, queue: NegotiatedQueue) -> None:
        with self._sending:  # what is taken is sent before anything else, such as join
            ids, fresh = queue.take()
            if ids or fresh:
                self.send("ready", f"{ids:x}", fresh)

    def join(self, queue: NegotiatedQueue, counts: bool) -> None:
        self.send("join", counts)

    def failed(self, queue: NegotiatedQueue, text: str) -> None:
        self.send("failed", text)

    def read(self) -> None:
        """Take in the decisions that have come."""
        while (decisions := self.sockets.receive()) is not None:
            self.queue.apply(decisions)
            self._engine.decided(self, decisions)

    def read_losses(self) -> None:
        """Take in that the connection has ended."""
        if self.sockets.lost():
            self.read()  # what was sent before it did
            self.queue.vanished()
