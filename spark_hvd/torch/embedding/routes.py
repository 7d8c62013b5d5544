"""Decides which rank holds which row, and what a look-up of several tables sends where. Others do the sending.

Row ``i`` of a table is row ``i // size`` of rank ``i % size``. Popular ids are usually adjacent, because ids are
numbered by frequency or by age. So with contiguous blocks of rows, one rank would do most of the work.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Cut:
    """This rank's share of a table."""

    rows: int
    """Number of rows of the whole table."""
    rank: int
    size: int

    @property
    def here(self) -> int:
        """Number of rows of this rank."""
        return self.rows_of(self.rank)

    def rows_of(self, rank: int) -> int:
        """Return the number of rows of a rank."""
        return (self.rows - rank + self.size - 1) // self.size

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's rows of the whole table."""
        return whole[self.rank :: self.size].clone()


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank requests from the others."""

    wanted: torch.Tensor
    """Each row once, sorted by owner, then by table: int32 or int64. Row numbers run on from table to table."""
    counts: list[list[int]]
    """For each owner, how many rows of each table."""
    places: list[torch.Tensor]
    """For each table and id: the index of its row among the table's rows in `wanted`; in the ids' shape."""


def strides(rows: Sequence[int], size: int) -> list[int]:
    """Return where each table's rows begin on a rank that lines up the rows of all tables, and where the last ends."""
    ends = [0]
    for each in rows:
        ends.append(ends[-1] + -(-each // size))
    return ends


def plan(ids: Sequence[torch.Tensor], rows: Sequence[int], size: int) -> Route:
    """Plan which rows to request from which rank. ``ids`` are valid ids for each table, int64, of any shape."""
    starts = strides(rows, size)
    total, device = starts[-1], ids[0].device
    keys = [
        each.reshape(-1) % size * total + (each.reshape(-1) // size + start)
        for each, start in zip(ids, starts, strict=False)
    ]
    # One sort removes duplicates, and orders by owner and then by table.
    unique, inverse = torch.unique(torch.cat(keys), return_inverse=True)
    edges = torch.tensor([owner * total + start for owner in range(size) for start in starts[:-1]], device=device)
    bounds = [*torch.searchsorted(unique, edges).tolist(), len(unique)]
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    tables = len(rows)
    counts = [lengths[owner * tables : (owner + 1) * tables] for owner in range(size)]
    wanted = unique % total
    if total < 2**31:
        wanted = wanted.int()
    if tables > 1:
        inverse = inverse - _shift(counts, device)[inverse]
    places = inverse.split([each.numel() for each in ids])
    return Route(wanted, counts, [place.view(each.shape) for place, each in zip(places, ids, strict=True)])


def _shift(counts: list[list[int]], device: torch.device) -> torch.Tensor:
    """Return how much the index of each wanted row exceeds its index among the rows of its table."""
    shifts, lengths, before, table_before = [], [], 0, [0] * len(counts[0])
    for owner in counts:
        for table, count in enumerate(owner):
            shifts.append(before - table_before[table])
            lengths.append(count)
            before += count
            table_before[table] += count
    return torch.repeat_interleave(torch.tensor(shifts, device=device), torch.tensor(lengths, device=device))


def by_table(flat: torch.Tensor, counts: list[list[int]], dims: Sequence[int]) -> list[torch.Tensor]:
    """Split a vector that is ordered by rank, and by table within each rank.

    ``flat`` is one-dimensional; ``counts`` holds the rows of each rank and table, ``dims`` the row length of each
    table.

    Returns:
        For each table, a matrix of the rows of all ranks.
    """
    if len(dims) == 1:
        return [flat.view(-1, dims[0])]
    pieces = torch.split(flat, [count * dim for rank in counts for count, dim in zip(rank, dims, strict=True)])
    return [torch.cat(pieces[table :: len(dims)]).view(-1, dim) for table, dim in enumerate(dims)]


def by_rank(matrices: Sequence[torch.Tensor], counts: list[list[int]]) -> torch.Tensor:
    """Do the inverse of :func:`by_table`."""
    if len(matrices) == 1:
        return matrices[0].reshape(-1)
    columns = [torch.split(matrix, [rank[table] for rank in counts]) for table, matrix in enumerate(matrices)]
    return torch.cat([column[rank].reshape(-1) for rank in range(len(counts)) for column in columns])
