"""Keeps rows as blocks of tensors, from which batches for models are cut."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from spark_hvd.data.readers.batches import Blocks, Layout, RowShapes, cut
from spark_hvd.data.readers.forms import Form, Window
from spark_hvd.data.readers.reader import Batch, ReaderSpec
from spark_hvd.data.readers.values import Values, columns_yielded
from spark_hvd.data.readers.windows import Round, whole_rows

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Itemsize of a dtype -> integer dtype of that size, because numpy lacks some dtypes of torch."""


class TensorForm(Form[Blocks, Batch]):
    """Keeps the rows that ``spec`` describes as blocks, after its decoders and ``transformation_fn`` if it has any.

    Raises:
        DataError: A column is not in the data set.
    """

    def __init__(self, spec: ReaderSpec) -> None:
        self._layout = Layout(columns_yielded(spec), spec.stack)
        self._values = Values(spec, self._layout)
        self._shapes = RowShapes(self._layout)

    def of(self, table: pa.Table, where: str) -> Blocks:
        blocks = self._values.blocks_of(table, where)
        self._shapes.check(blocks, where)
        return blocks

    def part(self, rows: Blocks, start: int, stop: int) -> Blocks:
        return [block[start:stop] for block in rows]

    def row_bytes(self, table: pa.Table | None, where: str) -> int | None:
        columns = self._layout.columns
        if all(column.shape is not None and hasattr(torch, column.dtype) for column in columns):
            sizes = [int(getattr(torch, each.dtype).itemsize) for each in columns]
            return sum(size * math.prod(each.shape or ()) for size, each in zip(sizes, columns, strict=True))
        if self._shapes.known is None and table is not None:
            self.of(table.slice(0, 1), where)
        return self._shapes.row_bytes

    def window(self, round_: Round) -> RowWindow:
        return RowWindow(round_)

    def cut(self, parts: Iterator[Blocks], sizes: Sequence[int]) -> Iterator[Batch]:
        return cut(parts, self._layout, sizes)

    def kept(self, rows: Blocks) -> Blocks:
        return [block.clone() for block in rows]


class RowWindow(Window[list[Any]]):
    """Memory for the rows that a rank takes in a round, as tensors or numpy arrays, which several threads fill."""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._lock = threading.Lock()
        self._places = np.empty(0, np.int64)
        self._blocks: list[Any] = []
        self._rows: list[Any] = []

    def put(self, number: int, rows: list[Any]) -> None:
        with self._lock:
            if not self._blocks:  # the shapes of the columns are only known now
                self._places = self._round.places()
                self._blocks = [_empty(block, self._round.rows) for block in rows]
                self._rows = [_as_rows(block) if block.nbytes else None for block in self._blocks]
        end = self._round.ends[number]
        places = self._places[end - len(rows[0]) : end]
        taken: Any = slice(None)
        if self._round.rows < len(self._places):
            taken = np.flatnonzero(places >= 0)
            places = places[taken]
        for into, block in zip(self._rows, rows, strict=True):
            if not block.nbytes:
                continue
            values = _as_rows(block)[taken]
            if values.dtype.kind == "V":
                into.put(places, values, mode="clip")  # mode "raise" would copy the values once more
            else:
                into[places] = values  # twice as fast for one number per row, but slower for "V"

    def take(self) -> list[Any]:
        blocks, self._blocks, self._rows = self._blocks, [], []
        return blocks


def _empty(like: Any, rows: int) -> Any:
    shape = (rows, *like.shape[1:])
    if not isinstance(like, torch.Tensor):
        return np.empty(shape, like.dtype)
    # Numpy, unlike torch, requests huge pages, with which scattering rows takes half the time.
    return torch.from_numpy(np.empty(shape, f"i{like.itemsize}")).view(like.dtype)


def _as_rows(block: Any) -> np.ndarray[Any, Any]:
    if isinstance(block, torch.Tensor):  # torch would start a team of threads in each reading thread, so use numpy
        block = block.view(_BITS[block.itemsize]).numpy()
    return whole_rows(block if block.flags.c_contiguous else block.copy())
