"""Where a training stands in its data, and how the rest of an epoch is shared among ranks. Pure functions of counts.

The rows of an epoch stand in a line, whose order seed and epoch decide and the number of ranks does not. What was
trained on is some intervals of it. The rest is laid end to end and cut into lanes. A global batch takes as many rows
from the front of each lane, so the same rows whatever the number of ranks, and a rank reads the lanes that are its own.
If there are too many ranks for the lanes, each rank has a lane of its own. So each row comes once in an epoch, even if
the number of ranks changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Interval = tuple[int, int]
"""Rows of a line from the first number to before the second."""

Ints = np.ndarray[Any, np.dtype[np.int64]]

RANKS_TOGETHER = 4
"""Up to this many ranks take the same global batches, even if there are fewer lanes."""


@dataclass(frozen=True)
class Position:
    """A place in the data.

    Attributes:
        epoch: Number of the epoch, from 0.
        done: The intervals of the line that were taken, in ascending order, with gaps between them.
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
    """How the rows of an epoch are shared.

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
        """Return the rows in each batch of ``rank`` of ``size`` from ``position`` on; equally many on all ranks.

        None where fewer rows than ranks are left: these are left out.
        """
        left = self.rows - length(position.done)
        return batch_rows(left, rank, size, self.batch_size, self.drop_last) if left >= size else []

    def totals(self, position: Position, size: int) -> list[int]:
        """Return rows in each batch of all ranks together."""
        steps = zip(*(self.batches(position, rank, size) for rank in range(size)), strict=True)
        return [sum(step) for step in steps]

    def share(self, position: Position, rank: int, size: int) -> Share:
        """Return the rows of ``rank`` of ``size`` from ``position`` on; :class:`Turns` if it takes them from lanes."""
        if self._together(size):
            return self._turns(position, rank, size)
        left = self.rows - length(position.done)
        start = rank * (left // size) + min(rank, left % size)
        return part_of(gaps_of(self.rows, position.done), start, rows_of(left, rank, size))

    def after(self, position: Position, batches: int, size: int) -> Position:
        """Return the position after each of ``size`` ranks has taken this many batches.

        After the last, the next epoch's.
        """
        if batches >= len(self.batches(position, 0, size)):
            return Position(position.epoch + 1)
        taken = list(position.done)
        if self._together(size):
            return Position(position.epoch, _joined([*taken, *self._turns(position, 0, size).gone(batches)]))
        for rank in range(size):
            rows = sum(self.batches(position, rank, size)[:batches])
            taken += self.taken(position, rank, size, rows)
        return Position(position.epoch, _joined(taken))

    def taken(self, position: Position, rank: int, size: int, rows: int) -> list[Interval]:
        """Return the first rows, this many, that ``rank`` of ``size`` takes from ``position`` on."""
        share = self.share(position, rank, size)
        assert not isinstance(share, Turns)
        return part_of(share, 0, rows)

    def _together(self, size: int) -> bool:
        """Return whether this many ranks take rows from lanes, each from several lanes or from a part of one."""
        return self.lanes > 0 and size <= max(self.lanes, RANKS_TOGETHER) and self.lanes * size > 1

    def _turns(self, position: Position, rank: int, size: int) -> Turns:
        rest, left = gaps_of(self.rows, position.done), self.rows - length(position.done)
        full = self.batch_size * size
        steps = steps_of(left, size, self.batch_size, self.drop_last) if left >= size else 0
        last = min(left, full) if self.drop_last else left - (steps - 1) * full
        return Turns(tuple(rest), left, self.lanes, steps, full, last, rank, size)


@dataclass(frozen=True)
class Turns:
    """Which rows of a line a rank takes, and in which order, where ranks take them from lanes.

    Rows are counted from the end: number 0 is the last that is taken. Row ``s`` lies in lane ``s % lanes``, so the
    length of a lane depends on nothing but how many rows are left, and a global batch is a run of these numbers. Where
    the number of ranks divides that of lanes, rank ``r`` takes the rows with ``s % size == r``, all of them from lanes
    of its own. Otherwise ranks that share lanes cut each batch, lane by lane.

    Attributes:
        rest: What is left of the line, in lanes that lie end to end in the order of :func:`lane_order`.
        left: How many rows these are.
        lanes: How many lanes there are.
        steps: Batches to be taken.
        full: Rows of each batch of all ranks together but the last.
        last: Rows of the last one.
        rank: Whose rows they are.
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
        """Starts and stops of the intervals of the line that the rank takes of rows ``low`` to before ``high``."""
        first = max(0, min((self.left - high) // self.full, self.steps - 1))
        steps = np.arange(first, min(self.steps, -(-(self.left - low) // self.full)))[:, None]
        above = self.left - steps * self.full
        below = np.where(steps == self.steps - 1, above - self.last, above - self.full)
        together = math.gcd(self.size, self.lanes)
        group, number = self.rank % together, self.rank // together
        lanes = np.arange(group, self.lanes, together)
        there = self._in_lanes(above, lanes)
        taken = there - self._in_lanes(below, lanes)
        # Of what the batch takes from these lanes, the ranks that share them have so many each, one after the other.
        quotas = [(above - below + self.size - 1 - rank) // self.size for rank in range(group, self.size, together)]
        begin = sum(quotas[:number], np.zeros_like(above)) - (np.cumsum(taken, 1) - taken)
        starts = np.clip(begin, 0, taken) - there
        stops = np.clip(begin + quotas[number], 0, taken) - there
        ends = self._ends()[lanes]
        starts = np.maximum(starts, -self._in_lanes(np.int64(high), lanes)) + ends
        stops = np.minimum(stops, -self._in_lanes(np.int64(low), lanes)) + ends
        some = starts < stops
        lengths = np.array([stop - start for start, stop in self.rest])
        number_of, starts, stops = cut_at(starts[some], stops[some], np.concatenate(([0], np.cumsum(lengths))))
        shift = np.array([start for start, _ in self.rest]) - (np.cumsum(lengths) - lengths)
        return starts + shift[number_of], stops + shift[number_of]

    def gone(self, batches: int) -> Iterator[Interval]:
        """Yield what all ranks together take in this many batches, which are not all."""
        lanes = np.arange(self.lanes)
        ends, after = self._ends(), self._in_lanes(np.int64(self.left - batches * self.full), lanes)
        starts = ends - self._in_lanes(np.int64(self.left), lanes)
        for start, stop in zip(starts.tolist(), (ends - after).tolist(), strict=True):
            yield from part_of(self.rest, start, stop - start)

    def _in_lanes(self, rows: Any, lanes: Ints) -> Ints:
        """Return how many of the last ``rows`` rows lie in each of ``lanes``."""
        found: Ints = (rows + self.lanes - 1 - lanes) // self.lanes
        return found

    def _ends(self) -> Ints:
        """Return where each lane ends in the concatenated rest."""
        order = lane_order(self.lanes)
        ends = np.empty(self.lanes, np.int64)
        ends[order] = np.cumsum(self._in_lanes(np.int64(self.left), order))
        return ends


Share = Sequence[Interval] | Turns
"""Rows of a line that a rank takes: intervals in ascending order, or turns."""


def lane_order(lanes: int) -> Ints:
    """Return the lanes in their order in an epoch, so that each of 2 or 4 ranks has neighbouring lanes."""
    return np.array(sorted(range(lanes), key=lambda lane: (lane % 2, lane % 4, lane)), np.int64)


def lanes_of(groups: Sequence[int]) -> int:
    """Into how many lanes a shuffled line of row groups, of so many rows each, is cut.

    A row group at the border of two lanes is decoded for both, so there are many more row groups than lanes.
    """
    whole = round(sum(groups) / max(groups))
    return 12 if whole >= 192 else 4 if whole >= 8 else 2 if whole >= 2 else 1


def cut_at(starts: Ints, stops: Ints, edges: Ints) -> tuple[Ints, Ints, Ints]:
    """Intervals, none of which is empty, cut at ``edges``: between which edges each part lies, its start, its stop."""
    first, last = (np.searchsorted(edges, at, "right") - 1 for at in (starts, stops - 1))
    parts = last - first + 1
    if (parts == 1).all():
        return first, starts, stops
    number = stretches(first, parts)
    starts, stops = np.repeat(starts, parts), np.repeat(stops, parts)
    return number, np.maximum(starts, edges[number]), np.minimum(stops, edges[number + 1])


def stretches(starts: Ints, lengths: Ints) -> Ints:
    """Return the numbers of all stretches, one after the other."""
    ends = np.cumsum(lengths)
    found: Ints = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return found


def rows_of(rows: int, rank: int, size: int) -> int:
    """Number of rows that ``rank`` of ``size`` gets of ``rows``: the first ``rows % size`` ranks get one more."""
    return rows // size + (rank < rows % size)


def steps_of(rows: int, size: int, batch_size: int, drop_last: bool = False) -> int:
    """Steps of a pass over ``rows`` rows: the same on every rank, at least 1 where every rank has a row.

    Raises:
        ValueError: fewer rows than ranks.
    """
    each = rows // size
    if not each:
        raise ValueError(f"{rows} rows for {size} ranks: expected at least one row for each")
    return max(1, each // batch_size) if drop_last else -(-each // batch_size)


def batch_rows(rows: int, rank: int, size: int, batch_size: int, drop_last: bool = False) -> list[int]:
    """Return the rows in each batch of a pass; the last one holds the rest, or is full with ``drop_last``."""
    mine, steps = rows_of(rows, rank, size), steps_of(rows, size, batch_size, drop_last)
    if drop_last:
        return [min(batch_size, mine)] * steps
    return [batch_size] * (steps - 1) + [mine - (steps - 1) * batch_size]


def overlaps(lengths: Iterable[int], intervals: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of concatenated things, of these lengths, that lie in `intervals`: (number, start, stop).

    Intervals are in ascending order.
    """
    things = enumerate(lengths)
    number, length = next(things, (0, 0))
    at = 0
    for start, stop in intervals:
        while start < stop:
            while at + length <= start:
                at += length
                number, length = next(things)
            last = min(stop, at + length)
            yield number, start - at, last - at
            start = last


def length(intervals: Iterable[Interval]) -> int:
    """Number of rows in them."""
    return sum(stop - start for start, stop in intervals)


def part_of(intervals: Iterable[Interval], start: int, rows: int) -> list[Interval]:
    """``rows`` rows from number ``start`` on, of intervals laid end to end."""
    found, at, stop = [], 0, start + rows
    for low, high in intervals:
        first, last = low + max(start - at, 0), min(high, low + stop - at)
        if first < last:
            found.append((first, last))
        at += high - low
    return found


def gaps_of(rows: int, done: Iterable[Interval]) -> list[Interval]:
    """Return what is left of ``rows`` rows."""
    found, at = [], 0
    for start, stop in (*done, (rows, rows)):
        if at < start:
            found.append((at, start))
        at = stop
    return found


def _joined(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the same rows in as few intervals as possible, in the order of the epoch."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
