"""The position of a training in its data, and how ranks share the rest of an epoch. Pure functions of counts.

The rows of an epoch form a line. The seed and the epoch determine its order; the number of ranks does not. Rows that
were trained on are intervals of the line. The other rows are concatenated and cut into lanes. A global batch takes the
same number of rows from the front of each lane, so it has the same rows for any number of ranks. Each rank reads its
own lanes. If there are more ranks than lanes, the rows are cut into one lane per rank. So each row comes once in an
epoch, even if the number of ranks changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Interval = tuple[int, int]
"""(start, stop): rows of a line from ``start`` to ``stop`` (exclusive)."""

Ints = np.ndarray[Any, np.dtype[np.int64]]

RANKS_TOGETHER = 4
"""Up to this number, ranks take the same global batches even if there are fewer lanes than ranks."""


@dataclass(frozen=True)
class Position:
    """A position in the data.

    Attributes:
        epoch: Number of the epoch, from 0.
        done: The intervals of the line that were trained on, in ascending order, with gaps between them.
    """

    epoch: int = 0
    done: tuple[Interval, ...] = ()

    def to_json(self) -> list[Any]:
        """Return JSON-ready lists of numbers."""
        return [self.epoch, [list(each) for each in self.done]]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Position:
        """Undo :meth:`to_json`."""
        epoch, done = data
        return cls(epoch, tuple((start, stop) for start, stop in done))


@dataclass(frozen=True)
class Sharding:
    """Shares the rows of an epoch among ranks.

    Attributes:
        rows: Number of rows.
        batch_size: Rows in a batch of one rank.
        drop_last: Whether to omit the last batch if it is not full.
        lanes: Number of lanes into which the rest of the line is cut; 0 for one lane per rank.
    """

    rows: int
    batch_size: int
    drop_last: bool = False
    lanes: int = 0

    def batches(self, position: Position, rank: int, size: int) -> list[int]:
        """Return the number of rows in each batch of ``rank`` of ``size`` after ``position``.

        All ranks have the same number of batches. It is 0 if fewer rows than ranks are left, which are then skipped.
        """
        left = self.rows - length(position.done)
        return batch_rows(left, rank, size, self.batch_size, self.drop_last) if left >= size else []

    def totals(self, position: Position, size: int) -> list[int]:
        """Return the number of rows in each global batch."""
        steps = zip(*(self.batches(position, rank, size) for rank in range(size)), strict=True)
        return [sum(step) for step in steps]

    def share(self, position: Position, rank: int, size: int) -> Share:
        """Return the rows of ``rank`` of ``size`` after ``position``; :class:`Turns` if ranks take them from lanes."""
        if self._together(size):
            return self._turns(position, rank, size)
        left = self.rows - length(position.done)
        start = rank * (left // size) + min(rank, left % size)
        return part_of(gaps_of(self.rows, position.done), start, rows_of(left, rank, size))

    def after(self, position: Position, batches: int, size: int) -> Position:
        """Return the position after each of ``size`` ranks has taken ``batches`` batches.

        After the last batch of an epoch, it is the start of the next epoch.
        """
        if batches >= len(self.batches(position, 0, size)):
            return Position(position.epoch + 1)
        taken = list(position.done)
        if self._together(size):
            return Position(position.epoch, _joined([*taken, *self._turns(position, 0, size).consumed(batches)]))
        for rank in range(size):
            rows = sum(self.batches(position, rank, size)[:batches])
            taken += self.taken(position, rank, size, rows)
        return Position(position.epoch, _joined(taken))

    def taken(self, position: Position, rank: int, size: int, rows: int) -> list[Interval]:
        """Return the first ``rows`` rows that ``rank`` of ``size`` takes after ``position``."""
        share = self.share(position, rank, size)
        assert not isinstance(share, Turns)
        return part_of(share, 0, rows)

    def _together(self, size: int) -> bool:
        """Return whether ``size`` ranks share lanes or have several lanes each, rather than one lane per rank."""
        return self.lanes > 0 and size <= max(self.lanes, RANKS_TOGETHER) and self.lanes * size > 1

    def _turns(self, position: Position, rank: int, size: int) -> Turns:
        rest, left = gaps_of(self.rows, position.done), self.rows - length(position.done)
        full = self.batch_size * size
        steps = steps_of(left, size, self.batch_size, self.drop_last) if left >= size else 0
        last = min(left, full) if self.drop_last else left - (steps - 1) * full
        return Turns(tuple(rest), left, self.lanes, steps, full, last, rank, size)


@dataclass(frozen=True)
class Turns:
    """The rows of a line that a rank takes from lanes, in their order.

    Rows are numbered from the end: number 0 is the last row that is taken. Row ``s`` belongs to lane ``s % lanes``, so
    the length of a lane only depends on the number of rows that are left, and a global batch is a range of these
    numbers. If the number of ranks divides the number of lanes, rank ``r`` takes the rows with ``s % size == r``, all
    from its own lanes. Otherwise, the ranks that share lanes divide the rows of each batch, lane by lane.

    Attributes:
        rest: The intervals of the line that are left. Lanes follow each other in the order of :func:`lane_order`.
        left: Number of rows that are left.
        lanes: Number of lanes.
        steps: Number of batches to take.
        full: Number of rows in each global batch but the last.
        last: Number of rows in the last global batch.
        rank: The rank that takes the rows.
        size: Number of ranks.
    """

    rest: tuple[Interval, ...]
    left: int
    lanes: int
    steps: int
    full: int
    last: int
    rank: int
    size: int

    def __iter__(self) -> Iterator[Interval]:
        """Yield the rows in the order in which they are taken."""
        starts, stops = self.between(0, self.left)
        return zip(starts.tolist(), stops.tolist(), strict=True)

    def between(self, low: int, high: int) -> tuple[Ints, Ints]:
        """Return starts and stops, in the line, of what the rank takes of rows ``low`` to ``high`` (exclusive)."""
        first = max(0, min((self.left - high) // self.full, self.steps - 1))
        steps = np.arange(first, min(self.steps, -(-(self.left - low) // self.full)))[:, None]
        above = self.left - steps * self.full
        below = np.where(steps == self.steps - 1, above - self.last, above - self.full)
        together = math.gcd(self.size, self.lanes)
        group, number = self.rank % together, self.rank // together
        lanes = np.arange(group, self.lanes, together)
        remaining = self._in_lanes(above, lanes)
        taken = remaining - self._in_lanes(below, lanes)
        starts, stops = -remaining, taken - remaining
        if together < self.size:
            # The ranks that share these lanes take their quotas of a batch from them, one rank after the other.
            quotas = [(above - below + self.size - 1 - rank) // self.size for rank in range(group, self.size, together)]
            begin = sum(quotas[:number], np.zeros_like(above)) - (np.cumsum(taken, 1) - taken)
            starts = np.clip(begin, 0, taken) - remaining
            stops = np.clip(begin + quotas[number], 0, taken) - remaining
        ends = self._ends[lanes]
        starts = np.maximum(starts, -self._in_lanes(np.int64(high), lanes)) + ends
        stops = np.minimum(stops, -self._in_lanes(np.int64(low), lanes)) + ends
        some, (edges, shift) = starts < stops, self._edges
        number_of, starts, stops = cut_at(starts[some], stops[some], edges)
        return starts + shift[number_of], stops + shift[number_of]

    def consumed(self, batches: int) -> Iterator[Interval]:
        """Yield the intervals that all ranks together take in the first ``batches`` batches; not for all batches."""
        lanes = np.arange(self.lanes)
        ends, after = self._ends, self._in_lanes(np.int64(self.left - batches * self.full), lanes)
        starts = ends - self._in_lanes(np.int64(self.left), lanes)
        for start, stop in zip(starts.tolist(), (ends - after).tolist(), strict=True):
            yield from part_of(self.rest, start, stop - start)

    def _in_lanes(self, rows: Any, lanes: Ints) -> Ints:
        """Return how many of the last ``rows`` rows lie in each of ``lanes``."""
        counts: Ints = (rows + self.lanes - 1 - lanes) // self.lanes
        return counts

    @cached_property
    def _edges(self) -> tuple[Ints, Ints]:
        """The edges of the intervals in the concatenated rest, and what to add to its rows to find them in the line."""
        starts, stops = np.array(self.rest, np.int64).reshape(-1, 2).T
        edges = np.concatenate(([0], np.cumsum(stops - starts)))
        return edges, starts - edges[:-1]

    @cached_property
    def _ends(self) -> Ints:
        """The end of each lane in the concatenated rest."""
        order = lane_order(self.lanes)
        ends = np.empty(self.lanes, np.int64)
        ends[order] = np.cumsum(self._in_lanes(np.int64(self.left), order))
        return ends


Share = Sequence[Interval] | Turns
"""The rows of a line that a rank takes: intervals in ascending order, or turns."""


def lane_order(lanes: int) -> Ints:
    """Return the order of the lanes in an epoch, in which each of 2 or 4 ranks has neighbouring lanes."""
    return np.array(sorted(range(lanes), key=lambda lane: (lane % 2, lane % 4, lane)), np.int64)


def lanes_of(groups: Sequence[int]) -> int:
    """Return the number of lanes for a shuffled line of row groups with these numbers of rows.

    A row group at the border of two lanes is decoded for both, so lanes must be much fewer than row groups.
    """
    number = round(sum(groups) / max(groups))
    return 12 if number >= 192 else 4 if number >= 8 else 2 if number >= 2 else 1


def cut_at(starts: Ints, stops: Ints, edges: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut non-empty intervals at ``edges``. Return the number of the edge before each part, its start and stop."""
    first, last = (np.searchsorted(edges, at, "right") - 1 for at in (starts, stops - 1))
    parts = last - first + 1
    if (parts == 1).all():
        return first, starts, stops
    number = stretches(first, parts)
    starts, stops = np.repeat(starts, parts), np.repeat(stops, parts)
    return number, np.maximum(starts, edges[number]), np.minimum(stops, edges[number + 1])


