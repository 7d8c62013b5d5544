"""How a lane reaches its coordinator: alone in its world, on the coordinator's own rank, or on another."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from spark_hvd.collectives.lane import Lane, LaneLink
from spark_hvd.collectives.messages import Decision
from spark_hvd.engine.channel import MemberSockets
from spark_hvd.engine.service import Coordination


class EngineLoop(Protocol):
    """What links ask of the engine."""

    def gather(self) -> None:
        """Calls have come that nobody waits for yet: send them in a moment. From any thread."""
        ...

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the engine's thread, soon. From any thread."""
        ...

    def abandon_later(self, lane: Lane) -> None:
        """A rank of this lane has gone: what is under way has a moment left to succeed."""
        ...

    def decided(self, link: MemberLink, decisions: Sequence[Decision]) -> None:
        """The coordinator of this link's lane has decided."""
        ...


class LoneLink(LaneLink):
    """The link of a lane without other members: every call decides and runs at once, in the caller's thread."""

    def __init__(self) -> None:
        self.coordination: Coordination
        self._lock = threading.RLock()

    def notify(self, lane: Lane) -> None:
        """See base class."""
        self.post(lane)

    def post(self, lane: Lane) -> None:
        """See base class."""
        with self._lock:
            self.coordination.read_own()
            lane.resume()

    def join(self, lane: Lane, counts: bool) -> None:
        """See base class."""
        with self._lock:
            self.coordination.tell(self.coordination.joined(0, counts))

    def failed(self, lane: Lane, text: str) -> None:
        """Nobody waits for this rank."""

    def peer_lost(self, lane: Lane) -> None:
        """Nothing is ever under way."""


class CoordinatorLink(LaneLink):
    """The link of the coordinator's own lane."""

    def __init__(self, engine: EngineLoop) -> None:
        self.coordination: Coordination
        self._engine = engine

    def notify(self, lane: Lane) -> None:
        """See base class."""
        self._engine.gather()

    def post(self, lane: Lane) -> None:
        """See base class."""
        self._engine.call(self.coordination.read_own)

    def join(self, lane: Lane, counts: bool) -> None:
        """See base class."""
        self._engine.call(lambda: self.coordination.tell(self.coordination.joined(0, counts)))

    def failed(self, lane: Lane, text: str) -> None:
        """See base class."""
        text = f"rank {lane.ranks[0]} could not do its part: {text}"
        self._engine.call(lambda: self.coordination.tell(self.coordination.failed(0, text)))

    def peer_lost(self, lane: Lane) -> None:
        """See base class."""
        self._engine.abandon_later(lane)


class MemberLink(LaneLink):
    """The link of a lane whose coordinator is another rank."""

    def __init__(self, engine: EngineLoop, sockets: MemberSockets, place: int) -> None:
        self.lane: Lane
        self.sockets = sockets
        self.place = place
        self._engine = engine
        self._sending = threading.RLock()

    def send(self, kind: str, *fields: Any) -> None:
        """Tell the coordinator; from any thread."""
        with self._sending:
            if not self.sockets.requests.closed:
                self.sockets.send(json.dumps([self.place, kind, *fields], separators=(",", ":")).encode())

    def leave(self) -> None:
        """Take leave, and close the sockets when no other thread is sending."""
        self.send("left", self.lane.done)
        with self._sending:
            self.sockets.close()

    def give_up(self, why: str) -> None:
        """Nothing can be done here any more."""
        self.send("failed", why)

    def notify(self, lane: Lane) -> None:
        """See base class."""
        self._engine.gather()

    def post(self, lane: Lane) -> None:
        """See base class."""
        with self._sending:  # what is taken is sent before anything else, such as join
            ids, fresh = lane.take()
            if ids or fresh:
                self.send("ready", f"{ids:x}", fresh)

    def join(self, lane: Lane, counts: bool) -> None:
        """See base class."""
        self.send("join", counts)

    def failed(self, lane: Lane, text: str) -> None:
        """See base class."""
        self.send("failed", text)

    def peer_lost(self, lane: Lane) -> None:
        """See base class."""
        self._engine.abandon_later(lane)

    def read(self) -> None:
        """Take in the decisions that have come."""
        while (decisions := self.sockets.receive()) is not None:
            self.lane.apply(decisions)
            self._engine.decided(self, decisions)

    def read_losses(self) -> None:
        """Take in that the connection has ended."""
        if self.sockets.lost():
            self.read()  # what was sent before it did
            self.lane.vanished()
