"""Hosts, and the connections between them, which may be slow, or cut, one way or both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tests.world.clock import Clock

DRIVER = "driver"


class Network:
    """Which hosts reach which others.

    Args:
        clock: The world's clock.
        latency: Maximum number of seconds that a message takes.
    """

    def __init__(self, clock: Clock, latency: float) -> None:
        self.clock, self.latency = clock, latency
        self._cuts: dict[tuple[str, str], int] = {}
        self.down: set[str] = set()
        self._held: list[Pipe] = []

    def open(self, source: str, target: str) -> bool:
        """Return whether packets get from one host to another."""
        return (source, target) not in self._cuts and source not in self.down and target not in self.down

    def reaches(self, one: str, other: str) -> bool:
        """Return whether two hosts can connect."""
        return self.open(one, other) and self.open(other, one)

    def cut(self, source: str, target: str) -> None:
        """Lose packets from one host to another from now on."""
        self._cuts[source, target] = self._cuts.get((source, target), 0) + 1

    def heal(self, source: str, target: str) -> None:
        """Let them through again, unless they are cut again; TCP resends what was lost, a little later."""
        self._cuts[source, target] -= 1
        if not self._cuts[source, target]:
            del self._cuts[source, target]
        held, self._held = self._held, []
        for pipe in held:
            self.clock.after(self.clock.some(0.0, 2.0), pipe.flush)

    def hold(self, pipe: Pipe) -> None:
        """Record that this connection has data that do not get through now."""
        if pipe not in self._held:
            self._held.append(pipe)


class Pipe:
    """One direction of a TCP connection: data arrive in order, late, or never.

    Args:
        network: The network.
        source: The host at one end.
        target: The host at the other.
        deliver: Takes what arrives.
    """

    def __init__(self, network: Network, source: str, target: str, deliver: Callable[[Any], object]) -> None:
        self._network, self._source, self._target, self._deliver = network, source, target, deliver
        self._last = 0.0
        self._waiting: deque[Any] = deque()

    def send(self, message: Any) -> None:
        """Send; never blocks."""
        if self._waiting or not self._network.open(self._source, self._target):
            self._waiting.append(message)
            self._network.hold(self)
            return
        clock = self._network.clock
        local = self._source == self._target
        self._last = max(self._last, clock.now + (0.001 if local else self._network.latency) * clock.random.random())
        clock.after(self._last - clock.now, self._arrive, message)

    def flush(self) -> None:
        """Send again."""
        waiting, self._waiting = self._waiting, deque()
        for message in waiting:
            self.send(message)

    def _arrive(self, message: Any) -> None:
        if self._target not in self._network.down:
            self._deliver(message)
