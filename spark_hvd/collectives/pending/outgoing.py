"""Calls that the coordinator has not been told about yet, and the link to it."""

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
        """Take the outbox soon: it is no longer empty."""

    def post(self, queue: Q) -> None:
        """Take the outbox now: a thread is about to wait."""

    def check_later(self, queue: Q) -> None:
        """Check a call in shared memory soon, and then as often as the check says."""

    def join(self, queue: Q, counts: bool) -> None:
        """Tell the coordinator that this rank has no more data."""

    def failed(self, queue: Q, text: str) -> None:
        """Tell the coordinator that this rank cannot run what all ranks run."""

    def peer_lost(self, queue: Q) -> None:
        """Have the queue give up soon: a rank is gone."""


class OutgoingCalls(Generic[R]):
    """Calls of one queue, under its lock. `R` describes a call to the coordinator. Each name occurs at most once."""

    def __init__(self) -> None:
        self._ids = 0
        self._fresh: list[tuple[str, R]] = []

    def __bool__(self) -> bool:
        return bool(self._ids or self._fresh)

    def put(self, name: str, request: R, bit: int) -> None:
        """Add a call.

        ``bit`` is the bit of its number, or 0 if it has none; then ``request`` describes the call.
        """
        if bit:
            self._ids |= bit
        else:
            self._fresh.append((name, request))

    def take(self) -> tuple[int, list[tuple[str, R]]]:
        """Remove and return all: the numbers of known names as bits, and the other names with their requests."""
        ids, fresh = self._ids, self._fresh
        self._ids, self._fresh = 0, []
        return ids, fresh


class DeferredCalls(Generic[H]):
    """Unnamed calls whose generated name is still in use, under the queue's lock; `H` is the type of their handles."""

    def __init__(self) -> None:
        self._calls: dict[str, deque[H]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def __contains__(self, name: str) -> bool:
        return name in self._calls

    @property
    def names(self) -> list[str]:
        """The names for which the calls wait."""
        return [*self._calls]

    @property
    def handles(self) -> list[H]:
        """The handles of all calls."""
        return [handle for calls in [*self._calls.values()] for handle in [*calls]]

    def put(self, name: str, handle: H) -> None:
        """Add a call."""
        self._calls.setdefault(name, deque()).append(handle)

    def take(self, is_free: Callable[[str], bool]) -> list[H]:
        """Remove and return the next call of each name that is now free."""
        taken = [self._calls[name].popleft() for name in [*self._calls] if is_free(name)]
        self._calls = {name: calls for name, calls in self._calls.items() if calls}
        return taken

    def clear(self) -> list[H]:
        """Remove and return all calls."""
        calls, self._calls = self.handles, {}
        return calls
