"""A virtual clock, and blocking code that runs under it: one piece at a time, and only while the clock waits for it."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from greenlet import getcurrent, greenlet

_MOST = 300_000
"""Maximum events of a world; a long one has 20,000."""


class Killed(BaseException):
    """Ends the blocking code of a process that is gone."""


class Clock:
    """Calls functions at virtual times; those of the same moment run in the order in which they were requested.

    Args:
        seed: Seed of all chance in a world.
        grain: Seconds of which all times are multiples, so that much happens at the same moment; 0 for none.
    """

    def __init__(self, seed: int | str, grain: float = 0.0) -> None:
        self.now, self._grain = 1000.0, grain
        self.random = Random(seed)
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._soon: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        """The calls of this moment, after earlier ones that are still due."""
        self._numbers = itertools.count()
        self.strands: list[Strand] = []

    def after(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """Call a function after so many seconds."""
        if self._grain:
            seconds = self.rounded(seconds)
        if seconds:
            heapq.heappush(self._due, (self.now + seconds, next(self._numbers), call, args))
        else:
            self._soon.append((call, args))

    def rounded(self, seconds: float) -> float:
        """Return a multiple of the grain."""
        return round(seconds / self._grain) * self._grain if self._grain else seconds

    def some(self, least: float, most: float) -> float:
        """Return a random number of seconds."""
        return least + (most - least) * self.random.random()

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Let time pass until a moment, or until a condition holds."""
        due, soon = self._due, self._soon
        for _ in range(_MOST):
            if not (due or soon) or done():
                return
            if soon and not (due and due[0][0] <= self.now):
                call, args = soon.popleft()
            else:
                moment, _, call, args = heapq.heappop(due)
                if moment > until:
                    self.now = until
                    return
                self.now = moment
            call(*args)
        raise AssertionError("it goes round in circles")

    def close(self) -> None:
        """End all blocking code."""
        for strand in self.strands:
            strand.kill()
            while not strand.ended:
                with contextlib.suppress(Exception):  # raised on the way out of a process that is gone
                    strand.go()


class Strand:
    """Blocking code on its own stack.

    Args:
        clock: The clock under which it runs.
        work: The code. What it raises is raised where the clock runs.
        owner: The owner of the code: see :func:`me`.
    """

    def __init__(self, clock: Clock, work: Callable[[], object], owner: Any = None) -> None:
        self._clock, self._work, self.owner = clock, work, owner
        self._ready: Callable[[], bool] = lambda: True
        self._until: float | None = None
        self._poked = self._killed = self.ended = False
        self.frozen = False
        self._greenlet = greenlet(self._run)
        clock.strands.append(self)
        self.poke()

    def wait(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until a condition holds, at most so long; called by the code itself. Others call poke when it may hold.

        Returns:
            Whether it holds.
        """
        if self._killed:
            raise Killed
        if not ready():
            self._ready = ready
            self._until = None if seconds is None else self._clock.now + self._clock.rounded(seconds)
            if seconds is not None:
                self._clock.after(seconds, self._look)
            self._greenlet.parent.switch()
            self._until = None
        if self._killed:
            raise Killed
        return ready()

    def poke(self) -> None:
        """Check again what the code waits for."""
        if not self._poked and not self.ended:
            self._poked = True
            self._clock.after(0.0, self._look)

    def kill(self) -> None:
        """End it where it waits."""
        self._killed = True
        self.poke()

    def _look(self) -> None:
        self._poked = False
        over = self._until is not None and self._clock.now >= self._until
        if not self.ended and (self._killed or (not self.frozen and (over or self._ready()))):
            self.go()

    def go(self) -> None:
        """Let the code run until it waits again, or ends."""
        global _current, _me
        before, _current, _me = (_current, _me), self, self.owner
        try:
            self._greenlet.parent = getcurrent()
            self._greenlet.switch()
        finally:
            _current, _me = before

    def _run(self) -> None:
        try:
            if not self._killed:
                self._work()
        except Killed:
            pass
        finally:
            self.ended = True


_current: Strand | None = None
_me: Any = None


def me() -> Any:
    """Return the owner of the running code: a rank's process; None for the driver's, an agent's or no code."""
    return _me


def running() -> Strand | None:
    """Return the running blocking code, if any."""
    return _current


def strand() -> Strand:
    """Return the running blocking code."""
    assert _current is not None
    return _current


@contextlib.contextmanager
def acting(owner: Any) -> Iterator[None]:
    """Let code run on behalf of a process."""
    global _me
    before, _me = _me, owner
    try:
        yield
    finally:
        _me = before
