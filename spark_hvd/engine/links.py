"""How a queue reaches its coordinator: directly in a world of one or on the coordinator's own rank, else by sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from spark_hvd.collectives.messages import Decision
from spark_hvd.collectives.pending.outgoing import QueueLink
from spark_hvd.collectives.pending.rounds import MEMORY_SECONDS
from spark_hvd.collectives.queue import NegotiatedQueue
from spark_hvd.engine.channel import MemberSockets
from spark_hvd.engine.service import Coordination

GRACE_SECONDS = 0.5
"""How long collectives in flight may still succeed after a rank has vanished."""


class EngineLoop(Protocol):
    """The methods of the engine that links use."""

    def gather(self) -> None:
        """Send calls that nobody waits for yet, after a moment. From any thread."""

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the engine's thread soon. From any thread."""

    def later(self, queue: NegotiatedQueue, seconds: float, step: Callable[[], float | None]) -> None:
        """Run ``step`` for a queue after some seconds, and again after as many seconds as it returns."""

    def decided(self, link: MemberLink, decisions: Sequence[Decision]) -> None:
        """Handle decisions of this link's coordinator that are no queue's business."""


class LoneLink(QueueLink[NegotiatedQueue]):
    """The link of a queue without other members: every call is decided and runs at once, in the caller's thread."""

    def __init__(self) -> None:
        self.coordination: Coordination
        self._lock = threading.RLock()  # user threads do here what otherwise only the engine's thread does

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
        """Do nothing: no other rank waits for this one."""

    def check_later(self, queue: NegotiatedQueue) -> None:
        """Do nothing: nothing is ever in flight."""

    def peer_lost(self, queue: NegotiatedQueue) -> None:
        """Do nothing: nothing is ever in flight."""


class _EngineLink(QueueLink[NegotiatedQueue]):
    """The link of a queue that the engine serves."""

    _engine: EngineLoop

    def notify(self, queue: NegotiatedQueue) -> None:
        self._engine.gather()

    def check_later(self, queue: NegotiatedQueue) -> None:
        self._engine.call(lambda: self._engine.later(queue, MEMORY_SECONDS, queue.memory.check))

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
        self._sending = threading.RLock()  # sockets are for one thread at a time; post() calls send() with it

    def send(self, kind: str, *fields: Any) -> None:
        """Send a message to the coordinator; from any thread."""
        with self._sending:
            if not self.sockets.requests.closed:
                self.sockets.send(json.dumps([self.place, kind, *fields], separators=(",", ":")).encode())

    def leave(self) -> None:
        """Tell the coordinator that this rank leaves, and close the sockets when no other thread is sending."""
        self.send("left", self.queue.done)
        with self._sending:
            self.sockets.close()

    def give_up(self, why: str) -> None:
        """Tell the coordinator that this rank has failed."""
        self.send("failed", why)

    def post(self, queue: NegotiatedQueue) -> None:
        with self._sending:  # what is taken must be sent before anything else, such as join
            ids, fresh = queue.take()
            if ids or fresh:
                self.send("ready", f"{ids:x}", fresh)

    def join(self, queue: NegotiatedQueue, counts: bool) -> None:
        self.send("join", counts)

    def failed(self, queue: NegotiatedQueue, text: str) -> None:
        self.send("failed", text)

    def read(self) -> None:
        """Apply the decisions that have arrived."""
        while (decisions := self.sockets.receive()) is not None:
            self.queue.apply(decisions)
            self._engine.decided(self, decisions)

    def read_losses(self) -> None:
        """Handle the end of the connection, if it has ended."""
        if self.sockets.lost():
            self.read()  # apply what was sent before the end
            self.queue.vanished()
