"""The speed of a process, the shares of its time, and the time that the run has left."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from spark_hvd.runner.watch.snapshot import Remaining, Slowest
from spark_hvd.world.vitals import Vitals

GROWING = ("clock", "total_steps", "samples", "watched_seconds", "data_seconds", "comm_seconds", "cpu_seconds")
"""Fields of Vitals that only grow while a process lives."""
SHARES = ("data", "communication", "compute")
"""Of the ranks' time."""
SEEN = 0.005
"""Where no rank waits for communication for as much of its time, that is not told: it would read 0 %, and it is only
that of our own collectives. DDP's and Lightning's, which torch makes, are not seen."""
WINDOW = 10.0
"""Seconds over which rates are taken, where a step is shorter than a few of them."""
_SKEW = 1.1
"""A rank that is slower than the median one by less is not worth a word."""
_GAIN = 0.05
"""Nor is one for which the others wait for less than this share of a step."""
_STEPS = 3
"""Where steps are so long that fewer of them fit into the window, it grows to that many; fewer tell nothing."""
_JUDGED = 4.0
"""Seconds of each rank's work that are looked at, at least, before one is called the slowest."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a rank did in some time. All displays, plots and trackers use these three shares, from 0 to 1.

    Attributes:
        seconds: Length of that time, on the rank's clock.
        steps: Steps of `hvd.progress`, or of the optimizer.
        samples: Number of samples; 0 if they are not counted.
        data: Share of the time waiting for data.
        communication: Share of the time waiting for communication.
        compute: The remaining share inside of `hvd.progress` loops. What is missing to 1 was spent outside of them.
        cpu: Cores in use.
    """

    seconds: float
    steps: int
    samples: int
    data: float
    communication: float
    compute: float
    cpu: float

    @property
    def samples_per_second(self) -> float:
        """0 if samples are not counted."""
        return self.samples / self.seconds

    @property
    def steps_per_second(self) -> float:
        """0 if steps are not counted."""
        return self.steps / self.seconds


def goes_on(before: Vitals, after: Vitals) -> bool:
    """Whether both records are from one process in one world; before its first world, the generation is -1."""
    return before.process == after.process and before.generation in (after.generation, -1)


def grown(before: Vitals, after: Vitals) -> dict[str, float]:
    """The growth of each of `GROWING` between two records of one process."""
    return {name: float(getattr(after, name) - getattr(before, name)) for name in GROWING}


def rates(differences: Mapping[str, float]) -> Rates | None:
    """The rates for counters that grew by `differences`; None if no time has passed."""
    seconds = differences["clock"]
    if seconds <= 0:
        return None
    watched = min(differences["watched_seconds"], seconds)
    data = min(differences["data_seconds"], watched)
    communication = min(differences["comm_seconds"], seconds - data)
    return Rates(
        seconds=seconds,
        steps=int(differences["total_steps"]),
        samples=int(differences["samples"]),
        data=data / seconds,
        communication=communication / seconds,
        compute=max(0.0, watched - data - communication) / seconds,
        cpu=differences["cpu_seconds"] / seconds,
    )


def shares(done: Rates | None, last: Vitals) -> dict[str, float | None]:
    """The shares data, communication and compute by name; None for unknown ones.

    Without a loop whose data are watched, waiting for data would count as work.
    """
    return {
        "data": done.data if done is not None and last.data_seconds else None,
        "communication": None if done is None else done.communication,
        "compute": done.compute if done is not None and last.stage else None,
    }


