"""Windows over the pieces of series on this rank. A window is only a position in a piece until its batch is made."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from spark_hvd.collectives.objects import allgather_object
from spark_hvd.context import basics
from spark_hvd.data.bucketing import BUCKETS, ROW, Piece, Seed, mixing, moves_of, order_in_buckets, owned_by, windows_of
from spark_hvd.data.frame import BucketReader, FrameSource, with_moved
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import BatchT, Form, pieces_of
from spark_hvd.data.readers.reader import Reader
from spark_hvd.data.readers.sharding import Ints, stretches
from spark_hvd.data.series.pieces import COUNT, GAP, NULL, PROBLEM, REPEATED, SHORT, UNFIT, windows_in
from spark_hvd.data.source import ReadOptions
from spark_hvd.data.spool import Spool

TOGETHER = 1 << 20
"""Number of windows that are shuffled together; only their numbers are in memory."""

PART_BYTES = 2 << 20
"""Bytes of windows that are cut at once. Small batches cost more to make than to copy, so they are made together."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """A problem of some series.

    Attributes:
        times: How often it occurs in all series.
        series: Number of series in which it occurs.
        key: The key of one of these series.
        times_in_key: How often it occurs in that series.
    """

    times: int
    series: int
    key: str
    times_in_key: int

    def __add__(self, other: Problem) -> Problem:
        return replace(self, times=self.times + other.times, series=self.series + other.series)


@dataclass(frozen=True)
class WindowSource(FrameSource):
    """A :class:`FrameSource` whose rows are windows.

    Attributes:
        series: The series of this rank.
    """

    series: LocalSeries

    @property
    def schema(self) -> pa.Schema:
        return self.series.schema

    def open(self, options: ReadOptions, form: Form[Any, BatchT]) -> Reader[BatchT]:
        return WindowReader(
            self.series, self.counts, self.owned, options, form, options.window_rows or self.window_rows
        )


class LocalSeries:
    """The pieces of series of some buckets. Their values are in unnamed files, which are mapped into memory.

    Args:
        spool: The spool that holds the pieces.
        buckets: The buckets to read.
        spec: The fields of a :class:`~spark_hvd.data.series.windows.WindowSpec`, as decoded from JSON.
        closing: Closes the files. Afterwards, :meth:`read` cannot add pieces, but mapped files stay readable.

    Attributes:
        schema: The schema of the windows.
        counts: Number of windows of each bucket; 0 for buckets that were not read.
        first_windows: The number of the first window of each bucket.
        problems: The problems that were found, by the values of :data:`PROBLEM`.
    """

    def __init__(self, spool: Spool, buckets: Sequence[int], spec: Mapping[str, Any], closing: ExitStack) -> None:
        self._keys, self._columns = spec["keys"], spec["columns"]
        self.length, self._stride = spec["length"], spec["stride"]
        self.problems: dict[str, Problem] = {}
        with spool.disk():
            opened = [closing.enter_context(tempfile.TemporaryFile(dir=spool.folder)) for _ in self._columns]  # noqa: SIM115
            self._files = dict(zip(self._columns, opened, strict=True))
        self._rows = self._owners = np.zeros(0, np.int64)
        fields = [spool.schema.field(name) for name in self._keys]
        self._key_columns = pa.schema(fields).empty_table()
        self.schema = pa.schema([*fields, *(pa.field(name, self._list()) for name in self._columns)])
        self.read(spool, buckets)

    def read(self, spool: Spool, buckets: Sequence[int]) -> None:
        """Add the pieces of more buckets.

        Raises:
            DataError: The pieces cannot be written to the disk.
        """
        numbers = np.array(buckets, np.int64)
        keys, rows, piece_buckets = [self._key_columns], [self._rows], [self._owners]
        owners, at = np.repeat(numbers, spool.counts[numbers]), 0
        with spool.disk():
            for table in spool.tables([(bucket, 0, 0, int(spool.counts[bucket])) for bucket in buckets], None):
                problems = table.column(PROBLEM)
                is_piece = problems.is_null()
                piece_buckets.append(owners[at : at + table.num_rows][is_piece.to_numpy()])
                at += table.num_rows
                self._note(table.filter(problems.is_valid()))
                pieces = table.filter(is_piece)
                keys.append(pieces.select(self._keys))
                for name, file in self._files.items():
                    file.write(pieces.column(name).combine_chunks().flatten().to_numpy())
                rows.append(pieces.column(self._columns[0]).combine_chunks().value_lengths().to_numpy())
            for file in self._files.values():
                file.flush()
        # The unnamed files live as long as they are mapped. Empty files cannot be mapped, and have no windows.
        has_rows = any(map(len, rows))
        self._values = {name: np.memmap(file, np.float32, "r") for name, file in self._files.items() if has_rows}
        self._rows, self._owners = np.concatenate(rows), np.concatenate(piece_buckets)
        windows = windows_in(self._rows, self.length, self._stride)
        self.counts: Ints = np.bincount(self._owners, windows, minlength=BUCKETS).astype(np.int64)
        self._ends, self._starts = np.cumsum(windows), np.cumsum(self._rows) - self._rows
        self._firsts = self._ends - windows
        self.first_windows: Ints = np.zeros(BUCKETS, np.int64)
        buckets_read, pieces_at = np.unique(self._owners, return_index=True)  # the pieces of a bucket follow each other
        self.first_windows[buckets_read] = self._firsts[pieces_at]
        self._key_columns = pa.concat_tables(keys).combine_chunks()

    def batch(self, numbers: Ints, columns: Sequence[str]) -> pa.RecordBatch:
        """Return the windows with these numbers."""
        pieces = np.searchsorted(self._ends, numbers, side="right")
        starts = self._starts[pieces] + (numbers - self._firsts[pieces]) * self._stride
        arrays = []
        for name in columns:
            if name in self._keys:
                arrays.append(self._key_columns.column(name).take(pieces).combine_chunks())
                continue
            windows = np.lib.stride_tricks.sliding_window_view(self._values[name], self.length)[starts]
            arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(windows.reshape(-1)), type=self._list()))
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([self.schema.field(name) for name in columns]))

    def _list(self) -> pa.DataType:
        return pa.list_(pa.float32(), self.length)

    def _note(self, problems: pa.Table) -> None:
        for row in problems.select([*self._keys, PROBLEM, COUNT]).to_pylist():
            key = ", ".join(f"{name}={row[name]!r}" for name in self._keys) or "the only one"
            _add(self.problems, row[PROBLEM], Problem(row[COUNT], 1, key, row[COUNT]))


class WindowReader(BucketReader[BatchT]):
    """Cuts windows out of series, a few batches ahead of the consumer."""

    _rows: LocalSeries

    def _parts(self, pieces: Iterator[Piece], seed: Seed | None, sizes: Sequence[int]) -> Iterator[Any]:
        together = enumerate(windows_of(pieces, self._together))
        orders = (self._order(some, seed, number) for number, some in together)
        most = PART_BYTES // (4 * self._rows.length * max(1, len(self._options.columns)))
        for parts in pieces_of((order for order in orders if len(order)), list(_together(sizes, most))):
            numbers = np.concatenate([order[start:stop] for order, start, stop in parts])
            yield self._formed(self._rows.batch(numbers, self._options.columns), "the series")

    def _order(self, pieces: Sequence[Piece], seed: Seed | None, number: int) -> Ints:
        """Return the remaining windows of pieces, in an order that does not depend on the number of ranks."""
        buckets, firsts, _, lengths = np.array(pieces, np.int64).T
        whole = self._counts[buckets]
        within = stretches(np.zeros_like(whole), whole)
        places = np.repeat(np.arange(len(buckets)), whole)
        ids = buckets[places] * (ROW + 1) + within
        order = order_in_buckets(places.astype(np.int16), ids, seed)
        if (lengths < whole).any():  # another rank takes the others
            order = order[stretches(np.cumsum(whole) - whole + firsts, lengths)]
        windows: Ints = (self._rows.first_windows[buckets][places] + within)[order[mixing(pieces, seed, number)]]
        return windows


def _together(sizes: Sequence[int], most: int) -> Iterator[int]:
    """Yield numbers of rows: of as many batches as hold at most ``most`` rows together, or of one batch."""
    rows = 0
    for size in sizes:
        if rows and rows + size > most:
            yield rows
            rows = 0
        rows += size
    if rows:
        yield rows


def window_source(name: str, spool: Spool, buckets: range, part: int, spec: Mapping[str, Any]) -> WindowSource:
    """Return this rank's windows over series. Collective.

    Raises:
        DataError: The series do not fit the specification, or there are too few windows. All ranks raise the same.
    """
    with ExitStack() as closing:
        series = LocalSeries(spool, buckets, spec, closing)
        mine = np.zeros_like(spool.counts)
        mine[buckets.start : buckets.stop] = spool.counts[buckets.start : buckets.stop]
        ranks = allgather_object(
            (series.counts, mine, part, spool.local_buckets, spool.window_rows, series.problems),
            name=f"spark_hvd.rows_of.{name}",
        )
        rank_counts, rows, parts, held, window_rows, noted = zip(*ranks, strict=True)
        counts: Ints = np.sum(rank_counts, axis=0)
        problems: dict[str, Problem] = {}
        for rank_problems in noted:
            for kind, problem in rank_problems.items():
                _add(problems, kind, problem)
        _check(name, spec, problems, int(counts.sum()), len(ranks))
        moves = moves_of(counts, np.sum(rows, axis=0), parts, held, min(window_rows))
        spool = with_moved(name, spool, moves, part)
        wanted = owned_by(part, len(parts), counts).buckets.tolist()
        if more := [bucket for bucket in wanted if bucket not in buckets]:
            series.read(spool, more)
    return WindowSource(spool, counts, parts, part, TOGETHER, series)


def _add(problems: dict[str, Problem], kind: str, problem: Problem) -> None:
    problems[kind] = problems[kind] + problem if kind in problems else problem


def _check(name: str, spec: Mapping[str, Any], problems: Mapping[str, Problem], windows: int, ranks: int) -> None:
    """Raise the first problem of the series, or an error for too few windows."""
    where, order, left_out = f"data set {name!r}: ", spec["order_by"], ""
    for kind, found in problems.items():
        here = f"{found.times_in_key} of them in {found.key}"
        if kind.startswith(NULL):
            column = kind.removeprefix(NULL)
            raise DataError(
                f"{where}column {column!r} has {found.times} null(s) in {found.series} series, {here}. Next: fill "
                f"them, or drop such rows: df.na.drop(subset=[{column!r}])"
            )
        if kind.startswith(UNFIT):
            raise DataError(
                f"{where}column {kind.removeprefix(UNFIT)!r} has {found.times} number(s) in {found.series} series that "
                f"float32 cannot hold, {here}. Next: cast it to double to have whole numbers rounded; scale down those "
                "beyond 3e38"
            )
        if kind == REPEATED:
            raise DataError(
                f"{where}{found.series} series have {found.times} rows with the {order!r} of another row, {here}. "
                "Expected one row for each. Next: pass more keys=, or aggregate such rows"
            )
        if kind == GAP:
            raise DataError(
                f"{where}{found.series} series have {found.times} steps of {order!r} other than "
                f"every={spec['every']}, {here}. Next: insert the missing rows, or omit every= to take rows as "
                "they follow each other"
            )
        assert kind == SHORT
        shorter = f"{found.series} series have fewer rows than a window of {spec['length']}"
        left_out = f"{shorter}, {found.key} has {found.times_in_key}"
        if spec["short"] == "error":
            raise DataError(f'{where}{left_out}. Next: use shorter windows, or short="skip" to skip such series')
        if basics.rank() == 0:
            _log.warning("%s%s: they are skipped", where, left_out)
    if windows < ranks:
        raise DataError(
            f"data set {name!r} has {windows} windows of {spec['length']} rows for {ranks} ranks"
            f"{f' ({left_out})' if left_out else ''}: expected at least one for each. Next: use more or longer "
            "series, shorter windows, or fewer ranks"
        )
