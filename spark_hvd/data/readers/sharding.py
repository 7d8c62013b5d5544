"""Where a training stands in its data, and how the rest of an epoch is shared among ranks. Pure functions of counts.

The rows of an epoch stand in a line, whose order seed and epoch decide and the number of ranks does not. What was
trained on is some intervals of it. N ranks lay the rest end to end and cut it into N pieces, equal but for a row, which
they take in batches. So each row comes once in an epoch, whatever becomes of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[int, int]
"""Rows of a line from the first number to before the second."""


@dataclass(frozen=True)
class Position:
    """A place in the data.

    Attributes:
        epoch: Its number, from 0.
        done: What was taken of it, in the order of the line; none touches the next.
    """

    epoch: int = 0
    done: tuple[Interval, ...] = ()

    def to_json(self) -> list[Any]:
        """As JSON-ready lists of numbers."""
        return [self.epoch, [list(each) for each in self.done]]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Position:
        """The inverse of :meth:`to_json`."""
        epoch, done = data
        return cls(epoch, tuple((start, stop) for start, stop in done))


@dataclass(frozen=True)
class Sharding:
    """How the rows of an epoch are shared.

    Attributes:
        rows: How many there are.
        batch_size: Rows in a batch.
        drop_last: Leave out the batch at the end that is not full.
    """

    rows: int
    batch_size: int
    drop_last: bool = False

    def batches(self, position: Position, rank: int, size: int) -> list[int]:
        """Rows in each batch of ``rank`` of ``size``, from ``position`` on; as many on all ranks.

        None where fewer rows than ranks are left: these are left out.
        """
        left = self.rows - length(position.done)
        return batch_rows(left, rank, size, self.batch_size, self.drop_last) if left >= size else []

    def totals(self, position: Position, size: int) -> list[int]:
        """Rows in each batch of all ranks together."""
        steps = zip(*(self.batches(position, rank, size) for rank in range(size)), strict=True)
        return [sum(step) for step in steps]

    def share(self, position: Position, rank: int, size: int) -> list[Interval]:
        """The rows of ``rank`` of ``size``, from ``position`` on."""
        left = self.rows - length(position.done)
        start = rank * (left // size) + min(rank, left % size)
        return part_of(gaps_of(self.rows, position.done), start, rows_of(left, rank, size))

    def after(self, position: Position, batches: int, size: int) -> Position:
        """The position once each of ``size`` ranks has taken so many batches; the next epoch's after the last."""
        if batches >= len(self.batches(position, 0, size)):
            return Position(position.epoch + 1)
        taken = list(position.done)
        for rank in range(size):
            rows = sum(self.batches(position, rank, size)[:batches])
            taken += self.taken(position, rank, size, rows)
        return Position(position.epoch, _joined(taken))

    def taken(self, position: Position, rank: int, size: int, rows: int) -> list[Interval]:
        """The first so many rows that ``rank`` of ``size`` takes, from ``position`` on."""
        return part_of(self.share(position, rank, size), 0, rows)


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
    """Rows in each batch of a pass; the last one holds all that is left, or is full where ``drop_last``."""
    mine, steps = rows_of(rows, rank, size), steps_of(rows, size, batch_size, drop_last)
    if drop_last:
        return [min(batch_size, mine)] * steps
    return [batch_size] * (steps - 1) + [mine - (steps - 1) * batch_size]


def overlaps(lengths: Iterable[int], intervals: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """The parts of things, of these lengths and laid end to end, that lie in `intervals`: (number, start, stop).

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
    """What is left of ``rows`` rows."""
    found, at = [], 0
    for start, stop in (*done, (rows, rows)):
        if at < start:
            found.append((at, start))
        at = stop
    return found


def _joined(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same rows in as few intervals as possible, in the order of the line."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
