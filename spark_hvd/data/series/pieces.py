"""Turns the sorted rows of series into a row for each piece of a series: its key, and arrays of its values.

A short series is one piece. Long series are cut, so that their windows can be spread over ranks. Neighbouring pieces
share the rows of windows that cross their border. A problem of a series also becomes a row, because only ranks see the
problems of all series together and can report them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_hvd.data.readers.dataset import listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import single
from spark_hvd.data.series.windows import METADATA, WindowSpec

Ints = np.ndarray[Any, np.dtype[np.int64]]

PROBLEM, COUNT = "__problem", "__count"
"""Columns of a row that reports a problem: what is wrong with the series, and how often."""

SHORT, REPEATED, GAP, NULL, UNFIT = "short", "repeated", "gap", "null in ", "unfit in "
"""Values of :data:`PROBLEM`: too few rows (the count is their number), a repeated time, a step in time of another
length, a null in the column whose name follows, a number in that column that float32 cannot hold."""

_BATCH_BYTES = 32 << 20


def windows_in(rows: Ints, length: int, stride: int) -> Ints:
    """Return the number of windows in series of these lengths."""
    counts: Ints = np.where(rows < length, 0, (rows - length) // stride + 1)
    return counts


def piece_windows(windows: Ints, length: int, stride: int) -> Ints:
    """Return the number of windows in each piece of a series but its last: a sixteenth of the series' windows.

    Neighbouring pieces repeat rows, so small pieces need more memory. The number is therefore at least a quarter of the
    windows that contain a given row. It is at most four times as many, where pieces need a quarter more memory than the
    series.
    """
    overlapping = -(-length // stride)
    counts: Ints = np.clip(windows // 16, max(1, overlapping // 4), 4 * overlapping)
    return counts


@dataclass(frozen=True)
class Pieces:
    """Pieces of consecutive series.

    Attributes:
        series: The number of each piece's series.
        starts: The number of each piece's first row in its series.
        rows: The number of rows of each piece.
    """

    series: Ints
    starts: Ints
    rows: Ints

    @classmethod
    def of(cls, rows: Ints, length: int, stride: int) -> Pieces:
        """Return the pieces of series of these lengths. Each window lies in exactly one piece."""
        windows = windows_in(rows, length, stride)
        per_piece = piece_windows(windows, length, stride)
        counts = -(-windows // per_piece)
        series = np.repeat(np.arange(len(rows)), counts)
        number = np.arange(len(series)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = number * per_piece[series]
        piece_counts = np.minimum(per_piece[series], windows[series] - first)
        return cls(series, first * stride, (piece_counts - 1) * stride + length)


def checked(schema: pa.Schema, spec: WindowSpec) -> pa.Schema:
    """Return the schema of the pieces of a table that has the schema ``schema``.

    Raises:
        DataError: A column is missing, or has the wrong type or a reserved name.
    """
    wanted = [*spec.keys, spec.order_by, *spec.columns]
    if missing := [name for name in wanted if name not in schema.names]:
        raise DataError(f"Windows: there is no column {missing[0]!r}; expected one of {listed(schema.names)}")
    kind = schema.field(spec.order_by).type
    integer = pa.types.is_integer(kind)
    if not (integer or pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
        raise DataError(f"Windows: order_by={spec.order_by!r} holds {kind}: expected integers, dates or timestamps")
    if spec.every is not None and isinstance(spec.every, timedelta) is integer:
        expected = "an integer" if integer else "a timedelta"
        raise DataError(f"Windows: every={spec.every!r}, but {spec.order_by!r} holds {kind}: expected {expected}")
    for name in spec.columns:
        kind = schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
                or pa.types.is_decimal(kind)):  # fmt: skip
            raise DataError(
                f"Windows: column {name!r} holds {kind}: expected numbers. Next: convert it to numbers first, or "
                "omit it from columns="
            )
    if reserved := {PROBLEM, COUNT}.intersection(wanted):
        raise DataError(f"Windows: column {min(reserved)!r} has a name that is reserved for internal use: rename it")
    return pa.schema(
        [
            *(schema.field(name) for name in spec.keys),
            *(pa.field(name, pa.list_(pa.float32())) for name in spec.columns),
            pa.field(PROBLEM, pa.string()),
            pa.field(COUNT, pa.int64()),
        ],
        metadata={METADATA: spec.to_json()},
    )


def pieces_of_table(table: pa.Table, spec: WindowSpec) -> pa.Table:
    """Return the pieces of the series in a table, whose rows may be in any order.

    Raises:
        DataError: As :func:`checked`.
    """
    schema = checked(table.schema, spec)
    chosen = table.select(list(dict.fromkeys([*spec.keys, spec.order_by, *spec.columns])))
    ordered = chosen.sort_by([(name, "ascending") for name in dict.fromkeys([*spec.keys, spec.order_by])])
    pieces = pieces_of_sorted(ordered.to_batches(max_chunksize=1 << 18), spec)
    return pa.Table.from_batches(pieces, schema.remove_metadata()).replace_schema_metadata(schema.metadata)


def pieces_of_sorted(batches: Iterable[pa.RecordBatch], spec: WindowSpec) -> Iterator[pa.RecordBatch]:
    """Yield the pieces of series whose rows are sorted by key and time. Only one series at a time is in memory."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        if not batch.num_rows:
            continue
        firsts = _firsts(batch, spec.keys)
        if held and len(firsts) == 1 and _key(held[-1], -1, spec) == _key(batch, 0, spec):
            held.append(batch)
            continue
        whole = [*held, batch.slice(0, firsts[-1])]  # all but the last series, which may continue in the next batch
        if any(each.num_rows for each in whole):
            yield from _pieces(whole, spec)
        held = [batch.slice(firsts[-1])]
    if held:
        yield from _pieces(held, spec)


