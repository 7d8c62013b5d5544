"""Reads a rank's share of a DataFrame, whose rows are spread over the disks of the ranks' hosts."""

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
import torch

from spark_hvd.collectives.process_set import global_process_set, queue_of
from spark_hvd.collectives.start import start_alltoall
from spark_hvd.context import basics
from spark_hvd.data.bucketing import Move, Owned, Piece, Seed, mixing, order_of, owned_by, windows_of
from spark_hvd.data.column_form import ColumnForm, table_of
from spark_hvd.data.packed import PackedRows
from spark_hvd.data.readers.forms import BatchT, Form
from spark_hvd.data.readers.reader import Reader
from spark_hvd.data.readers.sharding import (
    Interval,
    Ints,
    Position,
    Sharding,
    Share,
    Turns,
    gaps_of,
    length,
    steps_of,
    stretches,
)
from spark_hvd.data.readers.sharding import rows_of as equal_rows
from spark_hvd.data.source import DataSource, ReadOptions
from spark_hvd.data.spool import Spool, SpoolWriter

T = TypeVar("T")


@dataclass(frozen=True)
class FrameSource(DataSource):
    """One rank's rows of a DataFrame, and the layout of all rows.

    Attributes:
        spool: The rows on this host.
        counts: Number of rows of each bucket, over all ranks.
        parts: The number of the part that each rank owns. It differs from the rank, as ranks are numbered by host.
        part: The part that this rank owns.
        window_rows: Rows to shuffle together if the user passes no ``window_rows``.
    """

    spool: Spool
    counts: Ints
    parts: tuple[int, ...]
    part: int
    window_rows: int

    @property
    def schema(self) -> pa.Schema:
        return self.spool.schema

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    @property
    def layout(self) -> int:
        return zlib.crc32(self.counts.tobytes())

    def sharding(self, batch_size: int, drop_last: bool, options: ReadOptions) -> Sharding:
        seed = options.seed if options.shuffle else None
        return BucketSharding(
            self.rows,
            batch_size,
            drop_last,
            counts=self.counts,
            seed=seed,
            parts=self.parts,
            window_rows=options.window_rows or self.window_rows,
        )

    def open(self, options: ReadOptions, form: Form[Any, BatchT]) -> Reader[BatchT]:
        return SpoolReader(self.spool, self.counts, self.owned, options, form, options.window_rows or self.window_rows)

    @property
    def owned(self) -> Owned:
        """The rows of each bucket that this rank takes."""
        return owned_by(self.part, len(self.parts), self.counts)


