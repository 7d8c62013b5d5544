"""Batches are slices of a few tensors: scalar columns of one dtype lie side by side in one matrix.

A batch of 21 columns then costs two slices, not 21. Its columns are made when they are asked for, and columns that lie
side by side are handed out as the matrix that they already are.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from spark_hvd.estimators.errors import DataError
from spark_hvd.estimators.readers.dataset import Column
from spark_hvd.estimators.readers.tensors import to_tensor

Blocks = list[torch.Tensor]
"""The columns of some rows as a :class:`Layout` lays them out: first its matrices, then the columns that lie alone."""


class Layout:
    """Where each column lies among the blocks. Scalars of one dtype share a matrix; every other column lies alone.

    Attributes:
        columns: In the order of the batch.
        matrices: The columns of each matrix, from left to right.
        alone: The columns with blocks of their own, after the matrices.
        matrix_names: Names of the columns of each matrix.
        names: Of ``columns``.
        order: For each of ``columns`` its number, counted over matrices and what lies alone.
        places: Name -> (number of the block, column in the matrix, or -1 for the block itself).
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        by_dtype: dict[str, list[Column]] = {}
        for column in columns:
            if _is_scalar(column):
                by_dtype.setdefault(column.dtype, []).append(column)
        self.matrices = [tuple(group) for group in by_dtype.values() if len(group) > 1]
        shared = {column.name for group in self.matrices for column in group}
        self.alone = [column for column in columns if column.name not in shared]
        self.places = {
            column.name: (block, at) for block, group in enumerate(self.matrices) for at, column in enumerate(group)
        }
        self.places |= {column.name: (len(self.matrices) + at, -1) for at, column in enumerate(self.alone)}
        flat = itertools.chain(*self.matrices, self.alone)
        numbers = {column.name: number for number, column in enumerate(flat)}
        self.matrix_names = [tuple(column.name for column in group) for group in self.matrices]
        self.names = tuple(column.name for column in self.columns)
        self.order = [numbers[name] for name in self.names]
        self._runs: dict[tuple[str, ...], tuple[int, int] | None] = {}
        self._uniform: dict[int, pa.Schema] = {}

    def blocks_of(self, table: pa.Table, where: str) -> Blocks:
        """The blocks of a table that has all the columns.

        Raises:
            DataError: as :func:`~spark_hvd.estimators.readers.tensors.to_tensor`.
        """
        matrices = [self._matrix(table, number, where) for number in range(len(self.matrices))]
        return matrices + [to_tensor(table.column(column.name), column, where) for column in self.alone]

    def blocks_of_tensors(self, tensors: dict[str, torch.Tensor]) -> Blocks:
        """The blocks of columns that are tensors already."""
        matrices = [torch.stack([tensors[column.name] for column in group], 1) for group in self.matrices]
        return matrices + [tensors[column.name] for column in self.alone]

    def _matrix(self, table: pa.Table, number: int, where: str) -> torch.Tensor:
        """The columns of matrix ``number``, of shape (rows, columns)."""
        batches = table.select(self.matrix_names[number]).to_batches()
        if len(batches) == 1 and self._is_uniform(number, batches[0].schema):
            with contextlib.suppress(pa.ArrowException):  # nulls, which to_tensor explains better
                return torch.from_numpy(batches[0].to_tensor().to_numpy())
        columns = [to_tensor(table.column(column.name), column, where) for column in self.matrices[number]]
        return torch.stack(columns, 1)

    def _is_uniform(self, number: int, schema: pa.Schema) -> bool:
        """Whether all columns of matrix ``number`` have the dtype asked for; that of the last schema is remembered."""
        known = self._uniform.get(number)
        if known is not None and known.equals(schema):
            return True
        kind, dtype = schema.types[0], self.matrices[number][0].dtype
        uniform = set(schema.types) == {kind} and np.dtype(kind.to_pandas_dtype()).name == dtype
        if uniform and dtype != "bool":  # one bit each in Arrow
            self._uniform[number] = schema
            return True
        return False

    def run(self, names: tuple[str, ...]) -> tuple[int, int] | None:
        """The block and the first column where ``names`` lie side by side in this order; None if they do not."""
        if names not in self._runs:
            places = [self.places[name] for name in names]
            block, first = places[0]
            together = first >= 0 and places == [(block, first + at) for at in range(len(names))]
            self._runs[names] = (block, first) if together else None
        return self._runs[names]


class RowShapes:
    """Dtype and shape of a row of each block. All row groups must have the same; within one, rows are alike.

    Args:
        layout: Of the blocks.

    Attributes:
        known: Of the first row group that was looked at; None before.
    """

    def __init__(self, layout: Layout) -> None:
        self.known: list[tuple[torch.dtype, torch.Size]] | None = None
        self._layout = layout
        self._lock = threading.Lock()

    def check(self, blocks: Blocks, where: str) -> None:
        """Look at the blocks of a row group; from any thread.

        Raises:
            DataError: rows differ from those of the first row group.
        """
        found = [(block.dtype, block.shape[1:]) for block in blocks]
        with self._lock:
            self.known = self.known or found
        if found == self.known:
            return
        for column, (block, _) in self._layout.places.items():
            mine, first = found[block], self.known[block]
            if mine != first:
                raise DataError(
                    f"column {column!r} in {where} has rows of shape {tuple(mine[1])} and {mine[0]}, where a row group "
                    f"before has {tuple(first[1])} and {first[0]}: make them alike before fit"
                )