def _key(batch: pa.RecordBatch, row: int, spec: WindowSpec) -> list[Any]:
    return [batch.column(name)[row].as_py() for name in spec.keys]


def _firsts(batch: pa.RecordBatch, keys: Sequence[str]) -> Ints:
    """Return the numbers of the rows with which a new key begins."""
    changes = np.zeros(batch.num_rows, bool)
    changes[:1] = True
    for key in keys:
        codes = batch.column(key).dictionary_encode(null_encoding="encode").indices.to_numpy()
        changes[1:] |= codes[1:] != codes[:-1]
    return np.flatnonzero(changes)


def _pieces(batches: Sequence[pa.RecordBatch], spec: WindowSpec) -> Iterator[pa.RecordBatch]:
    """Yield the pieces and the problems of complete series."""
    batch = single(pa.Table.from_batches(batches))
    firsts = _firsts(batch, spec.keys)
    rows = np.diff(firsts, append=batch.num_rows)
    problems = list(_problems(batch, spec, firsts, rows))
    bad = np.zeros(len(firsts), bool)
    for _, counts in problems:
        bad |= counts > 0
    pieces = Pieces.of(np.where(bad, 0, rows), spec.length, spec.stride)
    values = {name: pc.cast(batch.column(name), pa.float32(), safe=False).to_numpy(False) for name in spec.columns}
    step = max(1, _BATCH_BYTES // (4 * len(values) * max(1, int(pieces.rows.max(initial=1)))))
    for at in range(0, len(pieces.series), step):
        some = slice(at, at + step)
        starts, lengths = firsts[pieces.series[some]] + pieces.starts[some], pieces.rows[some]
        ends = np.cumsum(lengths)
        taken = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        offsets = pa.array(np.concatenate(([0], ends)).astype(np.int32))
        lists = [pa.ListArray.from_arrays(offsets, pa.array(each[taken])) for each in values.values()]
        yield _batch(batch, spec, starts, lists, None, np.zeros(len(starts), np.int64))
    for problem, counts in problems:
        series = np.flatnonzero(counts)
        if len(series):
            nulls = [pa.nulls(len(series), pa.list_(pa.float32()))] * len(values)
            yield _batch(batch, spec, firsts[series], nulls, problem, counts[series])


def _problems(batch: pa.RecordBatch, spec: WindowSpec, firsts: Ints, rows: Ints) -> Iterator[tuple[str, Ints]]:
    """Yield each kind of problem, and its count in each series."""
    yield SHORT, np.where(rows < spec.length, rows, 0)
    for name in dict.fromkeys([spec.order_by, *spec.columns]):
        if batch.column(name).null_count:
            nulls = batch.column(name).is_null().to_numpy(False)
            yield NULL + name, np.add.reduceat(nulls, firsts, dtype=np.int64)
    for name in spec.columns:
        unfit = _unfit(batch.column(name))
        if unfit.any():
            yield UNFIT + name, np.add.reduceat(unfit, firsts, dtype=np.int64)
    times = batch.column(spec.order_by)
    if times.null_count:
        return
    numbers = times if pa.types.is_integer(times.type) else times.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    steps = np.diff(numbers.to_numpy(False).astype(np.int64), prepend=0)
    inside = np.ones(len(steps), bool)
    inside[firsts] = False
    yield REPEATED, np.add.reduceat(inside & (steps == 0), firsts, dtype=np.int64)
    if spec.every is not None:
        every = spec.every // timedelta(microseconds=1) if isinstance(spec.every, timedelta) else spec.every
        yield GAP, np.add.reduceat(inside & (steps != 0) & (steps != every), firsts, dtype=np.int64)


def _unfit(column: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return whether each number of a column is lost in float32: an integer that is rounded, or a number too large."""
    kept = pc.cast(column, pa.float32(), safe=False)
    unfit: np.ndarray[Any, np.dtype[np.bool_]]
    if pa.types.is_integer(column.type):
        before, after = (pc.fill_null(each, 0).to_numpy(False) for each in (column, kept))
        unfit = np.abs(after) >= 2**24
        unfit[unfit] = [int(one) != int(other) for one, other in zip(after[unfit], before[unfit], strict=True)]
        return unfit
    overflow = pc.and_(pc.is_finite(pc.cast(column, pa.float64())), pc.is_inf(kept))
    unfit = pc.fill_null(overflow, False).to_numpy(False)
    return unfit


def _batch(
    batch: pa.RecordBatch, spec: WindowSpec, at: Ints, lists: list[pa.Array], problem: str | None, counts: Ints
) -> pa.RecordBatch:
    keys = [batch.column(name).take(pa.array(at)) for name in spec.keys]
    problems = pa.array([problem] * len(at), pa.string())
    names = [*spec.keys, *spec.columns, PROBLEM, COUNT]
    return pa.RecordBatch.from_arrays([*keys, *lists, problems, pa.array(counts)], names=names)
