"""A snapshot of a run as plain values, from which all displays draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

LONG = 3.0
"""Seconds after which displays mention that a rank waits or is silent."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank. Unknown values are None.

    Attributes:
        rank: Number in the newest world.
        silent: Seconds since its last record, if that is long ago; otherwise None.
        started: Whether it has sent a record in this world.
        ended: Whether fn has ended on it.
        host: Its host.
        pid: The ID of its process.
        stage: Name of the loop, such as "train"; "" without `hvd.progress`.
        epoch: Number of the epoch, from 0.
        epochs: Total number of epochs.
        step: Steps done in this epoch; without `hvd.progress`, those of the optimizer.
        steps: Number of steps in this epoch.
        steps_per_second: Over the last seconds, as are all rates and shares.
        samples_per_second: Samples of this rank per second.
        data: Share of the time waiting for data, from 0 to 1.
        communication: Share of the time waiting for communication.
        compute: The rest of the time in `hvd.progress` loops.
        cpu: Cores in use.
        memory_bytes: Resident memory.
        gpu_memory_bytes: GPU memory reserved by torch.
        gpu_utilization: From 0 to 1.
        metrics: By name, the loss first.
        waits: What it has been waiting for, in words; "" if it is not waiting.
        skew: See :class:`Slowest`; None except on the slowest rank.
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
        """Whether to show it even if there is no room for all ranks."""
        return self.skew is not None or self.silent is not None

    @property
    def quiet(self) -> bool:
        """Whether it is silent, or has not started."""
        return self.silent is not None or not self.started


@dataclass(frozen=True, slots=True)
class Slowest:
    """The rank that the others wait for.

    Attributes:
        rank: Its number.
        skew: Its own time per step, without waiting for communication, divided by the median rank's.
    """

    rank: int
    skew: float


@dataclass(frozen=True, slots=True)
class Remaining:
    """The remaining time.

    Attributes:
        seconds: Seconds until the end.
        whole: Whether that is the end of the run. Otherwise, it is the end of this epoch or loop, because it is unknown
            how many follow.
    """

    seconds: float
    whole: bool


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run at one moment.

    Attributes:
        title: Name of the function and number of ranks.
        seconds: Seconds since the start.
        size: Number of ranks in the newest world.
        generation: Number of that world.
        restarts: How often all ranks were restarted.
        changes: How often ranks joined or left while others stayed.
        rows: A row for each rank, in order.
        samples: Samples seen so far by all ranks.
        steps_per_second: Rate of the median rank.
        samples_per_second: Rate of all ranks together.
        data: Mean share of the ranks' time waiting for data.
        communication: Mean share of their time waiting for communication.
        compute: Mean share of the rest of their time in `hvd.progress` loops.
        remaining: The remaining time, if known.
        slowest: The rank that the others wait for, if it stands out.
        verdict: Why the run does not progress, if that was found out.
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
        """Whether any rank has reported."""
        return any(row.started for row in self.rows)

    def at_end(self) -> RunSnapshot:
        """Return the snapshot to show at the end: without the remaining time, and without notes that all have ended."""
        rows = self.rows
        if all(row.ended for row in rows):
            rows = tuple(replace(row, ended=False) for row in rows)
        return replace(self, remaining=None, rows=rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the snapshot as plain data."""
        return asdict(self)


def shown_rows(rows: Sequence[RankRow], most: int) -> tuple[list[RankRow], int]:
    """Choose the ranks to show if there is no room for all: those that stand out, then the first ones.

    Returns:
        The rows to show, in order, and the number of the others.
    """
    if len(rows) <= most:
        return list(rows), 0
    chosen = sorted(sorted(rows, key=lambda row: not row.remarkable)[:most], key=lambda row: row.rank)
    return chosen, len(rows) - len(chosen)
