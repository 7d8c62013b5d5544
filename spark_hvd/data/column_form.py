"""Batches as dicts of columns. Array columns are converted as they are read, the others once a batch is cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import torch

from spark_hvd.data.columns import ONE_LENGTH, Features, is_array_like, stacks_of
from spark_hvd.data.packed import PackedRows
from spark_hvd.data.readers.batches import Layout, cut
from spark_hvd.data.readers.blocks import RowWindow
from spark_hvd.data.readers.dataset import Column
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
        layout: Tells which block holds each array.
        blocks: Array columns and stacks, already converted.
        others: The other columns, not yet converted.
    """

    rows: int
    names: Sequence[str]
    layout: Layout
    blocks: list[Any]
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
        self._layout: Layout | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._convert, self._features, self._concatenate = convert, features, concatenate

    def of(self, table: pa.Table, where: str) -> Part:
        return self.of_batch(single(self._tables.of(table, where)), where)

    def of_batch(self, batch: pa.RecordBatch | PackedRows, where: str) -> Part:
        """Do what :meth:`of` does, for rows in one piece."""
        stacks = stacks_of(batch, self._features)
        stacked = {name for names in stacks.values() for name in names}
        converted = [field.name for field in batch.schema if field.name in stacked or is_array_like(field.type)]
        layout = self._layout = self._layout or _layout_of(batch.select(converted).schema, stacks)
        together: Mapping[Any, Sequence[str]] = {**stacks, **{names: names for names in layout.matrix_names}}
        arrays: dict[Any, Any] = self._convert(batch.select(converted), together) if converted else {}
        for name, array in arrays.items():
            shape, before = tuple(array.shape[1:]), self._shapes.setdefault(name, tuple(array.shape[1:]))
            if shape != before:
                raise DataError(
                    f"column {name!r} has arrays of shape {shape} in {where}, but {before} before: {ONE_LENGTH}"
                )
        return Part(
            rows=batch.num_rows,
            names=[*stacks, *(name for name in batch.schema.names if name not in stacked)],
            layout=layout,
            blocks=[arrays[each] for each in (*layout.matrix_names, *(column.name for column in layout.alone))],
            others=table_of(batch.select([name for name in batch.schema.names if name not in converted])),
        )

    def part(self, rows: Part, start: int, stop: int) -> Part:
        blocks = [block[start:stop] for block in rows.blocks]
        return replace(rows, rows=stop - start, blocks=blocks, others=rows.others.slice(start, stop - start))

    def row_bytes(self, table: pa.Table | None, where: str) -> int | None:
        return self._tables.row_bytes(table, where)

    def window(self, round_: Round) -> _PartWindow:
        return _PartWindow(round_)

    def cut(self, parts: Iterator[Part], sizes: Sequence[int]) -> Iterator[Columns]:
        first = next(parts)
        layout, others = first.layout, first.others.num_columns
        parts = itertools.chain([first], parts)
        if not others and all(isinstance(block, torch.Tensor) for block in first.blocks):
            del first  # frees its memory before the next part is read
            yield from cut((part.blocks for part in parts), layout, sizes)
            return
        for pieces in pieces_of(parts, sizes):
            first = pieces[0][0]
            cuts = [[part.blocks[at][start:stop] for part, start, stop in pieces] for at in range(len(first.blocks))]
            blocks = [each[0] if len(each) == 1 else self._concatenate(each) for each in cuts]
            columns = dict(zip(layout.names, map(_apart, layout.columns_of(blocks)), strict=True))
            if first.others.num_columns:
                others = [part.others.slice(start, stop - start) for part, start, stop in pieces]
                columns |= self._convert(single(pa.concat_tables(others)), None)
                columns = {name: columns[name] for name in first.names}
            yield columns

    def kept(self, rows: Part) -> Part:
        # Copying a slice of a tensor deeply would copy its whole storage.
        copies = [block.clone() if isinstance(block, torch.Tensor) else block.copy() for block in rows.blocks]
        return replace(rows, blocks=copies)


def _layout_of(schema: pa.Schema, stacks: Mapping[str, Sequence[str]]) -> Layout:
    """Return the layout of stacks and arrays, in which columns of numbers of one type lie side by side."""
    stacked = {name for names in stacks.values() for name in names}
    columns = [Column(name, "", None) for name in stacks]
    for field in schema:
        number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        columns += [Column(field.name, str(field.type), () if number else None)] * (field.name not in stacked)
    return Layout(columns)


def _apart(array: Any) -> Any:
    """Split a tensor off its batch, so that gradients and changes in place stay in it."""
    return array.unsafe_split_with_sizes([len(array)])[0] if isinstance(array, torch.Tensor) else array


def table_of(batch: pa.RecordBatch | PackedRows) -> pa.Table:
    """Return the rows as an Arrow table in one piece."""
    return pa.Table.from_batches([batch.batch() if isinstance(batch, PackedRows) else batch])


class _PartWindow(Window[Part]):
    """Collects the rows of a round for a :class:`ColumnForm`."""

    def __init__(self, round_: Round) -> None:
        self._blocks, self._others = RowWindow(round_), TableWindow(round_)
        self._rows = round_.rows

    def put(self, number: int, rows: Part) -> None:
        self._last = rows
        if rows.blocks:
            self._blocks.put(number, rows.blocks)
        if rows.others.num_columns:
            self._others.put(number, rows.others)

    def take(self) -> Part:
        last = self._last
        others = self._others.take() if last.others.num_columns else last.others
        return replace(last, rows=self._rows, blocks=self._blocks.take(), others=others)
