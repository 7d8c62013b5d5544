"""Which rows each rank reads in a pass, and in how many steps. Pure functions of counts and a seed.

The row groups of a data set, in the order of the pass, are laid end to end and cut into one piece a rank; a row group
at a cut is read by both neighbours, each its part. So ranks have the same number of rows (but one) whatever the row
groups are, also with fewer row groups than ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from spark_hvd.estimators.readers.reader import ReaderSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``start`` to ``stop`` (exclusive) of the row group numbered ``group`` in the data set."""

    group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


def rows_of(rows: int, rank: int, size: int) -> int:
    """Number of rows that ``rank`` of ``size`` gets of ``rows``: the first ``rows % size`` ranks get one more."""
    return rows // size + (rank < rows % size)


def steps_of(rows: int, size: int, batch_size: int, drop_last: bool = False) -> int:
    """Steps of a pass over ``rows`` rows: the same on every rank, at least 1 where every rank has a row.

    Raises:
        ValueError: fewer rows than ranks.
    """
    each = rows // size
    if not each:
        raise ValueError(f"{rows} rows for {size} ranks: expected at least one row for each")
    return max(1, each // batch_size) if drop_last else -(-each // batch_size)


def batch_rows(rows: int, rank: int, size: int, batch_size: int, drop_last: bool = False) -> list[int]:
    """Rows in each batch of a pass; the last one holds all that is left, or is full where ``drop_last``."""
    mine, steps = rows_of(rows, rank, size), steps_of(rows, size, batch_size, drop_last)
    if drop_last:
        return [min(batch_size, mine)] * steps
    return [batch_size] * (steps - 1) + [mine - (steps - 1) * batch_size]


def share_of(lengths: Sequence[int], rank: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The piece of ``rank``, where things of these lengths are laid end to end: (number of the thing, start, stop)."""
    total = sum(lengths)
    start = rank * (total // size) + min(rank, total % size)
    stop = start + rows_of(total, rank, size)
    at = 0
    for number, length in enumerate(lengths):
        low, high = max(start - at, 0), min(stop - at, length)
        if low < high:
            yield number, low, high
        at += length


def pieces_of(
    group_rows: Sequence[int], rank: int, size: int, *, shuffle: bool = False, seed: int = 0, number: int = 0
) -> list[Piece]:
    """What ``rank`` reads in pass ``number``, in this order; with ``shuffle`` one that all ranks draw from ``seed``."""
    order = np.arange(len(group_rows))
    if shuffle:
        np.random.default_rng((seed, number)).shuffle(order)
    groups = order.tolist()
    share = share_of([group_rows[group] for group in groups], rank, size)
    return [Piece(groups[place], start, stop) for place, start, stop in share]


def pieces_of_pass(spec: ReaderSpec, number: int) -> list[Piece]:
    """What the rank of ``spec`` reads in pass ``number``, in this order; with ``cache`` always the same pieces."""
    groups = [group.rows for group in spec.dataset.row_groups]
    drawn = 0 if spec.cache else number
    pieces = pieces_of(groups, spec.rank, spec.size, shuffle=spec.shuffle, seed=spec.seed, number=drawn)
    if spec.shuffle and spec.cache:
        order = np.random.default_rng((spec.seed, number, spec.rank)).permutation(len(pieces))
        pieces = [pieces[at] for at in order]
    return pieces
