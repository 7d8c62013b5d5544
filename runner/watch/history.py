"""``RunHistory``: the records of a run's ranks, in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_hvd.runner.watch.rates import GROWING, Rates, goes_on, rates
from spark_hvd.world.vitals import Vitals

if TYPE_CHECKING:
    import pandas as pd

MOST_POINTS = 2000
_LEAST_POINTS = 100
_MOST_IN_ALL = 400_000
_MOST_METRICS = 64
_SPAN = 0.9
"""Minimum seconds over which a speed is measured."""
_STATES = ("generation", "epoch", "step", "memory_bytes", "gpu_memory_bytes", "gpu_utilization")
_COLUMNS = ("seconds", "piece", "stage", "done", *GROWING, *_STATES)


@dataclass(frozen=True, slots=True)
class Point:
    """One rank at one moment.

    Attributes:
        seconds: Since the first record of the run.
        generation: Number of the rank's world; -1 before the first.
        stage: Name of the loop, such as "train"; "" without `hvd.progress`.
        epoch: From 0; None if unknown.
        step: Step of the epoch.
        total_steps: Steps since the run began, including repeated ones.
        rates: Rates since the previous point; None for the first point of a process or a generation.
        memory_bytes: Resident memory.
        gpu_memory_bytes: None without a GPU.
        gpu_utilization: From 0 to 1; None if unknown.
        metrics: The last values given to `hvd.progress`.
    """

    seconds: float
    generation: int
    stage: str
    epoch: int | None
    step: int
    total_steps: int
    rates: Rates | None
    memory_bytes: int
    gpu_memory_bytes: int | None
    gpu_utilization: float | None
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Generation:
    """A world of the run: the first, or one after ranks were lost, joined or were restarted.

    Attributes:
        number: Its number, as returned by `hvd.generation()`.
        size: Number of ranks.
        seconds: Time of its first record, since the first record of the run.
    """

    number: int
    size: int
    seconds: float


class RunHistory:
    """The records of a run. If a rank has too many points, every other one is dropped.

    Counters are stored as they are and rates are computed on request, so dropping points loses moments but no sums.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._tracks: dict[int, _Track] = {}
        self._stages: dict[str, int] = {}
        self._generations: list[Generation] = []

    def take(self, vitals: Vitals, now: float) -> None:
        """Store a record; ``now`` is ``time.monotonic()`` of this process, not of the rank."""
        self._began = now if self._began is None else self._began
        seconds = now - self._began
        if vitals.generation >= 0:
            if not self._generations or self._generations[-1].number < vitals.generation:
                self._generations.append(Generation(vitals.generation, vitals.size, seconds))
            elif self._generations[-1].number > vitals.generation:  # the record arrived after the end of its world
                return
        if vitals.rank not in self._tracks:
            self._tracks[vitals.rank] = _Track()
        track = self._tracks[vitals.rank]
        if len(self._generations) > 1 and track.is_new(vitals):
            # A process that joins later has no steps of its own; it continues where the others are.
            track.done = max(each.done for each in self._tracks.values())
        stage = self._stages.setdefault(vitals.stage, len(self._stages))
        most = max(_LEAST_POINTS, min(MOST_POINTS, _MOST_IN_ALL // max(vitals.size, 1)))
        track.take(vitals, seconds, stage, most)

    def __bool__(self) -> bool:
        return bool(self._tracks)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have records."""
        return sorted(self._tracks)

    @property
    def generations(self) -> list[Generation]:
        """The worlds of the run, in order."""
        return list(self._generations)

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that any rank gave to `hvd.progress`."""
        return sorted({name for track in self._tracks.values() for name in track.metrics})

    @property
    def seconds(self) -> float:
        """The time from the first record to the last, in seconds."""
        return max((track.columns["seconds"][-1] for track in self._tracks.values()), default=0.0)

    def points(self, rank: int) -> list[Point]:
        """Return the points of a rank, in order.

        Raises:
            KeyError: The rank has none.
        """
        if rank not in self._tracks:
            raise KeyError(f"rank {rank}: the history has ranks {self.ranks}")
        return list(self._tracks[rank].points(list(self._stages)))

    def curves(self, rank: int, most: int) -> Iterator[tuple[str, str, list[float], list[float]]]:
        """Yield curves of one rank, from about ``most`` of its points: each metric, and the speed last.

        Yields:
            Name of the metric, or "samples/s" or "steps/s" for the speed; the name of the loop; steps; values.
        """
        track, stages = self._tracks[rank], list(self._stages)
        columns = track.columns
        last = len(columns["seconds"]) - 1
        places = [*range(0, last, max(1, -(-last // most))), last]
        steps = columns["done"]
        for name, values in track.metrics.items():
            lines: dict[int, tuple[list[float], list[float]]] = {}
            for i in places:
                if math.isfinite(values[i]):
                    x, y = lines.setdefault(int(columns["stage"][i]), ([], []))
                    x.append(steps[i])
                    y.append(values[i])
            yield from ((name, stages[stage], x, y) for stage, (x, y) in lines.items())
        counted = "samples" if columns["samples"][-1] else "total_steps"
        x, y, since = [], [], places[0]
        for i in places[1:]:
            seconds = columns["clock"][i] - columns["clock"][since]
            if columns["piece"][i] != columns["piece"][since]:
                since = i
            elif seconds >= _SPAN:  # over a shorter time, a speed is noise
                x.append(steps[i])
                y.append((columns[counted][i] - columns[counted][since]) / seconds)
                since = i
        if any(y):
            yield "samples/s" if counted == "samples" else "steps/s", "", x, y

    def to_pandas(self) -> pd.DataFrame:
        """Make a DataFrame with a row for each point, indexed by rank and seconds, and a column for each metric."""
        import pandas as pd

        rows = [_row(rank, point) for rank in self.ranks for point in self.points(rank)]
        frame: pd.DataFrame = pd.DataFrame(rows)
        return frame.set_index(["rank", "seconds"]) if rows else frame


class _Track:
    """The points of one rank: a column of numbers for each quantity, with NaN for unknown ones."""

    def __init__(self) -> None:
        self.columns = {name: array("d") for name in _COLUMNS}
        self.metrics: dict[str, array[float]] = {}
        self.done = 0
        self._apart = 0.0
        self._piece = 0
        self._last: Vitals | None = None

    def is_new(self, vitals: Vitals) -> bool:
        """Tell whether the record is the first of its process."""
        return self._last is None or vitals.process != self._last.process

    def take(self, vitals: Vitals, seconds: float, stage: int, most: int) -> None:
        before = 0 if self.is_new(vitals) or self._last is None else self._last.total_steps
        self.done += vitals.total_steps - before
        self._piece += self._last is not None and not goes_on(self._last, vitals)
        self._last = vitals
        times, pieces = self.columns["seconds"], self.columns["piece"]
        # A point close to the last but one replaces the last one, so that the newest is always kept.
        if len(times) > 1 and seconds - times[-2] < self._apart and pieces[-2] == self._piece:
            for column in self._all():
                column.pop()
        self._append(vitals, seconds, stage)
        if len(times) > most:
            for column in self._all():
                column[:] = column[::2] if len(column) % 2 else column[::2] + column[-1:]
            self._apart = 2 * (times[-1] - times[0]) / most

    def _append(self, vitals: Vitals, seconds: float, stage: int) -> None:
        before = len(self.columns["seconds"])
        known = {"seconds": seconds, "piece": self._piece, "stage": stage, "done": self.done}
        for name, column in self.columns.items():
            value = known[name] if name in known else getattr(vitals, name)
            column.append(math.nan if value is None else value)
        for name in vitals.metrics:
            if name not in self.metrics and len(self.metrics) < _MOST_METRICS:
                self.metrics[name] = array("d", [math.nan] * before)
        for name, column in self.metrics.items():
            column.append(vitals.metrics.get(name, math.nan))

    def _all(self) -> list[array[float]]:
        return [*self.columns.values(), *self.metrics.values()]

    def points(self, stages: list[str]) -> Iterator[Point]:
        columns = self.columns
        for i in range(len(columns["seconds"])):
            done = None
            if i and columns["piece"][i] == columns["piece"][i - 1]:
                done = rates({name: columns[name][i] - columns[name][i - 1] for name in GROWING})
            yield Point(
                seconds=columns["seconds"][i],
                generation=int(columns["generation"][i]),
                stage=stages[int(columns["stage"][i])],
                epoch=_whole(columns["epoch"][i]),
                step=int(columns["step"][i]),
                total_steps=int(columns["done"][i]),
                rates=done,
                memory_bytes=int(columns["memory_bytes"][i]),
                gpu_memory_bytes=_whole(columns["gpu_memory_bytes"][i]),
                gpu_utilization=_known(columns["gpu_utilization"][i]),
                metrics={name: column[i] for name, column in self.metrics.items()},
            )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else int(value)


def _row(rank: int, point: Point) -> dict[str, Any]:
    plain = ("seconds", "generation", "stage", "epoch", "step", "total_steps")
    speeds = ("samples_per_second", "steps_per_second", "data", "communication", "compute", "cpu")
    states = ("memory_bytes", "gpu_memory_bytes", "gpu_utilization")
    row: dict[str, Any] = {"rank": rank, **{name: getattr(point, name) for name in plain}}
    row |= {name: None if point.rates is None else getattr(point.rates, name) for name in speeds}
    return row | {name: getattr(point, name) for name in states} | dict(point.metrics)
