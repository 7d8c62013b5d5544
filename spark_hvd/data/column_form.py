"""Batches as dicts of columns. Array columns are converted as they are read, the others once a batch is cut."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch

from spark_hvd.data.columns import ONE_LENGTH, Features, is_array_like, stacks_of
from spark_hvd.data.packed import PackedRows
from spark_hvd.data.readers.batches import cut_rows
from spark_hvd.data.readers.blocks import RowWindow
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import Form, TableForm, TableWindow, Window, pieces_of, single
from spark_hvd.data.readers.windows import Round

Columns = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Rows that were read together.

    Attributes:
        rows: Number of rows.
        names: Names of the entries of a batch, in order.
        arrays: Array columns and stacks, already converted.
        others: The other columns, not yet converted.
    """

    rows: int
    names: Sequence[str]
    arrays: Columns
    others: pa.Table

    def __len__(self) -> int:
        return self.rows


class ColumnForm(Form[Part, Columns]):
    """Makes batches of numpy arrays or tensors. ``concatenate`` joins arrays of the kind that ``convert`` makes."""

    def __init__(
        self,
        convert: Callable[[pa.RecordBatch | PackedRows, Features | None], Columns],
        features: Features | None,
        concatenate: Callable[[list[Any]], Any],
    ) -> None:
        self._tables = TableForm()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._convert, self._features, self._concatenate = convert, features, concatenate

    def of(self, table: pa.Table, where: str) -> Part:
        return self.of_batch(single(self._tables.of(table, where)), where)

    def of_batch(self, batch: pa.RecordBatch | PackedRows, where: str) -> Part:
        """Do what :meth:`of` does, for rows in one piece."""
        stacks = stacks_of(batch, self._features)
        stacked = {name for names in stacks.values() for name in names}
        converted = [field.name for field in batch.schema if field.name in stacked or is_array_like(field.type)]
        arrays = self._convert(batch.select(converted), self._features) if converted else {}
        for name, array in arrays.items():
            shape, before = tuple(array.shape[1:]), self._shapes.setdefault(name, tuple(array.shape[1:]))
            if shape != before:
                raise DataError(
                    f"column {name!r} has arrays of shape {shape} in {where}, but {before} before: {ONE_LENGTH}"
                )
        return Part(
            rows=batch.num_rows,
            names=[*stacks, *(name for name in batch.schema.names if name not in stacked)],
            arrays=arrays,
            others=table_of(batch.select([name for name in batch.schema.names if name not in converted])),
        )

    def row_bytes(self, table: pa.Table | None, where: str) -> int | None:
        return self._tables.row_bytes(table, where)

    def window(self, round_: Round) -> _PartWindow:
        return _PartWindow(round_)

    def cut(self, parts: Iterator[Part], sizes: Sequence[int]) -> Iterator[Columns]:
        first = next(parts)
        names, others = [*first.arrays], first.others.num_columns
        parts = itertools.chain([first], parts)
        if not others and all(isinstance(array, torch.Tensor) for array in first.arrays.values()):
            del first  # frees its memory before the next part is read
            for tensors in cut_rows(([*part.arrays.values()] for part in parts), sizes):
                yield dict(zip(names, tensors, strict=True))
            return
        for pieces in pieces_of(parts, sizes):
            first = pieces[0][0]
            columns: Columns = {}
            for name in first.arrays:
                arrays = [part.arrays[name][start:stop] for part, start, stop in pieces]
                array = arrays[0] if len(arrays) == 1 else self._concatenate(arrays)
                if isinstance(array, torch.Tensor):  # split, so that gradients and changes in place stay in this batch
                    array = array.unsafe_split_with_sizes([len(array)])[0]
                columns[name] = array
            if first.others.num_columns:
                others = [part.others.slice(start, stop - start) for part, start, stop in pieces]
                columns |= self._convert(single(pa.concat_tables(others)), None)
                columns = {name: columns[name] for name in first.names}
            yield columns

    def kept(self, rows: Part) -> Part:
        return copy.deepcopy(rows)


def table_of(batch: pa.RecordBatch | PackedRows) -> pa.Table:
    """Return the rows as an Arrow table in one piece."""
    return pa.Table.from_batches([batch.batch() if isinstance(batch, PackedRows) else batch])


class _PartWindow(Window[Part]):
    """Collects the rows of a round for a :class:`ColumnForm`."""

    def __init__(self, round_: Round) -> None:
        self._arrays, self._others = RowWindow(round_), TableWindow(round_)
        self._rows = round_.rows

    def put(self, number: int, rows: Part) -> None:
        self._last = rows
        if rows.arrays:
            self._arrays.put(number, list(rows.arrays.values()))
        if rows.others.num_columns:
            self._others.put(number, rows.others)

    def take(self) -> Part:
        last = self._last
        arrays = dict(zip(last.arrays, self._arrays.take(), strict=True))
        others = self._others.take() if last.others.num_columns else last.others
        return Part(self._rows, last.names, arrays, others)