class ColumnBatch(dict[str, torch.Tensor]):
    """A batch: column name -> tensor of shape (rows, then the shape of the column).

    A dict in every respect; ``ColumnBatch({"x": x})`` makes one of any tensors. One that a reader made holds blocks of
    columns at first, and makes the tensor of a column when it is asked for. These tensors are views: changing one in
    place shows in :meth:`stack`, and in nothing of any other batch. Pickled, it becomes a plain dict.
    """

    __slots__ = ("_blocks", "_layout")
    _blocks: Sequence[torch.Tensor]
    _layout: Layout | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._layout, self._blocks = None, ()

    @classmethod
    def of_blocks(cls, layout: Layout, blocks: Sequence[torch.Tensor]) -> ColumnBatch:
        """The batch of all the rows of ``blocks``."""
        batch = cls.__new__(cls)
        batch._layout = layout
        batch._blocks = blocks
        return batch

    def stack(self, names: Sequence[str]) -> torch.Tensor:
        """The numbers of some columns side by side, in this order: a tensor of shape (rows, numbers in a row).

        Without a copy where the columns lie so, that is for scalars of one dtype in the order of the reader's columns,
        and for one column alone. Otherwise the dtypes are promoted to one that holds all.
        """
        names = tuple(names)
        if self._layout is not None and (run := self._layout.run(names)) is not None:
            block = self._blocks[run[0]]
            return block if len(names) == block.shape[1] else block.narrow(1, run[1], len(names))
        parts = [self[name] for name in names]
        parts = [part.reshape(len(part), math.prod(part.shape[1:])) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ColumnBatch:
        """The batch on ``device``; one transfer a block, not one a column."""
        if self._layout is None:
            return ColumnBatch({name: each.to(device, non_blocking=non_blocking) for name, each in self.items()})
        moved = [block.to(device, non_blocking=non_blocking) for block in self._blocks]
        return ColumnBatch.of_blocks(self._layout, moved)

    def __missing__(self, name: str) -> torch.Tensor:
        if self._layout is None:
            raise KeyError(name)
        number, at = self._layout.places[name]
        block = self._blocks[number]
        if at < 0:
            dict.__setitem__(self, name, block)
            return block
        columns = block.unbind(1)  # all at once: whoever wants one column mostly wants the others too
        dict.update(self, zip(self._layout.matrix_names[number], columns, strict=True))
        return columns[at]

    def __len__(self) -> int:
        return super().__len__() if self._layout is None else len(self._layout.columns)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) if self._layout is None else name in self._layout.places

    def get(self, name: str, default: Any = None) -> Any:
        """The column, or ``default`` if there is none."""
        return self[name] if name in self else default  # noqa: SIM401 - it is what get does

    def __reduce__(self) -> tuple[type[dict[str, torch.Tensor]], tuple[dict[str, torch.Tensor]]]:
        # Clones, because a view pickles with all the memory that it is a view of.
        return dict, ({name: each.clone() for name, each in self.items()},)

    def _settle(self) -> None:
        """Make all columns, in order, and forget the blocks: from now on a plain dict."""
        layout = self._layout
        if layout is None:
            return
        tensors: list[torch.Tensor] = []
        for block in self._blocks[: len(layout.matrices)]:
            tensors += block.unbind(1)
        tensors += self._blocks[len(layout.matrices) :]
        self._layout, self._blocks = None, ()
        super().clear()
        super().update(zip(layout.names, [tensors[at] for at in layout.order], strict=True))


def _settling(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: ColumnBatch, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        return method(self, *args, **kwargs)

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call


for _name in (
    *("__iter__", "__reversed__", "__eq__", "__ne__", "__repr__", "__or__", "__ror__", "__ior__", "__setitem__"),
    *("__delitem__", "keys", "values", "items", "copy", "pop", "popitem", "setdefault", "update", "clear"),
):  # what sees or changes the dict as a whole
    setattr(ColumnBatch, _name, _settling(getattr(dict, _name)))


def cut(parts: Iterator[Blocks], layout: Layout, sizes: Sequence[int]) -> Iterator[ColumnBatch]:
    """Cut rows that come in parts of any length into batches of ``sizes`` rows; all but the last are of one size.

    Batches inside a part are views of it. What is left of a part is copied, so that the memory of the part is free
    before the next one is asked for.
    """
    held: list[Blocks] = []  # `have` rows, too few for a batch
    step, have = 0, 0
    while step < len(sizes):
        blocks = next(parts)
        rows, at = len(blocks[0]), 0
        if held:
            at = min(sizes[step] - have, rows)
            held.append([block[:at] for block in blocks])
            have += at
            if have < sizes[step]:
                continue
            first = [torch.cat(each) for each in zip(*held, strict=True)]
            held, have = [], 0
            yield ColumnBatch.of_blocks(layout, first)
            step += 1
        whole = min((rows - at) // sizes[0], len(sizes) - 1 - step)
        if whole > 0:
            # One call of torch cuts all of them: a slice apiece would cost twice the time.
            slices = [block.narrow(0, at, whole * sizes[0]).split(sizes[0]) for block in blocks]  # type: ignore[no-untyped-call]
            for each in zip(*slices, strict=True):
                yield ColumnBatch.of_blocks(layout, each)
            del slices, each
            step, at = step + whole, at + whole * sizes[0]
        if step == len(sizes) - 1 and rows - at >= sizes[step]:
            yield ColumnBatch.of_blocks(layout, [block.narrow(0, at, sizes[step]) for block in blocks])
            return
        if at < rows:
            held, have = [[block[at:].clone() if at else block for block in blocks]], rows - at
        del blocks


def _is_scalar(column: Column) -> bool:
    return column.shape == () and column.encoding == "plain" and column.dtype != "object"
