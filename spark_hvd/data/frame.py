"""The rows of a DataFrame, which lie spread over the hosts of the ranks: each rank reads those that came to it."""

from __future__ import annotations

import itertools
import zlib
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from spark_hvd.data.column_form import ColumnForm
from spark_hvd.data.packed import PackedRows
from spark_hvd.data.readers.forms import BatchT, Form
from spark_hvd.data.readers.reader import Reader
from spark_hvd.data.readers.sharding import Interval, Position, Sharding, gaps_of, length, steps_of
from spark_hvd.data.source import Asked, DataSource
from spark_hvd.data.spool import Spool
from spark_hvd.data.units import Ints, Piece, Seed, line_of, mixing, stretches, units_of, windows_of

T = TypeVar("T")


@dataclass(frozen=True)
class FrameSource(DataSource):
    """What a rank has of a DataFrame, and what it knows of the rest.

    Attributes:
        spool: Where its rows lie.
        counts: Rows of each unit, those of all ranks.
        parts: Which part of the units each rank owns: ranks are numbered by host, and tasks are not.
        part: Which one this rank owns.
        window_rows: Rows that are shuffled together unless something else is asked for.
    """

    spool: Spool
    counts: Ints
    parts: tuple[int, ...]
    part: int
    window_rows: int

    @property
    def schema(self) -> pa.Schema:
        """See base class."""
        return self.spool.schema

    @property
    def rows(self) -> int:
        """See base class."""
        return int(self.counts.sum())

    @property
    def layout(self) -> int:
        """See base class."""
        return zlib.crc32(self.counts.tobytes())

    def sharding(self, batch_size: int, drop_last: bool, asked: Asked) -> Sharding:
        """See base class."""
        seed = asked.seed if asked.shuffle else None
        return UnitSharding(
            self.rows,
            batch_size,
            drop_last,
            counts=self.counts,
            seed=seed,
            parts=self.parts,
            window_rows=asked.window_rows or self.window_rows,
        )

    def open(self, asked: Asked, form: Form[Any, BatchT]) -> Reader[BatchT]:
        """See base class."""
        units = units_of(self.part, len(self.parts))
        return SpoolReader(self.spool, self.counts, units, asked, form, asked.window_rows or self.window_rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitSharding(Sharding):
    """Rows are bound to the rank that owns their unit; ranks differ a little in rows, and not in steps.

    Attributes:
        counts: Rows of each unit.
        seed: Of the order of the units; None for ascending.
        parts: See :class:`FrameSource`.
        window_rows: Rows that a rank shuffles together.
    """

    counts: Ints
    seed: int | None
    parts: tuple[int, ...]
    window_rows: int
    _known: dict[tuple[Position, int], list[list[Interval]]] = field(default_factory=dict, repr=False)

    def batches(self, position: Position, rank: int, size: int) -> list[int]:
        """See base class. None where a rank has no row left; what the others have is left out.

        No batch is empty: where a rank has fewer rows than others have batches, those of the others are larger.
        """
        left = [length(share) for share in self._shares(position, size)]
        if not min(left):
            return []
        if self.drop_last:
            return [min(self.batch_size, min(left))] * steps_of(min(left), 1, self.batch_size, drop_last=True)
        owned = (units_of(part, size) for part in self.parts)
        whole = [int(self.counts[units.start : units.stop].sum()) for units in owned]
        # As many ranks as before go on with the batches that were left; others share what is left anew.
        steps, done = self._steps(whole), self._steps_done(whole, left)
        if done is None:
            whole, steps, done = left, self._steps(left), 0
        first = [self._first(whole[rank], steps, batches) for batches in range(done, steps + 1)]
        return [after - before for before, after in itertools.pairwise(first)]

    def _steps(self, rows: Sequence[int]) -> int:
        """Of ranks with so many rows each."""
        return min(min(rows), steps_of(max(rows), 1, self.batch_size))

    def _steps_done(self, whole: Sequence[int], left: Sequence[int]) -> int | None:
        """After how many steps ranks that had so many rows have so many left; None if there is no such step."""
        steps = self._steps(whole)
        done = bisect_left(range(steps), whole[0] - left[0], key=lambda batches: self._first(whole[0], steps, batches))
        same = all(rows - self._first(rows, steps, done) == rest for rows, rest in zip(whole, left, strict=True))
        return done if same else None

    def _first(self, rows: int, steps: int, batches: int) -> int:
        """How many of a rank's rows are in its first batches."""
        if steps == steps_of(rows, 1, self.batch_size):
            return min(rows, batches * self.batch_size)
        return batches * (rows // steps) + min(batches, rows % steps)

    def share(self, position: Position, rank: int, size: int) -> list[Interval]:
        """See base class."""
        return self._shares(position, size)[rank]

    def taken(self, position: Position, rank: int, size: int, rows: int) -> list[Interval]:
        """See base class."""
        seed = seed_of(self.seed, position.epoch)
        order, begins = line_of(self.counts, seed)
        mine = _owned(order, units_of(self.parts[rank], size))
        begins, counts = begins[mine], self.counts[order[mine]]
        found: list[Interval] = []
        pieces = _pieces(begins, begins, counts, self.share(position, rank, size))
        for number, window in enumerate(windows_of(pieces, self.window_rows)):
            if not rows:
                break
            left = [(first + done, first + count) for first, done, count in window if done < count]
            if (there := length(left)) > rows:
                firsts, _, lengths = np.array(window).T
                return [*found, *_runs(np.sort(stretches(firsts, lengths)[mixing(window, seed, number)[:rows]]))]
            found += left
            rows -= there
        return found

    def _shares(self, position: Position, size: int) -> list[list[Interval]]:
        """What is left for each rank."""
        if (position, size) not in self._known:
            self._known.clear()  # a training asks for the same place again and again
            order, starts = line_of(self.counts, seed_of(self.seed, position.epoch))
            stops = starts + self.counts[order]
            left = list(gaps_of(self.rows, position.done))
            shares = []
            for part in self.parts:
                mine = _owned(order, units_of(part, size))
                shares.append(list(_common(zip(starts[mine].tolist(), stops[mine].tolist(), strict=True), left)))
            self._known[position, size] = shares
        return self._known[position, size]


class UnitReader(Reader[BatchT]):
    """Reads the rows of a rank's units; a subclass finds those of some pieces.

    Args:
        counts: Rows of each unit.
        units: The rank's.
        asked: What is read.
        form: Makes batches.
    """

    def __init__(self, counts: Ints, units: range, asked: Asked, form: Form[Any, BatchT]) -> None:
        self._counts, self._units, self._asked, self._form = counts, units, asked, form

    def batches(self, epoch: int, share: Sequence[Interval], sizes: Sequence[int]) -> Generator[BatchT, None, None]:
        """See base class."""
        if not sizes:
            return
        seed = seed_of(self._asked.seed if self._asked.shuffle else None, epoch)
        order, begins = line_of(self._counts, seed)
        mine = _owned(order, self._units)
        units = order[mine]
        pieces = _pieces(units, begins[mine], self._counts[units], share)
        with ThreadPoolExecutor(1, "spark_hvd-reader") as pool:
            yield from self._form.cut(_ahead(pool, self._parts(pieces, seed, sizes)), sizes)

    def close(self) -> None:
        """See base class."""

    def _parts(self, pieces: Iterator[Piece], seed: Seed | None, sizes: Sequence[int]) -> Iterator[Any]:
        """The rows of pieces in the form asked for, some at once; the next are found while some are used."""
        raise NotImplementedError


class SpoolReader(UnitReader[BatchT]):
    """Reads units, one window ahead of the consumer. Bounded by two windows of memory; files are mapped."""

    def __init__(
        self, spool: Spool, counts: Ints, units: range, asked: Asked, form: Form[Any, BatchT], window_rows: int
    ) -> None:
        super().__init__(counts, units, asked, form)
        self._spool, self._window_rows = spool, window_rows

    def _parts(self, pieces: Iterator[Piece], seed: Seed | None, sizes: Sequence[int]) -> Iterator[Any]:
        windows = self._spool.windows(pieces, seed, self._window_rows, self._asked.columns)
        return (self._rows(window, "the DataFrame") for window in windows)

    def _rows(self, window: PackedRows, where: str) -> Any:
        if isinstance(self._form, ColumnForm):
            return self._form.of_batch(window, where)
        return self._form.of(pa.Table.from_batches([window.batch()]), where)


def seed_of(seed: int | None, epoch: int) -> Seed | None:
    """Of an epoch's order; None where all have the same."""
    return None if seed is None else (seed, epoch)


def _owned(order: Ints, units: range) -> Ints:
    """Which places of the order have these units."""
    return np.flatnonzero((order >= units.start) & (order < units.stop))


def _pieces(names: Ints, begins: Ints, counts: Ints, share: Sequence[Interval]) -> Iterator[Piece]:
    """Of each unit of a rank, in the order of the line, what is left of it: its last rows.

    Args:
        names: What the pieces say of their units.
        begins: Where in the line they begin.
        counts: Rows of each.
        share: What is left, in the order of the line.
    """
    edges = np.array([(0, 0), *share], np.int64)
    below = np.cumsum(edges[:, 1] - edges[:, 0])
    # Rows of the share before a place grow by one a row inside of its intervals, and stay as they are between them.
    before = np.column_stack((below - (edges[:, 1] - edges[:, 0]), below)).ravel()
    left = np.interp(begins + counts, edges.ravel(), before) - np.interp(begins, edges.ravel(), before)
    return zip(names.tolist(), (counts - left.astype(np.int64)).tolist(), counts.tolist(), strict=True)


def _runs(places: Ints) -> list[Interval]:
    """Ascending places, as intervals."""
    cuts = np.flatnonzero(np.diff(places) > 1)
    starts, stops = places[[0, *(cuts + 1)]], places[[*cuts, -1]] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _ahead(pool: ThreadPoolExecutor, items: Iterator[T]) -> Iterator[T]:
    """The items, of which the next is made while one is used."""
    coming = pool.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = pool.submit(next, items, None)
        yield item
        del item


def _common(some: Iterable[Interval], others: Sequence[Interval]) -> Iterator[Interval]:
    """What lies in both; each is in ascending order."""
    at = 0
    for start, stop in some:
        while at < len(others) and others[at][1] <= start:
            at += 1
        after = at
        while after < len(others) and others[after][0] < stop:
            low, high = max(start, others[after][0]), min(stop, others[after][1])
            if low < high:
                yield low, high
            after += 1
