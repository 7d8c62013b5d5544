"""How fast one process goes, and where its time goes: differences between its records."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from spark_hvd.runner.watch.picture import Slowest
from spark_hvd.world.vitals import Vitals

GROWING = ("clock", "total_steps", "samples", "watched_seconds", "data_seconds", "comm_seconds", "cpu_seconds")
"""Fields of Vitals that only grow while a process lives."""
WINDOW = 10.0
"""Seconds over which rates are taken, where a step is shorter than a few of them."""
_SKEW = 1.1
"""A rank that is slower than the median one by less is not worth a word."""
_GAIN = 0.05
"""Nor is one for which the others wait for less than this share of a step."""
_STEPS = 3
"""Where steps are so long that fewer of them fit into the window, it grows to that many."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a rank did in some time.

    Attributes:
        seconds: That time, on the rank's clock.
        samples_per_second: 0 where samples are not counted.
        steps_per_second: Steps of `hvd.progress`.
        data: The part of the time, 0 to 1, in which it waited for its data.
        communication: The part in which it waited for communication.
        compute: The rest of the time inside of `hvd.progress` loops; what is missing to 1 was spent outside of them.
        cpu: Cores that it kept busy.
    """

    seconds: float
    samples_per_second: float
    steps_per_second: float
    data: float
    communication: float
    compute: float
    cpu: float


def grown(before: Vitals, after: Vitals) -> dict[str, float] | None:
    """By how much each of `GROWING` has grown; None if the records are not of one process in one world."""
    if before.generation not in (after.generation, -1):  # -1: before its first world
        return None
    found = {name: float(getattr(after, name) - getattr(before, name)) for name in GROWING}
    return found if min(found.values()) >= 0 else None


def rates(differences: Mapping[str, float] | None) -> Rates | None:
    """What a rank did while its counters grew by `differences`; None where these tell nothing.

    Args:
        differences: Of `GROWING`, as :func:`grown` gives them.
    """
    if differences is None or differences["clock"] <= 0:
        return None
    seconds = differences["clock"]
    watched = min(differences["watched_seconds"], seconds)
    data = min(differences["data_seconds"], watched)
    communication = min(differences["comm_seconds"], seconds - data)
    return Rates(
        seconds=seconds,
        samples_per_second=differences["samples"] / seconds,
        steps_per_second=differences["total_steps"] / seconds,
        data=data / seconds,
        communication=communication / seconds,
        compute=max(0.0, watched - data - communication) / seconds,
        cpu=differences["cpu_seconds"] / seconds,
    )


@dataclass(frozen=True, slots=True)
class Span:
    """What one process did between two of its records."""

    first: Vitals
    last: Vitals

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.last.clock - self.first.clock

    @property
    def steps(self) -> int:
        """Steps done."""
        return self.last.total_steps - self.first.total_steps

    @property
    def samples(self) -> int:
        """Samples seen."""
        return self.last.samples - self.first.samples

    @property
    def data(self) -> float | None:
        """Share of the time waiting for data; None where nobody watches that: a loop over data takes some time."""
        if not self.last.data_seconds or self.seconds <= 0:
            return None
        return _share((self.last.data_seconds - self.first.data_seconds) / self.seconds)

    @property
    def communication(self) -> float | None:
        """Share of the time waiting for communication."""
        if self.seconds <= 0:
            return None
        return _share((self.last.comm_seconds - self.first.comm_seconds) / self.seconds)

    @property
    def computing(self) -> float | None:
        """Share of the time that is left: the work, and all that is neither a batch nor communication.

        None without `hvd.progress`, as waiting for data would count as work.
        """
        if self.communication is None or not self.last.stage:
            return None
        return _share(1 - self.communication - (self.data or 0.0))

    @property
    def busy(self) -> float | None:
        """Seconds a step that were not spent waiting for communication; without steps, the share of the time."""
        if self.communication is None:
            return None
        own = 1 - self.communication
        if self.steps > 0:
            return own * self.seconds / self.steps
        return None if self.last.total_steps else own

    @property
    def cpu(self) -> float | None:
        """Cores in use."""
        if self.seconds <= 0:
            return None
        return max(0.0, self.last.cpu_seconds - self.first.cpu_seconds) / self.seconds


class Recent:
    """The last records of one process in one world.

    A record comes once a second, and tells how many steps were done by then. Those with more steps than the one before
    are the marks between which rates are taken, so that they do not jump where a step takes several seconds.

    Args:
        record: The first one.
    """

    def __init__(self, record: Vitals) -> None:
        self._records = deque([record])
        self._marks: deque[Vitals] = deque([record] if record.total_steps else [])
        self._paced = False

    @property
    def last(self) -> Vitals:
        """The newest record."""
        return self._records[-1]

    def take(self, record: Vitals) -> None:
        """Note the next one."""
        if record.total_steps > (self._marks[-1].total_steps if self._marks else 0):
            self._marks.append(record)
            self._paced = len(self._marks) > 1
        self._records.append(record)
        _drop(self._records, record.clock - WINDOW)
        _drop(self._marks, record.clock - max(WINDOW, _STEPS * self._gap()))

    def span(self) -> Span:
        """The last seconds, from step to step if steps are told and go on; until now if they are overdue."""
        if not self._paced:
            return Span(self._records[0], self.last)
        late = self.last.clock - self._marks[-1].clock > 2 * self._gap() + 1
        return Span(self._marks[0], self.last if late else self._marks[-1])

    @property
    def paced(self) -> bool:
        """Whether rates of steps can be told."""
        return self._paced

    def cpu(self) -> float | None:
        """Cores in use in the last seconds."""
        return Span(self._records[0], self.last).cpu

    def _gap(self) -> float:
        """Seconds between two marks, as a rule."""
        gaps = [later.clock - earlier.clock for earlier, later in itertools.pairwise(self._marks)]
        return statistics.median(gaps) if gaps else 0.0


def slowest_of(spans: Mapping[int, Span]) -> Slowest | None:
    """The rank for which the others wait, if it is worth a word; see :class:`spark_hvd.runner.watch.view.RunView`.

    Args:
        spans: What each rank did, over about the same time.
    """
    own = {rank: busy for rank, span in spans.items() if (busy := span.busy) is not None}
    if len(own) < 2 or len(own) < len(spans):
        return None
    rank = max(own, key=lambda each: own[each])
    median = statistics.median_low(own.values())  # of two ranks, the faster one
    span = spans[rank]
    whole = span.seconds / span.steps if span.steps else 1.0
    if median <= 0 or own[rank] < _SKEW * median or own[rank] - median < _GAIN * whole:
        return None
    return Slowest(rank, own[rank] / median)


def _drop(records: deque[Vitals], before: float) -> None:
    """Leave out what is too old, but keep one that is old enough to span the window."""
    while len(records) > 1 and records[1].clock <= before:
        records.popleft()


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
