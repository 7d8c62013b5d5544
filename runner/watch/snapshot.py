"""What there is to see of a run at one moment, as plain values: all displays draw from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

LONG = 3.0
"""Seconds after which it is worth a word that a rank waits, or is not heard of."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank. What is not known is None.

    Attributes:
        rank: In the newest world.
        silent: Seconds since it was last heard of, if that is long ago; None where all is well.
        started: Whether it was heard of at all in this world.
        ended: Whether fn has ended on it.
        host: Where it runs.
        pid: The number of its process there.
        stage: Name of the loop: "train"; "" without `hvd.progress`.
        epoch: From 0.
        epochs: How many there are to be.
        step: Steps done in this epoch; without `hvd.progress`, those of the optimizer.
        steps: How many it has.
        steps_per_second: Over the last seconds, as are all rates and shares.
        samples_per_second: Of this rank.
        data: Share of the time waiting for data, from 0 to 1.
        communication: Share of the time waiting for communication.
        compute: The rest of the time in `hvd.progress` loops.
        cpu: Cores in use.
        memory_bytes: Resident.
        gpu_memory_bytes: Reserved by torch.
        gpu_utilization: From 0 to 1.
        metrics: By name, the loss first.
        waits: For what it has been waiting for some time, in words; "" if it is not.
        skew: See :class:`Slowest`, on the rank that is that; None on all others.
    """

    rank: int
    silent: float | None = None
    started: bool = False
    ended: bool = False
    host: str = ""
    pid: int = 0
    stage: str = ""
    epoch: int | None = None
    epochs: int | None = None
    step: int = 0
    steps: int | None = None
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    data: float | None = None
    communication: float | None = None
    compute: float | None = None
    cpu: float | None = None
    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    gpu_utilization: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    waits: str = ""
    skew: float | None = None

    @property
    def remarkable(self) -> bool:
        """Whether it has to be shown even where there is no room for all."""
        return self.skew is not None or self.silent is not None

    @property
    def quiet(self) -> bool:
        """Whether nothing is heard of it."""
        return self.silent is not None or not self.started


@dataclass(frozen=True, slots=True)
class Slowest:
    """The rank for which the others wait.

    Attributes:
        rank: Its number.
        skew: Its own time a step (all but waiting for communication), in units of the median rank's.
    """

    rank: int
    skew: float


@dataclass(frozen=True, slots=True)
class Remaining:
    """How long it will take.

    Attributes:
        seconds: Until the end.
        whole: Of everything; else of this epoch, or loop, since it is not known how many come after it.
    """

    seconds: float
    whole: bool


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The run.

    Attributes:
        title: What runs.
        seconds: Since the start.
        size: Ranks in the newest world.
        generation: Of that world.
        restarts: How often all ranks were started again.
        changes: How often ranks came or went while others stayed.
        rows: One a rank, in order.
        samples: Seen so far by all ranks.
        steps_per_second: Of the median rank.
        samples_per_second: Of all ranks together.
        data: Mean over the ranks, as are the next two.
        communication: Share of the time.
        compute: Share of the time.
        remaining: Until the end, if that can be told.
        slowest: The rank for which others wait, if it is worth a word.
        verdict: Why nothing moves, if that was found out.
    """

    title: str
    seconds: float
    size: int
    generation: int
    restarts: int
    changes: int
    rows: tuple[RankRow, ...]
    samples: int
    steps_per_second: float | None
    samples_per_second: float | None
    data: float | None
    communication: float | None
    compute: float | None
    remaining: Remaining | None
    slowest: Slowest | None
    verdict: str | None

    @property
    def heard(self) -> bool:
        """Whether there is anything to say of the ranks."""
        return any(row.started for row in self.rows)

    def at_end(self) -> RunSnapshot:
        """What to leave standing: nothing remains to be done, and that all ranks have ended need not be said."""
        rows = self.rows
        if all(row.ended for row in rows):
            rows = tuple(replace(row, ended=False) for row in rows)
        return replace(self, remaining=None, rows=rows)

    def as_dict(self) -> dict[str, Any]:
        """The snapshot as plain data."""
        return asdict(self)


def shown_rows(rows: Sequence[RankRow], most: int) -> tuple[list[RankRow], int]:
    """Which ranks to show where there is no room for all: those that stand out, and the first ones.

    Returns:
        Those to show, in order, and the number of the others.
    """
    if len(rows) <= most:
        return list(rows), 0
    chosen = sorted(sorted(rows, key=lambda row: not row.remarkable)[:most], key=lambda row: row.rank)
    return chosen, len(rows) - len(chosen)
