"""Calls of which the coordinator has not been told yet, and the way to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

H = TypeVar("H")
Q = TypeVar("Q", contravariant=True)
R = TypeVar("R")


class QueueLink(Protocol[Q]):
    """How a queue reaches its coordinator. All methods may be called from any thread."""

    def notify(self, queue: Q) -> None:
        """The outbox is no longer empty: take it in a moment."""

    def post(self, queue: Q) -> None:
        """Somebody is about to wait: take the outbox now."""

    def look_later(self, queue: Q) -> None:
        """A call goes through memory: look at it in a moment, and as often as the look says."""

    def join(self, queue: Q, counts: bool) -> None:
        """This rank has no more data."""

    def failed(self, queue: Q, text: str) -> None:
        """This rank cannot run what all ranks run."""

    def peer_lost(self, queue: Q) -> None:
        """A rank has gone: have the queue give up in a moment."""


class OutgoingCalls(Generic[R]):
    """Of one queue, and under its lock; `R` is what is told of a call. A call is in it once, under its name."""

    def __init__(self) -> None:
        self._ids = 0
        self._fresh: list[tuple[str, R]] = []

    def __bool__(self) -> bool:
        return bool(self._ids or self._fresh)

    def put(self, name: str, request: R, bit: int) -> None:
        """Add a call.

        ``bit`` is that of its number, 0 if it has none; ``request`` tells of it where the number does not.
        """
        if bit:
            self._ids |= bit
        else:
            self._fresh.append((name, request))

    def take(self) -> tuple[int, list[tuple[str, R]]]:
        """Empty it: the numbers of known names as bits, and the other names with their requests."""
        ids, fresh = self._ids, self._fresh
        self._ids, self._fresh = 0, []
        return ids, fresh


class DeferredCalls(Generic[H]):
    """Calls without a name whose made-up name is still another call's, under the queue's lock; `H` is their handle."""

    def __init__(self) -> None:
        self._calls: dict[str, deque[H]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def __contains__(self, name: str) -> bool:
        return name in self._calls

    @property
    def names(self) -> list[str]:
        """The names that they wait for."""
        return [*self._calls]

    @property
    def handles(self) -> list[H]:
        """All of them."""
        return [handle for calls in [*self._calls.values()] for handle in [*calls]]

    def put(self, name: str, handle: H) -> None:
        """Add a call."""
        self._calls.setdefault(name, deque()).append(handle)

    def take(self, is_free: Callable[[str], bool]) -> list[H]:
        """Remove the next call of each name that is free now."""
        taken = [self._calls[name].popleft() for name in [*self._calls] if is_free(name)]
        self._calls = {name: calls for name, calls in self._calls.items() if calls}
        return taken

    def clear(self) -> list[H]:
        """Remove all."""
        calls, self._calls = self.handles, {}
        return calls
