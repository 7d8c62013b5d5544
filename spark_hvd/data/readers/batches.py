"""Batches are slices of a few tensors: scalar columns of one dtype lie side by side in one matrix.

Rows of 21 columns are then shuffled and copied by two calls, not 21. The views in a batch are one a column, but for
columns that a model takes side by side, of which there is one view.
"""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
import torch

from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import matrix_of
from spark_hvd.data.readers.reader import Batch
from spark_hvd.data.readers.tensors import to_tensor

Blocks = list[torch.Tensor]
"""The columns of some rows as a :class:`Layout` lays them out: first its matrices, then the columns that lie alone."""

STACK = "features"
"""Name in a batch of the columns that lie in it side by side."""

TENSORS = 512
"""Number of tensors that are cut at once. After 700 new objects Python collects garbage, which takes longer than
cutting in smaller parts."""


class Layout:
    """Where each column lies among the blocks. Scalars of one dtype share a matrix; every other column lies alone.

    Args:
        columns: In the order of the batch.
        stack: Names of columns that the batch shall have as one tensor, :data:`STACK`, in this order. It has each
            column by itself if they are not several scalars of one dtype, or if a column has the tensor's name.

    Attributes:
        columns: The columns.
        stacked: Whether the first matrix is the stack, which is not taken apart.
        matrices: The columns of each matrix, from left to right.
        alone: The columns with blocks of their own, after the matrices.
        names: Names of the tensors of a batch, in its order.
        order: For each of ``names`` its number, counted over matrices and what lies alone.
        block_numbers: Name -> number of the block that the column lies in.
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
        """The blocks of a table that has all the columns.

        Raises:
            DataError: as :func:`~spark_hvd.data.readers.tensors.to_tensor`.
        """
        matrices = [self._matrix(table, number, where) for number in range(len(self.matrices))]
        return matrices + [to_tensor(table.column(column.name), column, where) for column in self.alone]

    def blocks_of_tensors(self, tensors: dict[str, torch.Tensor]) -> Blocks:
        """The blocks of columns that are tensors already."""
        matrices = [torch.stack([tensors[column.name] for column in group], 1) for group in self.matrices]
        return matrices + [tensors[column.name] for column in self.alone]

    def columns_of(self, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors called ``names``, views of ``blocks``."""
        columns: list[torch.Tensor] = []
        for number, block in enumerate(blocks):
            columns += block.unbind(1) if self.stacked <= number < len(self.matrices) else (block,)
        return [columns[at] for at in self.order]

    def _matrix(self, table: pa.Table, number: int, where: str) -> torch.Tensor:
        """The columns of matrix ``number``, of shape (rows, columns)."""
        batches, columns = table.select(self.matrix_names[number]).to_batches(), self.matrices[number]
        matrix = matrix_of(batches[0]) if len(batches) == 1 else None
        if matrix is not None and matrix.dtype.name == columns[0].dtype:
            return torch.from_numpy(matrix)
        return torch.stack([to_tensor(table.column(column.name), column, where) for column in columns], 1)


class RowShapes:
    """Dtype and shape of a row of each block. All row groups must have the same; within one, rows are alike.

    Attributes:
        known: Of the first row group that was looked at; None before.
    """

    def __init__(self, layout: Layout) -> None:
        self.known: list[tuple[torch.dtype, torch.Size]] | None = None
        self._layout = layout
        self._lock = threading.Lock()

    @property
    def row_bytes(self) -> int | None:
        """Memory of a row; None as long as none is known."""
        return None if self.known is None else sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.known)

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
        for column, block in self._layout.block_numbers.items():
            mine, first = found[block], self.known[block]
            if mine != first:
                raise DataError(
                    f"column {column!r} in {where} has rows of shape {tuple(mine[1])} and {mine[0]}, where a row group "
                    f"before has {tuple(first[1])} and {first[0]}: make them alike before fit"
                )


def cut(parts: Iterator[Blocks], layout: Layout, sizes: Sequence[int]) -> Iterator[Batch]:
    """Cut rows that come in parts of any length into batches of ``sizes`` rows; as :func:`cut_rows`."""
    for columns in cut_rows(parts, sizes, layout.columns_of):
        yield dict(zip(layout.names, columns, strict=True))


def cut_rows(
    parts: Iterator[Sequence[torch.Tensor]],
    sizes: Sequence[int],
    columns_of: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = list,
) -> Iterator[Sequence[torch.Tensor]]:
    """What ``columns_of`` makes of the tensors of each batch, of parts whose tensors have as many rows.

    Batches inside a part are views of it; changing one in place shows in no other. What is left of a part is copied, so
    that the memory of the part is free before the next one is asked for.
    """
    held: list[Sequence[torch.Tensor]] = []  # `have` rows, too few for a batch
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
            columns = columns_of([torch.cat(each) for each in zip(*held, strict=True)])
            held, have = [], 0
            yield [column.unsafe_split_with_sizes([sizes[step]])[0] for column in columns]
            del columns
            step += 1
        last = bisect_right(ends, ends[step] + rows - at) - 1
        columns = columns_of([block[at:] for block in blocks])
        while step < last:
            whole = sizes[step : min(step + max(16, TENSORS // len(columns)), last)]
            at, step = at + sum(whole), step + len(whole)
            # One call of torch cuts a column for all of them. Of the calls that do, this one and unsafe_split() leave
            # out autograd's note of a view for each, by which a gradient of what is done to one would be all others';
            # unsafe_split() takes twice as long.
            slices = [column.unsafe_split_with_sizes([*whole, rows - at]) for column in columns]
            columns = [each[-1] for each in slices]
            yield from itertools.islice(zip(*slices, strict=True), len(whole))
            del slices
        del columns
        if at < rows and step < len(sizes):
            held, have = [[block[at:].clone() if at else block for block in blocks]], rows - at
        del blocks


def _is_scalar(column: Column) -> bool:
    return column.shape == () and column.encoding == "plain" and column.dtype != "object"
