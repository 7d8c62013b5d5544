"""Cuts batches out of a few tensors. Scalar columns of one dtype are stored side by side in one matrix.

Shuffling or copying rows of 21 columns then takes two calls rather than 21. A batch has one view per column, or a
single view of all columns that a model takes side by side.
"""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import torch

from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import matrix_of
from spark_hvd.data.readers.reader import Batch
from spark_hvd.data.readers.tensors import to_tensor

Blocks = list[torch.Tensor]
"""The columns of some rows, as a :class:`Layout` arranges them: first its matrices, then the single columns."""

STACK = "features"
"""Name of the tensor of a batch that holds several columns side by side."""

TENSORS = 512
"""Number of tensors that are cut at once. After 700 new objects, Python collects garbage, which takes longer than
cutting in smaller steps."""


class Layout:
    """Tells which block holds each column. Scalars of one dtype share a matrix; each other column has its own block.

    Args:
        columns: In the order of the batch.
        stack: Names of columns that a batch has as one tensor, :data:`STACK`, in this order. It has one tensor per
            column if they are not several scalars of one dtype, or if a column has that name.

    Attributes:
        columns: The columns.
        stacked: Whether the first matrix is the stack, which is not split into columns.
        matrices: The columns of each matrix, from left to right.
        alone: The columns with their own blocks, which follow the matrices.
        names: Names of the tensors of a batch, in its order.
        order: The number of each of ``names``, counted over the matrices and then over ``alone``.
        block_numbers: Column name -> number of its block.
    """

    def __init__(self, columns: Sequence[Column], stack: Sequence[str] = ()) -> None:
        self.columns = tuple(columns)
        known = {column.name: column for column in columns}
        together = tuple(known[name] for name in stack)
        alike = len({column.dtype for column in together}) == 1 and all(map(_is_scalar, together))
        self.stacked = len(together) > 1 and alike and STACK not in known
        inside = set(stack) if self.stacked else set()
        by_dtype: dict[str, list[Column]] = {}
        for column in columns:
            if _is_scalar(column) and column.name not in inside:
                by_dtype.setdefault(column.dtype, []).append(column)
        self.matrices = [together] * self.stacked + [tuple(group) for group in by_dtype.values() if len(group) > 1]
        shared = {column.name for group in self.matrices for column in group}
        self.alone = [column for column in columns if column.name not in shared]
        blocks = (*self.matrices, *((column,) for column in self.alone))
        self.block_numbers = {column.name: number for number, block in enumerate(blocks) for column in block}
        self.matrix_names = [tuple(column.name for column in group) for group in self.matrices]
        tensors = dict.fromkeys(STACK if name in inside else name for name in self.block_numbers)
        numbers = {name: number for number, name in enumerate(tensors)}
        self.names = tuple(dict.fromkeys(STACK if name in inside else name for name in known))
        self.order = [numbers[name] for name in self.names]

    def blocks_of(self, table: pa.Table, where: str) -> Blocks:
        """Return the blocks of a table that has all the columns.

        Raises:
            DataError: As :func:`~spark_hvd.data.readers.tensors.to_tensor`.
        """
        matrices = [self._matrix(table, number, where) for number in range(len(self.matrices))]
        return matrices + [to_tensor(table.column(column.name), column, where) for column in self.alone]

    def blocks_of_tensors(self, tensors: dict[str, torch.Tensor]) -> Blocks:
        """Return the blocks of columns that are already tensors."""
        matrices = [torch.stack([tensors[column.name] for column in group], 1) for group in self.matrices]
        return matrices + [tensors[column.name] for column in self.alone]

    def columns_of(self, blocks: Sequence[Any]) -> list[Any]:
        """Return the tensors called ``names``, as views of ``blocks``; or numpy arrays, if the blocks are."""
        columns: list[Any] = []
        for number, block in enumerate(blocks):
            if self.stacked <= number < len(self.matrices):
                columns.extend(block.unbind(1) if isinstance(block, torch.Tensor) else block.T)
            else:
                columns.append(block)
        return [columns[at] for at in self.order]

    def _matrix(self, table: pa.Table, number: int, where: str) -> torch.Tensor:
        """Return matrix ``number`` of a table, of shape (rows, columns)."""
        batches, columns = table.select(self.matrix_names[number]).to_batches(), self.matrices[number]
        matrix = matrix_of(batches[0]) if len(batches) == 1 else None
        if matrix is not None and matrix.dtype.name == columns[0].dtype:
            return torch.from_numpy(matrix)
        return torch.stack([to_tensor(table.column(column.name), column, where) for column in columns], 1)


