"""The rows of a DataFrame, which lie spread over the hosts of the ranks: each rank reads those that came to it."""

from __future__ import annotations

import zlib
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
from spark_hvd.data.readers.sharding import Interval, Position, Sharding, gaps_of, length, overlaps, steps_of
from spark_hvd.data.source import Asked, DataSource
from spark_hvd.data.spool import Spool
from spark_hvd.data.units import Ints, Piece, Seed, mixing, order_of, stretches, units_of, windows_of

T = TypeVar("T")


@dataclass(frozen=True)
class FrameSource(DataSource):
    """What a rank has of a DataFrame, and what it knows of the rest.

    Attributes:
        spool: Where its rows lie.
        counts: Rows of each unit, those of all ranks.
        parts: Which part of the units each rank owns: ranks are numbered by host, and tasks are not.
        window_rows: Rows that are shuffled together unless something else is asked for.
    """

    spool: Spool
    counts: Ints
    parts: tuple[int, ...]
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
        return SpoolReader(self.spool, self.counts, asked, form, asked.window_rows or self.window_rows)


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
        fewest, most, mine = min(left), max(left), left[rank]
        if not fewest:
            return []
        if self.drop_last:
            return [min(self.batch_size, fewest)] * steps_of(fewest, 1, self.batch_size, drop_last=True)
        steps = min(fewest, steps_of(most, 1, self.batch_size))
        if steps == steps_of(mine, 1, self.batch_size):
            return [self.batch_size] * (steps - 1) + [mine - self.batch_size * (steps - 1)]
        return [mine // steps + (step < mine % steps) for step in range(steps)]

    def share(self, position: Position, rank: int, size: int) -> list[Interval]:
        """See base class."""
        return self._shares(position, size)[rank]

    def taken(self, position: Position, rank: int, size: int, rows: int) -> list[Interval]:
        """See base class."""
        seed = seed_of(self.seed, position.epoch)
        found: list[Interval] = []
        for number, window in enumerate(windows_of(_pieces(self.share(position, rank, size)), self.window_rows)):
            if not rows:
                break
            whole = [(start, stop) for _, start, stop in window]
            if (there := length(whole)) > rows:
                starts, stops = np.array(whole).T
                places = stretches(starts, stops - starts)[mixing(window, seed, number)[:rows]]
                return [*found, *_runs(np.sort(places))]
            found += whole
            rows -= there
        return found

    def _shares(self, position: Position, size: int) -> list[list[Interval]]:
        """What is left for each rank."""
        if (position, size) not in self._known:
            self._known.clear()  # a training asks for the same place again and again
            order = order_of(seed_of(self.seed, position.epoch))
            stops = np.cumsum(self.counts[order])
            starts = stops - self.counts[order]
            left = list(gaps_of(self.rows, position.done))
            shares = []
            for rank in range(size):
                units = units_of(self.parts[rank], size)
                mine = np.flatnonzero((order >= units.start) & (order < units.stop))
                shares.append(list(_common(zip(starts[mine].tolist(), stops[mine].tolist(), strict=True), left)))
            self._known[position, size] = shares
        return self._known[position, size]


class SpoolReader(Reader[BatchT]):
    """Reads units, one window ahead of the consumer. Bounded by two windows of memory; files are mapped."""

    def __init__(self, spool: Spool, counts: Ints, asked: Asked, form: Form[Any, BatchT], window_rows: int) -> None:
        self._spool, self._counts, self._asked, self._form = spool, counts, asked, form
        self._window_rows = window_rows

    def batches(self, epoch: int, share: Sequence[Interval], sizes: Sequence[int]) -> Generator[BatchT, None, None]:
        """See base class."""
        if not sizes:
            return
        seed = seed_of(self._asked.seed if self._asked.shuffle else None, epoch)
        order = order_of(seed)
        pieces: Iterator[Piece] = (
            (int(order[at]), start, stop) for at, start, stop in overlaps(self._counts[order].tolist(), share)
        )
        with ThreadPoolExecutor(1, "spark_hvd-reader") as pool:
            windows = self._spool.windows(pieces, seed, self._window_rows, self._asked.columns)
            rows = (self._rows(window, "the DataFrame") for window in windows)
            yield from self._form.cut(_ahead(pool, rows), sizes)

    def close(self) -> None:
        """See base class."""

    def _rows(self, window: PackedRows, where: str) -> Any:
        if isinstance(self._form, ColumnForm):
            return self._form.of_batch(window, where)
        return self._form.of(pa.Table.from_batches([window.batch()]), where)


def seed_of(seed: int | None, epoch: int) -> Seed | None:
    """Of an epoch's order; None where all have the same."""
    return None if seed is None else (seed, epoch)


def _pieces(share: Iterable[Interval]) -> Iterator[Piece]:
    """The parts of units in a share of the line, by their places in it."""
    return ((0, start, stop) for start, stop in share)


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
