"""How fast one process goes, and where its time goes: differences between its records."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from spark_hvd.runner.watch.snapshot import Slowest
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
    """What a rank did in some time. Its three shares, from 0 to 1, are those of every display, plot and tracker.

    Attributes:
        seconds: How long that was, on the rank's clock.
        steps: Steps of `hvd.progress`, or of the optimizer.
        samples: 0 where samples are not counted.
        data: The part of the time in which it waited for its data.
        communication: The part in which it waited for communication.
        compute: The rest of the time inside of `hvd.progress` loops; what is missing to 1 was spent outside of them.
        cpu: Cores that it kept busy.
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
        """0 where samples are not counted."""
        return self.samples / self.seconds

    @property
    def steps_per_second(self) -> float:
        """0 where steps are not counted."""
        return self.steps / self.seconds


def goes_on(before: Vitals, after: Vitals) -> bool:
    """Whether both records are of one process in one world; -1 is what it tells before its first world."""
    return before.process == after.process and before.generation in (after.generation, -1)


def grown(before: Vitals, after: Vitals) -> dict[str, float]:
    """By how much each of `GROWING` has grown between two records of one process."""
    return {name: float(getattr(after, name) - getattr(before, name)) for name in GROWING}


def rates(differences: Mapping[str, float]) -> Rates | None:
    """What a rank did while its counters grew by `differences`; None where no time has passed.

    Args:
        differences: Of `GROWING`, as :func:`grown` gives them.
    """
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
    """Data, communication and compute by name; None for what is not known.

    Without a loop that is watched for its data, waiting for them would count as work.

    Args:
        done: What the rank did.
        last: Its record at the end of that time.
    """
    return {
        "data": done.data if done is not None and last.data_seconds else None,
        "communication": None if done is None else done.communication,
        "compute": done.compute if done is not None and last.stage else None,
    }


class Recent:
    """The last records of one process in one world.

    A record tells how many steps were done by then. Those with more steps than the one before are the marks
    between which rates are taken, so that they do not jump where a step takes several seconds.

    Args:
        record: The first one.
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
        """The last seconds, from step to step if steps are told and go on; until now if they are overdue."""
        if not self.paced:
            return rates(grown(self._records[0], self.last))
        late = self.last.clock - self._marks[-1].clock > 2 * self._gap() + 1
        return rates(grown(self._marks[0], self.last if late else self._marks[-1]))

    def cpu(self) -> float | None:
        """Cores in use in the last seconds."""
        done = rates(grown(self._records[0], self.last))
        return None if done is None else done.cpu

    def _gap(self) -> float:
        """Seconds between two marks, as a rule."""
        gaps = [later.clock - earlier.clock for earlier, later in itertools.pairwise(self._marks)]
        return statistics.median(gaps) if gaps else 0.0


def slowest_of(told: Mapping[int, Rates | None], counted: bool) -> Slowest | None:
    """The rank for which the others wait, if it is worth a word; see :class:`spark_hvd.runner.watch.view.RunView`.

    Args:
        told: What each rank did, over about the same time.
        counted: Whether steps are told of at all; else ranks are compared by their shares of the time.
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
    """Leave out what is too old, but keep one that is old enough to span the window."""
    while len(records) > 1 and records[1].clock <= before:
        records.popleft()