def stretches(starts: Ints, lengths: Ints) -> Ints:
    """Return the concatenated numbers of ranges that have these starts and lengths."""
    ends = np.cumsum(lengths)
    numbers: Ints = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return numbers


def rows_of(rows: int, rank: int, size: int) -> int:
    """Return how many of ``rows`` rows ``rank`` of ``size`` gets. The first ``rows % size`` ranks get one more."""
    return rows // size + (rank < rows % size)


def steps_of(rows: int, size: int, batch_size: int, drop_last: bool = False) -> int:
    """Return the number of steps in a pass over ``rows`` rows. It is at least 1, and the same on all ranks.

    Raises:
        ValueError: There are fewer rows than ranks.
    """
    each = rows // size
    if not each:
        raise ValueError(f"{rows} rows for {size} ranks: expected at least one row for each")
    return max(1, each // batch_size) if drop_last else -(-each // batch_size)


def batch_rows(rows: int, rank: int, size: int, batch_size: int, drop_last: bool = False) -> list[int]:
    """Return the number of rows in each batch of a pass. The last batch may be smaller, unless ``drop_last``."""
    mine, steps = rows_of(rows, rank, size), steps_of(rows, size, batch_size, drop_last)
    if drop_last:
        return [min(batch_size, mine)] * steps
    return [batch_size] * (steps - 1) + [mine - (steps - 1) * batch_size]


def overlaps(lengths: Iterable[int], intervals: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of concatenated items, of these lengths, that lie in ``intervals``: (item, start, stop).

    ``start`` and ``stop`` count from the start of the item. Intervals are in ascending order.
    """
    items = enumerate(lengths)
    number, length = next(items, (0, 0))
    at = 0
    for start, stop in intervals:
        while start < stop:
            while at + length <= start:
                at += length
                number, length = next(items)
            last = min(stop, at + length)
            yield number, start - at, last - at
            start = last


def length(intervals: Iterable[Interval]) -> int:
    """Return the number of rows in intervals."""
    return sum(stop - start for start, stop in intervals)


def part_of(intervals: Iterable[Interval], start: int, rows: int) -> list[Interval]:
    """Return ``rows`` rows, beginning with row ``start``, of concatenated intervals."""
    parts, at, stop = [], 0, start + rows
    for low, high in intervals:
        first, last = low + max(start - at, 0), min(high, low + stop - at)
        if first < last:
            parts.append((first, last))
        at += high - low
    return parts


def gaps_of(rows: int, done: Iterable[Interval]) -> list[Interval]:
    """Return the intervals of ``rows`` rows that are not ``done``."""
    gaps, at = [], 0
    for start, stop in (*done, (rows, rows)):
        if at < start:
            gaps.append((at, start))
        at = stop
    return gaps


def _joined(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Sort intervals, and merge those that touch."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
