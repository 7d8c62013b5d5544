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
"""The shares of the ranks' time."""
SEEN = 0.005
"""Displays leave out communication if no rank waits for it for at least this share of its time. It would read 0 %, and
it covers only our own collectives, not those that torch makes for DDP and Lightning."""
WINDOW = 10.0
"""Seconds over which rates are measured, unless steps are long."""
_MIN_STEPS = 3
"""Minimum number of steps in the window, which grows if steps are long; fewer steps say nothing."""
_SLOWEST_RATIO = 1.1
"""A rank is called the slowest only if its steps take at least this many times as long as the median rank's."""
_SLOWEST_SHARE = 0.05
"""A rank is called the slowest only if the others wait for it for at least this share of a step."""
_SLOWEST_SECONDS = 4.0
"""Minimum seconds of each rank's work before one is called the slowest."""
_PACE_SECONDS = 3.0
"""Minimum seconds of work before the remaining time is estimated."""
_PACE_WINDOW = 60.0
"""Minimum seconds over which the pace is measured. It is also at least an epoch, including the time between epochs."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The work of a rank in some period. All displays, plots and trackers use these three shares, from 0 to 1.

    Attributes:
        seconds: Length of the period, on the rank's clock.
        steps: Steps of `hvd.progress`, or of the optimizer.
        samples: Number of samples; 0 if they are not counted.
        data: Share of the time waiting for data.
        communication: Share of the time waiting for communication.
        compute: The remaining share inside of `hvd.progress` loops. The rest, up to 1, was spent outside of them.
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
        """Samples per second; 0 if samples are not counted."""
        return self.samples / self.seconds

    @property
    def steps_per_second(self) -> float:
        """Steps per second; 0 if steps are not counted."""
        return self.steps / self.seconds


def goes_on(before: Vitals, after: Vitals) -> bool:
    """Tell whether both records are from one process in one world; before its first world, the generation is -1."""
    return before.process == after.process and before.generation in (after.generation, -1)


def grown(before: Vitals, after: Vitals) -> dict[str, float]:
    """Return the growth of each field of `GROWING` between two records of one process."""
    return {name: float(getattr(after, name) - getattr(before, name)) for name in GROWING}


def rates(differences: Mapping[str, float]) -> Rates | None:
    """Return the rates for counters that grew by `differences`; None if no time has passed."""
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
    """Return the shares data, communication and compute by name, with None for unknown ones.

    ``compute`` is unknown without a `hvd.progress` loop, because it would include the time spent waiting for data.
    """
    return {
        "data": done.data if done is not None and last.data_seconds else None,
        "communication": None if done is None else done.communication,
        "compute": done.compute if done is not None and last.stage else None,
    }


class Recent:
    """The last records of one process in one world.

    Rates are measured between records that have more steps than the one before, so they do not jump if a step takes
    several seconds.
    """

    def __init__(self, record: Vitals) -> None:
        self._records = deque([record])
        self._marks: deque[Vitals] = deque([record] if record.total_steps else [])
        """The records that have more steps than the one before."""
        self.paced = False
        """Whether the rate of steps is known."""

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
        _drop(self._marks, record.clock - max(WINDOW, _MIN_STEPS * self._gap()))

    def done(self) -> Rates | None:
        """Return the rates of the last seconds, measured from step to step if there are steps.

        If the next step is late, they are measured until now, so that they fall.
        """
        if not self.paced:
            return rates(grown(self._records[0], self.last))
        late = self.last.clock - self._marks[-1].clock > 2 * self._gap() + 1
        return rates(grown(self._marks[0], self.last if late else self._marks[-1]))

    def cpu(self) -> float | None:
        """Return the number of cores in use in the last seconds."""
        done = rates(grown(self._records[0], self.last))
        return None if done is None else done.cpu

    def _gap(self) -> float:
        """Return the usual number of seconds between two steps."""
        gaps = [later.clock - earlier.clock for earlier, later in itertools.pairwise(self._marks)]
        return statistics.median(gaps) if gaps else 0.0


def slowest_of(by_rank: Mapping[int, Rates | None], counted: bool) -> Slowest | None:
    """Find the rank that the others wait for, if it stands out; see :class:`spark_hvd.runner.watch.view.RunView`.

    If steps are not ``counted``, ranks are compared by their shares of the time.
    """
    each = {
        rank: done
        for rank, done in by_rank.items()
        if done is not None and done.seconds >= _SLOWEST_SECONDS and (done.steps >= _MIN_STEPS or not counted)
    }
    if len(each) < 2 or len(each) < len(by_rank):
        return None
    step = {rank: done.seconds / done.steps if counted else 1.0 for rank, done in each.items()}
    own = {rank: (1 - done.communication) * step[rank] for rank, done in each.items()}  # without waiting for others
    rank = max(own, key=own.__getitem__)
    median = statistics.median_low(own.values())  # of two ranks, the faster one
    if median <= 0 or own[rank] < _SLOWEST_RATIO * median or own[rank] - median < _SLOWEST_SHARE * step[rank]:
        return None
    return Slowest(rank, own[rank] / median)


def _drop(records: deque[Vitals], before: float) -> None:
    """Drop old records, but keep one that is old enough to span the window."""
    while len(records) > 1 and records[1].clock <= before:
        records.popleft()


class Pace:
    """Estimates the remaining time from the records of one rank; ranks that train together progress equally.

    Only loops with the first one's name count as work. Others, such as a validation after each epoch, only take time.
    """

    def __init__(self) -> None:
        self._stage = ""
        self._marks: deque[tuple[float, int]] = deque()
        """Times, with the number of steps done by then."""
        self._total = 0
        self._whole_run = False
        """Whether the total covers the whole run, rather than one loop."""

    def forget(self) -> None:
        """Forget the speed after the ranks have changed."""
        self._marks.clear()

    def take(self, record: Vitals, now: float) -> None:
        """Take a record of the rank."""
        if not record.stage or (self._stage and record.stage != self._stage):
            return
        self._stage = record.stage
        done, total, whole_run = _position(record)
        if self._marks and (total != self._total or whole_run != self._whole_run or done < self._marks[-1][1]):
            self._marks.clear()  # another loop, or back to an earlier state
        self._total, self._whole_run = total, whole_run
        if total == 0 or record.total_steps == 0:  # the first step includes preparations and says little
            return
        # Keep about a hundred marks: the latest replaces the one before if the two are close.
        if len(self._marks) > 1 and now - self._marks[-2][0] < (now - self._marks[0][0]) / 100:
            self._marks.pop()
        self._marks.append((now, done))
        epoch = (record.steps or 0) if whole_run else 0
        while len(self._marks) > 2 and self._marks[1][0] <= now - _PACE_WINDOW and self._marks[1][1] <= done - epoch:
            self._marks.popleft()

    def remaining(self, now: float) -> Remaining | None:
        """Estimate the remaining time; None if it is unknown."""
        if not self._marks:
            return None
        (since, before), (until, done) = self._marks[0], self._marks[-1]
        if until - since < _PACE_SECONDS or done == before or done > self._total:
            return None
        left = (self._total - done) * (until - since) / (done - before) - (now - until)
        return Remaining(max(0.0, left), self._whole_run)


def _position(record: Vitals) -> tuple[int, int, bool]:
    """Return the steps done, the total (0: unknown), and whether the total covers the whole run."""
    if not record.steps:
        return 0, 0, False
    if record.epoch is not None and record.epochs:
        return record.epoch * record.steps + record.step, record.epochs * record.steps, True
    return record.step, record.steps, record.epoch is None and record.total_steps == record.step
