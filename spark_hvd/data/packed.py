"""Columns of numbers side by side, so that a row of them is stored, moved and passed to a model as one run of memory.

In Arrow, each column is separate, so twenty values of a row are in twenty places in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from spark_hvd.data.readers.forms import single
from spark_hvd.data.readers.sharding import Ints
from spark_hvd.data.readers.windows import whole_rows

Matrix = np.ndarray[Any, Any]
"""Columns of one type, (rows, columns)."""

Rows = tuple[pa.RecordBatch, Ints | None]
"""A batch, packed or not, and the numbers of the rows to use; None for all."""

_COLUMNS = b"spark_hvd.columns"
"""Metadata key of a field of fixed-size lists; the value is the names of the packed columns."""


@dataclass(frozen=True)
class PackedRows:
    """The rows of a record batch, some of whose columns are stored side by side.

    ``matrices`` maps the names of packed columns to their matrix; ``plain`` has the other columns in any order.
    """

    schema: pa.Schema
    num_rows: int
    matrices: Mapping[tuple[str, ...], Matrix]
    plain: pa.RecordBatch

    def select(self, names: Sequence[str]) -> PackedRows:
        """Return some of the columns, in this order."""
        return replace(self, schema=pa.schema([self.schema.field(name) for name in names]))

    @cached_property
    def _places(self) -> dict[str, tuple[tuple[str, ...], int]]:
        """Name of a packed column -> the columns of its matrix, and its place among them."""
        return {name: (columns, place) for columns in self.matrices for place, name in enumerate(columns)}

    def numbers(self, names: Sequence[str]) -> Matrix | None:
        """Return columns of one type, (rows, columns), writable; None if they are not in one matrix."""
        places = [self._places.get(name) for name in names]
        first = places[0]
        if first is None or any(place is None or place[0] is not first[0] for place in places):
            return None
        matrix = self.matrices[first[0]]
        if first[0] == tuple(names):
            return matrix
        return np.ascontiguousarray(matrix[:, [self._places[name][1] for name in names]])

    def column(self, name: str) -> pa.Array:
        """Return a column as an Arrow array."""
        numbers = self.numbers([name])
        return self.plain.column(name) if numbers is None else pa.array(numbers[:, 0])

    def batch(self) -> pa.RecordBatch:
        """Return the rows as an Arrow record batch."""
        return pa.RecordBatch.from_arrays([self.column(name) for name in self.schema.names], schema=self.schema)


def pack(batch: pa.RecordBatch, apart: str) -> pa.RecordBatch:
    """Pack columns of numbers without nulls into one column of lists per type, except the column ``apart``."""
    kinds: dict[pa.DataType, list[str]] = {}
    for field, column in zip(batch.schema, batch.columns, strict=True):
        number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        if number and not column.null_count and field.name != apart:
            kinds.setdefault(field.type, []).append(field.name)
    fields, columns = [], []
    for kind, names in kinds.items():
        fields.append(pa.field(names[0], pa.list_(kind, len(names)), metadata={_COLUMNS: json.dumps(names)}))
        columns.append(_lists(batch.select(names).to_tensor().to_numpy()))
    packed = {name for names in kinds.values() for name in names}
    rest = [name for name in batch.schema.names if name not in packed]
    schema = pa.schema([*fields, *(batch.schema.field(name) for name in rest)])
    return pa.RecordBatch.from_arrays([*columns, *(batch.column(name) for name in rest)], schema=schema)


def ordered(batch: pa.RecordBatch, order: Ints) -> pa.RecordBatch:
    """Return the rows of a result of :func:`pack` in this order."""
    columns = [
        _lists(_rows_taken([(_matrix(column), None)], order)) if _packed_in(field) else column.take(order)
        for field, column in zip(batch.schema, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def taken(parts: Sequence[Rows], order: Ints, schema: pa.Schema) -> PackedRows:
    """Return some columns of the rows of several batches, in this order; packed like the batches."""
    matrices = [{_packed_in(field): at for at, field in enumerate(batch.schema)} for batch, _ in parts]
    for each in matrices:
        each.pop((), None)
    packed = {}
    for columns in matrices[0]:
        if all(columns in each for each in matrices) and not set(columns).isdisjoint(schema.names):
            numbers = [
                (_matrix(batch.column(each[columns])), at) for (batch, at), each in zip(parts, matrices, strict=True)
            ]
            packed[columns] = _rows_taken(numbers, order)
    done = {name for columns in packed for name in columns}
    rest = pa.schema([field for field in schema if field.name not in done])
    plain = pa.RecordBatch.from_pylist([], schema=rest)
    if rest.names:
        plain = single(pa.Table.from_batches([unpack(batch, at, rest) for batch, at in parts])).take(order)
    return PackedRows(schema, len(order), packed, plain)


def unpack(batch: pa.RecordBatch, at: Ints | None, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows of a batch, packed or not, as a plain record batch; ``at`` are their numbers, None for all."""
    found: dict[str, pa.Array] = {}
    wanted = set(schema.names)
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if names := _packed_in(field):
            matrix = _matrix(column)
            for number, name in enumerate(names):
                if name in wanted:
                    found[name] = pa.array(matrix[slice(None) if at is None else at, number])
        elif field.name in wanted:
            found[field.name] = column if at is None else column.take(at)
    return pa.RecordBatch.from_arrays([found[name] for name in schema.names], schema=schema)


def _packed_in(field: pa.Field) -> tuple[str, ...]:
    """Return the columns in a packed column; an empty tuple for a user's column."""
    return tuple(json.loads((field.metadata or {}).get(_COLUMNS, "[]")))


def _lists(matrix: Matrix) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), matrix.shape[1])


def _matrix(lists: pa.Array) -> Matrix:
    """Return the content of a packed column as a view of its memory."""
    values: Matrix = lists.values.to_numpy().reshape(-1, lists.type.list_size)
    return values[lists.offset : lists.offset + len(lists)]


def _rows_taken(parts: Sequence[tuple[Matrix, Ints | None]], order: Ints) -> Matrix:
    """Return the chosen rows of each matrix, or all of them, in one matrix and in this order."""
    matrix, at = parts[0]
    if len(parts) > 1:
        ends = np.cumsum([len(each if at is None else at) for each, at in parts])
        joined = np.empty((ends[-1], matrix.shape[1]), matrix.dtype)
        for (each, at), end in zip(parts, ends, strict=True):
            at = np.arange(len(each)) if at is None else at
            _take(each, at, joined[end - len(at) : end])
        matrix, at = joined, None
    found = np.empty((len(order), matrix.shape[1]), matrix.dtype)
    _take(matrix, order if at is None else at[order], found)
    return found


def _take(matrix: Matrix, rows: Ints, into: Matrix) -> None:
    """Take rows with numpy, not Arrow: numpy asks for huge pages, in which rows are found in half the time."""
    whole_rows(matrix).take(rows, out=whole_rows(into), mode="clip")  # mode "raise" would copy them once more
