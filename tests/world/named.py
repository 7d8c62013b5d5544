"""Named collectives of one world: the product's coordinator at rank 0, in place of the engine's thread."""

from __future__ import annotations

import json
from collections import deque
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from spark_hvd.collectives.messages import Decision, Entry, Fail, Gone, Request, decode, encode
from spark_hvd.collectives.pending.failure import error_of
from spark_hvd.engine.service import Coordination
from spark_hvd.world.config import Config
from spark_hvd.world.errors import CollectiveError
from tests.coordinated import Calls
from tests.world.clock import acting, strand
from tests.world.wire import Pipe

if TYPE_CHECKING:
    from tests.world.mesh import Mesh

_LOOK = 1.0
_SILENCE = 3.0
"""Seconds after which a silent connection ends."""
_CONNECT = 30.0


_config = cache(lambda stall_timeout, names: Config(stall_timeout=stall_timeout, cache_capacity=names))


class Named(Calls):
    """One rank's named collectives; also the sockets of the coordinator, on rank 0.

    Args:
        mesh: The ranks' connections.
        hosts: The host of each.
    """

    def __init__(self, mesh: Mesh, hosts: list[str]) -> None:
        super().__init__(mesh.rank)
        self._mesh, self._process = mesh, mesh.process
        # What the coordination needs from a queue.
        self.ranks: Any = range(mesh.size)
        self.memory = SimpleNamespace(last=lambda place: None, ids=0)
        self.tracing = SimpleNamespace(recorder=None)
        self.members = SimpleNamespace(hosts=hosts)
        self.done = 0
        self.failure: str | None = None
        self._outcomes: deque[tuple[str, Entry | Fail]] = deque()
        self._inbox: deque[bytes] = deque()
        self._presence: deque[tuple[int, bool]] = deque()
        self._lost: set[int] = set()
        self._closed = False
        network, process = self._process.world.network, self._process
        others = mesh.members[1:] if mesh.rank == 0 else mesh.members[:1]
        self._pipes = [
            Pipe(network, process.host, other.host, lambda m, other=other: other.hear(mesh.generation, mesh.rank, m))  # type: ignore[misc]
            for other in others
        ]
        self.coordination: Coordination | None = None
        if mesh.rank == 0:
            config = _config(process.spec.collective_timeout, process.world.plan.names)
            self.coordination = Coordination(self, config, self)  # type: ignore[arg-type]
            self._process.world.clock.after(_LOOK, self._look)
        else:
            self._tell("come")
            self._tell("hello")

    def open(self) -> None:
        """Wait until the others are connected; blocks.

        Raises:
            CollectiveError: They do not connect.
        """
        coordination = self.coordination
        if coordination is None:
            return
        self.turn()
        here = strand().wait(lambda: coordination.complete.is_set() or self._over() is not None, _CONNECT)
        if not here or self._over() is not None:
            raise CollectiveError(self._over() or coordination.absent_text(_CONNECT))

    def run(self, calls: list[tuple[str, Request]]) -> list[Entry]:
        """Submit collectives, and wait until all may run; return the order in which they do. Blocks.

        Raises:
            CollectiveError: A peer or the network failed.
            MismatchError, StalledError: The coordinator reports it.
        """
        for name, request in calls:
            self.submit(name, request)
        if self._over() is None:
            if self.coordination is not None:
                self.coordination.read_own()
            else:
                ids, fresh = self.take()
                self._tell("ready", f"{ids:x}", fresh)
        order: list[Entry] = []
        while len(order) < len(calls):
            strand().wait(lambda: bool(self._outcomes) or self._over() is not None)
            if not self._outcomes:
                raise CollectiveError(f"{', '.join(self.calls)} failed: {self._over()}")
            name, outcome = self._outcomes.popleft()
            if isinstance(outcome, Fail):
                raise error_of(outcome.error, outcome.text)
            assert name == outcome.name
            order.append(outcome)
        return order

    def _over(self) -> str | None:
        return self.failure or self._mesh.broken

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def take_message(self, sender: int, message: bytes | None) -> None:
        """Take a message from the coordinator, or from a member."""
        if message is None or message == b"come":
            self._presence.append((sender, message is not None))
        else:
            self._inbox.append(message)
        self.turn()

    def turn(self) -> None:
        """Process the messages, unless the process is stopped."""
        if self._process.strand.frozen or not self._process.alive or self._closed:
            return
        with acting(self._process):
            if self.coordination is not None:
                self.coordination.read_presence()
                self.coordination.read_requests()
            else:
                while self._inbox:
                    self.apply(decode(self._inbox.popleft()))
                if self._presence:
                    self.failure = self.failure or "rank 0, which coordinates, has ended without notice"
        self._process.strand.poke()

    def apply(self, decisions: list[Decision]) -> None:
        """Carry out the coordinator's decisions."""
        for decision in decisions:
            if isinstance(decision, Gone):
                self.failure = self.failure or decision.text
            else:
                self.take_in(decision)
        self._process.strand.poke()

    def end(self, name: str, outcome: Entry | Fail) -> None:
        self._outcomes.append((name, outcome))

    def _look(self) -> None:
        process, coordination = self._process, self.coordination
        if self._closed or not process.alive or coordination is None:
            return
        for place, other in enumerate(self._mesh.members[1:], 1):
            if place not in self._lost and not process.world.network.reaches(process.host, other.host):
                self._lost.add(place)
                process.world.clock.after(_SILENCE, self._silent, place)
        if not process.strand.frozen and coordination.waits:
            with acting(process):
                coordination.check()
        process.world.clock.after(_LOOK, self._look)

    def _silent(self, place: int) -> None:
        """Let both ends of a connection notice silence, if it lasts."""
        self._lost.discard(place)
        other = self._mesh.members[place]
        if not self._process.world.network.reaches(self._process.host, other.host):
            self.take_message(place, None)
            other.hear(self._mesh.generation, 0, None)

    def close(self, text: str) -> None:
        """Leave, and end the connections; collectives in flight fail."""
        self.abort(text)
        if not self._closed and self._process.alive:
            if self.coordination is not None:
                self.coordination.tell(self.coordination.left(0, self.done))
            else:
                self._tell("left", self.done)
        self.hang_up()

    def abort(self, text: str) -> None:
        """Fail the collectives in flight."""
        self.failure = self.failure or text
        self._process.strand.poke()

    def hang_up(self) -> None:
        """End the connections."""
        if not self._closed:
            self._closed = True
            self._to_others(None)

    # ---- sockets --------------------------------------------------------------------------------------------------

    def receive(self) -> bytes | None:
        return self._inbox.popleft() if self._inbox else None

    def presence(self) -> tuple[int, bool] | None:
        return self._presence.popleft() if self._presence else None

    def send(self, decisions: list[Decision]) -> None:
        self._to_others(encode(decisions))

    def _tell(self, kind: str, *fields: Any) -> None:
        self._to_others(kind.encode() if kind == "come" else json.dumps([self.place, kind, *fields]).encode())

    def _to_others(self, message: bytes | None) -> None:
        for pipe in self._pipes:
            pipe.send(message)