class RowShapes:
    """Checks that the rows of all row groups have the same dtypes and shapes. Within a row group, they always do.

    Attributes:
        known: The dtype and shape of a row of each block, from the first row group that was checked; None before.
    """

    def __init__(self, layout: Layout) -> None:
        self.known: list[tuple[torch.dtype, torch.Size]] | None = None
        self._layout = layout
        self._lock = threading.Lock()

    @property
    def row_bytes(self) -> int | None:
        """Bytes of a row; None before the first check."""
        return None if self.known is None else sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.known)

    def check(self, blocks: Blocks, where: str) -> None:
        """Check the blocks of a row group. Any thread may call this.

        Raises:
            DataError: The rows differ from those of the first row group.
        """
        shapes = [(block.dtype, block.shape[1:]) for block in blocks]
        with self._lock:
            self.known = self.known or shapes
        if shapes == self.known:
            return
        for column, block in self._layout.block_numbers.items():
            here, first = shapes[block], self.known[block]
            if here != first:
                raise DataError(
                    f"column {column!r} in {where} has rows of shape {tuple(here[1])} and {here[0]}, but the first row "
                    f"group has {tuple(first[1])} and {first[0]}: make them equal before fit"
                )


def cut(parts: Iterator[Blocks], layout: Layout, sizes: Sequence[int]) -> Iterator[Batch]:
    """Cut rows that come in parts of any length into batches of ``sizes`` rows.

    A batch inside a part is a view of it. Changing a batch in place changes no other batch. The rest of a part is
    copied, so that the memory of the part is free before the next part is read.
    """
    held: list[Blocks] = []  # `have` rows, too few for a batch
    step, have, ends = 0, 0, [0, *itertools.accumulate(sizes)]
    while step < len(sizes):
        blocks = next(parts)
        rows, at = len(blocks[0]), 0
        if held:
            at = min(sizes[step] - have, rows)
            held.append([block[:at] for block in blocks])
            have += at
            if have < sizes[step]:
                continue
            columns = layout.columns_of([torch.cat(each) for each in zip(*held, strict=True)])
            held, have = [], 0
            split = [column.unsafe_split_with_sizes([sizes[step]])[0] for column in columns]
            yield dict(zip(layout.names, split, strict=True))
            del columns, split
            step += 1
        last = bisect_right(ends, ends[step] + rows - at) - 1
        columns = layout.columns_of([block[at:] for block in blocks])
        while step < last:
            whole = sizes[step : min(step + max(16, TENSORS // len(columns)), last)]
            at, step = at + sum(whole), step + len(whole)
            # One call of torch cuts a column for all these batches. Only this call and unsafe_split() do not record
            # the slices as views in autograd, where an in-place change of one batch would affect the gradients of the
            # others. unsafe_split() takes twice as long.
            slices = [column.unsafe_split_with_sizes([*whole, rows - at]) for column in columns]
            columns = [each[-1] for each in slices]
            for each in itertools.islice(zip(*slices, strict=True), len(whole)):
                yield dict(zip(layout.names, each, strict=True))
                del each
            del slices
        del columns
        if at < rows and step < len(sizes):
            held, have = [[block[at:].clone() if at else block for block in blocks]], rows - at
        del blocks


def _is_scalar(column: Column) -> bool:
    return column.shape == () and column.encoding == "plain" and column.dtype != "object"
