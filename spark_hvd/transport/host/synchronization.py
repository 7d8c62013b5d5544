"""Synchronization over memory that the ranks of a host share: adaptive spinning, and memory fences."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable

_LONGEST = 5e-4
"""Seconds for which a rank spins before it sleeps: longer than most waits in a small model's step."""
_SHORTEST = 1e-6


class AdaptiveSpin:
    """Spins before a rank sleeps, longer if spinning has helped before and shorter if it has not.

    Args:
        ranks: Number of ranks that wait for each other. If there are more ranks than cores, a spinning rank would keep
            the one that it waits for off its core, so nobody spins.
    """

    def __init__(self, ranks: int) -> None:
        self._longest = _LONGEST if ranks <= len(os.sched_getaffinity(0)) else 0.0
        self._seconds = self._longest

    def until(self, arrived: Callable[[], bool]) -> bool:
        """Spin for a moment; return whether the condition became true."""
        until = time.perf_counter() + self._seconds
        while time.perf_counter() < until:
            if arrived():
                self._seconds = min(2 * self._seconds, self._longest)
                return True
            os.sched_yield()
        # The others are late, or have no core. Spin for less time next time.
        self._seconds = max(self._seconds / 2, min(_SHORTEST, self._longest))
        return False


ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")
"""Whether processors keep stores in order, and loads too: there, only a load may overtake a store (x86-TSO)."""


class Fence:
    """A full memory fence: what a thread has written is visible before it reads on. For one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._guard = threading.Lock()

    def __call__(self) -> None:
        """Make all writes of this thread visible."""
        # Releasing a lock orders what came before, acquiring one what comes after, and both together are one order.
        # On Arm, what precedes a store-release stays before it, what follows a load-acquire stays after it, and a
        # load-acquire does not happen before an earlier store-release (Arm ARM B2.3: po;[L], [A];po and [L];po;[A] are
        # ordered). glibc's semaphores, which implement Python's locks up to 3.12, and the atomics of later versions
        # consist of these.
        self._lock.release()
        self._lock.acquire()

    def release(self) -> None:
        """Call before writing a flag: a rank that sees the flag sees everything written before. From any thread."""
        if not ORDERED:
            with self._guard:
                self()

    def acquire(self) -> None:
        """Call after seeing a flag: later reads see at least what was there when it was written. From any thread."""
        if not ORDERED:
            with self._guard:
                self()