@dataclass(frozen=True, kw_only=True, eq=False)
class BucketSharding(Sharding):
    """Gives each rank the same part of the buckets in every epoch. Ranks differ by one row at most, and not in steps.

    Attributes:
        counts: Number of rows of each bucket.
        seed: Seed of the order of the buckets; None for ascending order.
        parts: See :class:`FrameSource`.
        window_rows: Rows that a rank shuffles together.
    """

    counts: Ints
    seed: int | None
    parts: tuple[int, ...]
    window_rows: int
    _known: dict[tuple[Position, int], list[list[Interval]]] = field(default_factory=dict, repr=False)

    def batches(self, position: Position, rank: int, size: int) -> list[int]:
        """See base class. Once a rank has no row left, there are no batches, and rows left on others are omitted.

        No batch is empty: if a rank has fewer rows than others have batches, the others make larger batches. Ranks
        differ by more than one row only after their number has changed within an epoch.
        """
        left = [length(share) for share in self._shares(position, size)]
        if not min(left):
            return []
        if self.drop_last:
            return [min(self.batch_size, left[rank])] * steps_of(min(left), 1, self.batch_size, drop_last=True)
        whole = [equal_rows(self.rows, part, size) for part in self.parts]
        # The same number of ranks continues with the remaining batches; another number divides the rest again.
        steps, done = self._steps(whole), self._steps_done(whole, left)
        if done is None:
            whole, steps, done = left, self._steps(left), 0
        first = [self._first(whole[rank], steps, batches) for batches in range(done, steps + 1)]
        return [after - before for before, after in itertools.pairwise(first)]

    def _steps(self, rows: Sequence[int]) -> int:
        """Return the number of steps of ranks with these numbers of rows."""
        fewest, most = min(rows), max(rows)
        return min(fewest, steps_of(fewest if most - fewest <= 1 else most, 1, self.batch_size))

    def _steps_done(self, whole: Sequence[int], left: Sequence[int]) -> int | None:
        """Return the step after which ranks that began with ``whole`` rows have ``left``; None if there is none."""
        steps = self._steps(whole)
        done = bisect_left(range(steps), whole[0] - left[0], key=lambda batches: self._first(whole[0], steps, batches))
        same = all(rows - self._first(rows, steps, done) == rest for rows, rest in zip(whole, left, strict=True))
        return done if same else None

    def _first(self, rows: int, steps: int, batches: int) -> int:
        """Return how many rows a rank's first batches hold."""
        if (steps - 1) * self.batch_size < rows <= steps * self.batch_size + 1:
            return rows if batches == steps else batches * self.batch_size
        return batches * (rows // steps) + min(batches, rows % steps)

    def share(self, position: Position, rank: int, size: int) -> list[Interval]:
        return self._shares(position, size)[rank]

    def taken(self, position: Position, rank: int, size: int, rows: int) -> list[Interval]:
        seed = seed_of(self.seed, position.epoch)
        whole = _pieces_of(self.counts, owned_by(self.parts[rank], size, self.counts), seed)
        intervals: list[Interval] = []
        cut = whole.cut(self.share(position, rank, size))
        pieces = zip(cut.begins.tolist(), cut.firsts.tolist(), cut.done.tolist(), cut.lengths.tolist(), strict=True)
        for number, window in enumerate(windows_of(pieces, self.window_rows)):
            if not rows:
                break
            left = [(begin + done, begin + count) for begin, _, done, count in window if done < count]
            if (remaining := length(left)) > rows:
                firsts, _, _, lengths = np.array(window).T
                return [*intervals, *_runs(np.sort(stretches(firsts, lengths)[mixing(window, seed, number)[:rows]]))]
            intervals += left
            rows -= remaining
        return intervals

    def _shares(self, position: Position, size: int) -> list[list[Interval]]:
        """Return the intervals that are left for each rank."""
        if (position, size) not in self._known:
            self._known.clear()  # one entry is enough: training asks for the same position many times
            seed, left = seed_of(self.seed, position.epoch), list(gaps_of(self.rows, position.done))
            shares = []
            for part in self.parts:
                mine = _pieces_of(self.counts, owned_by(part, size, self.counts), seed)
                stops = mine.begins + mine.lengths
                shares.append(list(_common(zip(mine.begins.tolist(), stops.tolist(), strict=True), left)))
            self._known[position, size] = shares
        return self._known[position, size]


class BucketReader(Reader[BatchT]):
    """Reads a rank's rows of buckets, ``together`` rows at a time. A subclass reads the rows of given pieces."""

    def __init__(
        self, rows: Any, counts: Ints, owned: Owned, options: ReadOptions, form: Form[Any, BatchT], together: int
    ) -> None:
        self._rows, self._counts, self._owned = rows, counts, owned
        self._options, self._form, self._together = options, form, together

    def batches(self, epoch: int, share: Share, sizes: Sequence[int]) -> Generator[BatchT, None, None]:
        assert not isinstance(share, Turns)
        if not sizes:
            return
        seed = seed_of(self._options.seed if self._options.shuffle else None, epoch)
        pieces = _pieces_of(self._counts, self._owned, seed).cut(share).pieces()
        with ThreadPoolExecutor(1, "spark_hvd-reader") as pool:
            yield from self._form.cut(one_ahead(pool, self._parts(pieces, seed, sizes)), sizes)

    def close(self) -> None:
        """See base class."""

    def _parts(self, pieces: Iterator[Piece], seed: Seed | None, sizes: Sequence[int]) -> Iterator[Any]:
        """Yield the rows of pieces in the requested form, some at a time. Runs in a thread, one item ahead."""
        raise NotImplementedError

    def _formed(self, batch: pa.RecordBatch | PackedRows, where: str) -> Any:
        if isinstance(self._form, ColumnForm):
            return self._form.of_batch(batch, where)
        return self._form.of(table_of(batch), where)


class SpoolReader(BucketReader[BatchT]):
    """Reads buckets from mapped files, one window ahead of the consumer. Holds at most two windows in memory."""

    _rows: Spool

    def _parts(self, pieces: Iterator[Piece], seed: Seed | None, sizes: Sequence[int]) -> Iterator[Any]:
        windows = self._rows.windows(pieces, seed, self._together, self._options.columns)
        return (self._formed(window, "the DataFrame") for window in windows)


def with_moved(name: str, spool: Spool, moves: Iterator[list[Move]], part: int) -> Spool:
    """Fetch the rows that this rank lacks, and return them together with those of this host. Collective.

    ``part`` is this rank's part; it keeps the folders of a task's ranks apart.

    Raises:
        DataError: The rows cannot be written to the disk.
    """
    me, size, writer = basics.rank(), basics.size(), None
    device = queue_of(global_process_set).communicator.fact_device
    folder = f"{spool.folder}-{part}"
    for number, moving in enumerate(moves):
        sent = {move.target: _to_bytes(spool.rows(*move[2:])) for move in moving if move.source == me}
        payload = torch.cat(
            [sent.get(rank, torch.empty(0, dtype=torch.uint8, device="cpu")) for rank in range(size)]
        ).to(device)
        splits = [len(sent.get(rank, ())) for rank in range(size)]
        handle = start_alltoall(payload, splits, f"spark_hvd.moved.{name}.{number}", global_process_set)
        received, lengths = handle.wait()
        for rows in np.split(received.cpu().numpy(), np.cumsum(lengths.cpu().numpy())[:-1]):
            if len(rows):
                writer = writer or SpoolWriter(folder, spool.schema)
                with pa.ipc.open_stream(pa.py_buffer(rows)) as stream:
                    for batch in stream:
                        writer.write(batch)
    if writer is None:
        return spool
    writer.close()
    return Spool(str(spool.folder), folder)


def _to_bytes(batch: pa.RecordBatch) -> torch.Tensor:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return torch.from_numpy(np.frombuffer(sink.getvalue(), np.uint8).copy())


def seed_of(seed: int | None, epoch: int) -> Seed | None:
    """Return the seed of an epoch's order; None if all epochs have the same order."""
    return None if seed is None else (seed, epoch)


@dataclass(frozen=True)
class _Pieces:
    """A rank's pieces in the order of an epoch: the start of each among all rows, and the fields of a Piece."""

    begins: Ints
    buckets: Ints
    firsts: Ints
    done: Ints
    lengths: Ints

    def pieces(self) -> Iterator[Piece]:
        return zip(self.buckets.tolist(), self.firsts.tolist(), self.done.tolist(), self.lengths.tolist(), strict=True)

    def cut(self, share: Sequence[Interval]) -> _Pieces:
        """Return the same pieces, in which only the rows of ``share`` remain to be done: the last rows of each piece.

        A piece is cut in two if finished rows follow unfinished ones, which other ranks may have left.
        """
        edges = np.array([(0, 0), *share], np.int64)
        stops, ends = edges[1:, 1], self.begins + self.lengths
        containing = np.searchsorted(self.begins, stops) - 1
        begins = np.sort(np.concatenate([self.begins, stops[stops < ends[containing]]])) if len(stops) else self.begins
        piece = np.searchsorted(self.begins, begins, side="right") - 1
        ends = np.minimum(ends[piece], np.append(begins[1:], np.iinfo(np.int64).max))
        below = np.cumsum(edges[:, 1] - edges[:, 0])
        # The number of shared rows before a place rises by one per row inside an interval, and is constant outside.
        before = np.column_stack((below - (edges[:, 1] - edges[:, 0]), below)).ravel()
        left = np.interp(ends, edges.ravel(), before) - np.interp(begins, edges.ravel(), before)
        firsts = self.firsts[piece] + begins - self.begins[piece]
        return _Pieces(begins, self.buckets[piece], firsts, ends - begins - left.astype(np.int64), ends - begins)


def _pieces_of(counts: Ints, owned: Owned, seed: Seed | None) -> _Pieces:
    """Return a rank's pieces in the order of an epoch, with no row done."""
    order, places = order_of(seed), np.empty_like(counts)
    places[order] = np.cumsum(counts[order]) - counts[order]
    begins = places[owned.buckets] + owned.firsts
    sort = np.argsort(begins)
    buckets, firsts, lengths = (values[sort] for values in owned)
    return _Pieces(begins[sort], buckets, firsts, np.zeros_like(lengths), lengths)


def _runs(places: Ints) -> list[Interval]:
    """Return ascending places as intervals."""
    cuts = np.flatnonzero(np.diff(places) > 1)
    starts, stops = places[[0, *(cuts + 1)]], places[[*cuts, -1]] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def one_ahead(pool: ThreadPoolExecutor, items: Iterator[T]) -> Iterator[T]:
    """Yield the items, each while ``pool`` makes the next one."""
    coming = pool.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = pool.submit(next, items, None)
        yield item
        del item


def _common(some: Iterable[Interval], others: Sequence[Interval]) -> Iterator[Interval]:
    """Yield the intersections; both are in ascending order."""
    first = 0
    for start, stop in some:
        while first < len(others) and others[first][1] <= start:
            first += 1
        after = first
        while after < len(others) and others[after][0] < stop:
            low, high = max(start, others[after][0]), min(stop, others[after][1])
            if low < high:
                yield low, high
            after += 1
