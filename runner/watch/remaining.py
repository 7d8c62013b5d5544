"""How long a run will still take, from what is left and how fast it went so far."""

from __future__ import annotations

from collections import deque

from spark_hvd.runner.watch.snapshot import Remaining
from spark_hvd.world.vitals import Vitals

_LEAST = 3.0
"""Seconds of work before anything is said."""
_WINDOW = 60.0
"""Seconds over which the speed is taken, at least; and at least a whole epoch, with all that comes between two."""


class Pace:
    """Fed with the records of one rank: ranks that train together are equally far.

    Loops of another name than the first one's (a validation after each epoch) do not count as work to be done, but
    the time they take does.
    """

    def __init__(self) -> None:
        self._stage = ""
        self._marks: deque[tuple[float, int]] = deque()
        self._total = 0
        self._whole = False
        self._loop: tuple[int | None, int | None] = (None, None)

    def forget(self) -> None:
        """The ranks have changed: what comes may be faster or slower."""
        self._marks.clear()

    def take(self, record: Vitals, now: float) -> None:
        """Note how far the rank is."""
        if not record.stage or (self._stage and record.stage != self._stage):
            return
        self._stage = record.stage
        done, total, whole = _position(record)
        if self._marks and (total != self._total or whole != self._whole or done < self._marks[-1][1]):
            self._marks.clear()  # another loop, or back to an earlier state
        self._total, self._whole = total, whole
        if total == 0 or record.total_steps == 0:  # the first step, with all that is made ready in it, says little
            return
        if len(self._marks) > 1 and now - self._marks[-2][0] < (now - self._marks[0][0]) / 100:
            self._marks.pop()
        self._marks.append((now, done))
        epoch = record.steps or 0 if whole else 0
        while len(self._marks) > 2 and self._marks[1][0] <= now - _WINDOW and self._marks[1][1] <= done - epoch:
            self._marks.popleft()

    def remaining(self, now: float) -> Remaining | None:
        """What is left; None if it cannot be told (yet)."""
        if not self._marks:
            return None
        (since, before), (until, done) = self._marks[0], self._marks[-1]
        if until - since < _LEAST or done == before or done > self._total:
            return None
        left = (self._total - done) * (until - since) / (done - before) - (now - until)
        return Remaining(max(0.0, left), self._whole)


def _position(record: Vitals) -> tuple[int, int, bool]:
    """Steps done, of how many (0: not known), and whether that is all there will be."""
    if not record.steps:
        return 0, 0, False
    if record.epoch is not None and record.epochs:
        return record.epoch * record.steps + record.step, record.epochs * record.steps, True
    return record.step, record.steps, record.epoch is None and record.total_steps == record.step
