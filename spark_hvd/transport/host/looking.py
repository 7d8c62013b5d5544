"""How a rank looks at memory that other ranks of its host write to: for a moment before it sleeps, and in order."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable

_LONGEST = 5e-4
"""Seconds for which a rank looks before it sleeps: longer than most waits of a small model's step."""
_SHORTEST = 1e-6


class Spin:
    """Looks again and again, for longer where that has been of use and for less where it was in vain.

    Args:
        ranks: Number of ranks that wait for each other. Where they outnumber cores, to look without sleeping keeps from
            its core the rank that is waited for: there nobody does.
    """

    def __init__(self, ranks: int) -> None:
        self._longest = _LONGEST if ranks <= len(os.sched_getaffinity(0)) else 0.0
        self._seconds = self._longest

    def sees(self, arrived: Callable[[], bool]) -> bool:
        """Look for a moment; returns whether it has come true."""
        until = time.perf_counter() + self._seconds
        while time.perf_counter() < until:
            if arrived():
                self._seconds = min(2 * self._seconds, self._longest)
                return True
            os.sched_yield()
        # In vain: the others are late, or have no core. Try less the next time.
        self._seconds = max(self._seconds / 2, min(_SHORTEST, self._longest))
        return False


ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")
"""Whether processors keep stores in order, and loads: only a load may overtake a store there (x86-TSO)."""


class Fence:
    """For one thread at a time: what it has written is seen by all before it reads on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._guard = threading.Lock()

    def __call__(self) -> None:
        """Let all that this thread has written be seen."""
        # To let go of a lock orders what was before, to take one what comes after, and both are one order. On Arm: what
        # is before a store-release stays before it, what is after a load-acquire stays after it, and a load-acquire is
        # not done before an earlier store-release (Arm ARM B2.3: po;[L], [A];po and [L];po;[A] are ordered). glibc's
        # semaphores, which Python's locks are up to 3.12, and the atomics of later ones are made of these.
        self._lock.release()
        self._lock.acquire()

    def publish(self) -> None:
        """Before a flag is written: whoever sees it sees what was written before. From any thread."""
        if not ORDERED:
            with self._guard:
                self()

    def look(self) -> None:
        """After a flag was seen: what is read from now on is what was there when it was written. From any thread."""
        if not ORDERED:
            with self._guard:
                self()
