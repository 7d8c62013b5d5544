"""Batches as dicts of columns: what becomes arrays is converted a window at a time and cut, all else by the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from spark_hvd.data.columns import Features, is_array_like, stacks_of
from spark_hvd.data.readers.forms import TablesForm, pieces_of, single

Columns = dict[str, Any]


class ColumnForm(TablesForm[Columns]):
    """Batches as numpy arrays or tensors.

    Args:
        convert: :func:`~spark_hvd.data.columns.numpy_batch` or :func:`~spark_hvd.data.columns.torch_batch`.
        features: What is stacked.
        concatenate: Joins arrays of the kind that ``convert`` makes.
    """

    def __init__(
        self,
        convert: Callable[[pa.RecordBatch, Features | None], Columns],
        features: Features | None,
        concatenate: Callable[[list[Any]], Any],
    ) -> None:
        super().__init__()
        self._convert, self._features, self._concatenate = convert, features, concatenate

    def cut(self, parts: Iterator[pa.Table], sizes: Sequence[int]) -> Iterator[Columns]:
        """See base class."""
        for pieces in pieces_of(map(self._part, parts), sizes):
            first = pieces[0][0]
            found: Columns = {}
            for name in first.arrays:
                arrays = [part.arrays[name][start:stop] for part, start, stop in pieces]
                found[name] = arrays[0] if len(arrays) == 1 else self._concatenate(arrays)
            if first.others.num_columns:
                others = [
                    pa.Table.from_batches([part.others.slice(start, stop - start)]) for part, start, stop in pieces
                ]
                found |= self._convert(single(pa.concat_tables(others)), None)
                found = {name: found[name] for name in first.names}
            yield found

    def _part(self, table: pa.Table) -> _Part:
        return _Part(single(table), self._convert, self._features)


class _Part:
    """Rows that were read together.

    Attributes:
        names: Of what is in a batch, in order.
        arrays: Of all rows.
        others: Columns that are no arrays.
    """

    def __init__(self, batch: pa.RecordBatch, convert: Callable[..., Columns], features: Features | None) -> None:
        stacks = stacks_of(batch, features)
        stacked = {name for names in stacks.values() for name in names}
        early = [each.name for each in batch.schema if each.name in stacked or is_array_like(each.type)]
        self._rows: int = batch.num_rows
        self.names = [*stacks, *(name for name in batch.schema.names if name not in stacked)]
        self.arrays = convert(batch.select(early), features) if early else {}
        self.others = batch.select([name for name in batch.schema.names if name not in early])

    def __len__(self) -> int:
        return self._rows