class Recent:
    """The last records of one process in one world.

    Rates are taken between records that have more steps than the one before, so they do not jump if a step takes
    several seconds.
    """

    def __init__(self, record: Vitals) -> None:
        self._records = deque([record])
        self._marks: deque[Vitals] = deque([record] if record.total_steps else [])
        self.paced = False
        """Whether rates of steps can be told."""

    @property
    def last(self) -> Vitals:
        """The newest record of the rank."""
        return self._records[-1]

    def take(self, record: Vitals) -> None:
        """Take the next record of the rank."""
        if record.total_steps > (self._marks[-1].total_steps if self._marks else 0):
            self._marks.append(record)
            self.paced = len(self._marks) > 1
        self._records.append(record)
        _drop(self._records, record.clock - WINDOW)
        _drop(self._marks, record.clock - max(WINDOW, _STEPS * self._gap()))

    def done(self) -> Rates | None:
        """The last seconds: from step to step if there are steps, but until now if one is overdue."""
        if not self.paced:
            return rates(grown(self._records[0], self.last))
        late = self.last.clock - self._marks[-1].clock > 2 * self._gap() + 1
        return rates(grown(self._marks[0], self.last if late else self._marks[-1]))

    def cpu(self) -> float | None:
        """Cores in use in the last seconds."""
        done = rates(grown(self._records[0], self.last))
        return None if done is None else done.cpu

    def _gap(self) -> float:
        """The usual number of seconds between two steps."""
        gaps = [later.clock - earlier.clock for earlier, later in itertools.pairwise(self._marks)]
        return statistics.median(gaps) if gaps else 0.0


def slowest_of(told: Mapping[int, Rates | None], counted: bool) -> Slowest | None:
    """The rank that the others wait for, if it stands out; see :class:`spark_hvd.runner.watch.view.RunView`.

    If steps are not ``counted``, ranks are compared by their shares of the time.
    """
    each = {
        rank: done
        for rank, done in told.items()
        if done is not None and done.seconds >= _JUDGED and (done.steps >= _STEPS or not counted)
    }
    if len(each) < 2 or len(each) < len(told):
        return None
    whole = {rank: done.seconds / done.steps if counted else 1.0 for rank, done in each.items()}
    own = {rank: (1 - done.communication) * whole[rank] for rank, done in each.items()}
    rank = max(own, key=lambda one: own[one])
    median = statistics.median_low(own.values())  # of two ranks, the faster one
    if median <= 0 or own[rank] < _SKEW * median or own[rank] - median < _GAIN * whole[rank]:
        return None
    return Slowest(rank, own[rank] / median)


def _drop(records: deque[Vitals], before: float) -> None:
    """Drop old records, but keep one that is old enough to span the window."""
    while len(records) > 1 and records[1].clock <= before:
        records.popleft()


_LEAST = 3.0
"""Seconds of work before anything is said."""
_WINDOW = 60.0
"""Seconds over which the speed is taken, at least; and at least a whole epoch, with all that comes between two."""


class Pace:
    """Estimates the remaining time from the records of one rank, because ranks that train together are equally far.

    Only loops with the first one's name count as work. Others, such as a validation after each epoch, only take time.
    """

    def __init__(self) -> None:
        self._stage = ""
        self._marks: deque[tuple[float, int]] = deque()
        self._total = 0
        self._whole = False
        self._loop: tuple[int | None, int | None] = (None, None)

    def forget(self) -> None:
        """Forget the speed, because the ranks have changed."""
        self._marks.clear()

    def take(self, record: Vitals, now: float) -> None:
        """Take a record of the rank."""
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
        """The remaining time; None if it is unknown."""
        if not self._marks:
            return None
        (since, before), (until, done) = self._marks[0], self._marks[-1]
        if until - since < _LEAST or done == before or done > self._total:
            return None
        left = (self._total - done) * (until - since) / (done - before) - (now - until)
        return Remaining(max(0.0, left), self._whole)


def _position(record: Vitals) -> tuple[int, int, bool]:
    """Steps done, the total (0: unknown), and whether the total covers the whole run."""
    if not record.steps:
        return 0, 0, False
    if record.epoch is not None and record.epochs:
        return record.epoch * record.steps + record.step, record.epochs * record.steps, True
    return record.step, record.steps, record.epoch is None and record.total_steps == record.step
