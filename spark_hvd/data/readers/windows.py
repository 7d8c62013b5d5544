"""Rows are shuffled in windows: row groups are gathered in one block of memory, each row at a place drawn for it.

Windows are cut out of the line of an epoch, whoever reads it, so that the order of rows does not depend on the number
of ranks. A window at the cut between two ranks is read by both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spark_hvd.data.readers.sharding import overlaps

WINDOW_BYTES = 64 << 20
"""Memory of a window where its number of rows is not given."""


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


def row_groups_of(rows: Sequence[int], *, shuffle: bool = False, seed: int = 0, epoch: int = 0) -> list[Piece]:
    """The row groups, of so many rows each, in the order of an epoch; with ``shuffle`` one drawn from ``seed``."""
    order = np.arange(len(rows))
    if shuffle:
        np.random.default_rng((seed, epoch)).shuffle(order)
    return [Piece(group, 0, rows[group]) for group in order.tolist()]


def runs_of(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces of one row group that follow each other without a gap, together."""
    run: list[Piece] = []
    for piece in pieces:
        if run and (run[-1].group, run[-1].stop) != (piece.group, piece.start):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def windows_of(pieces: Iterable[Piece], rows: int) -> Iterator[list[Piece]]:
    """Group pieces, in their order, into windows of at most ``rows`` rows; a longer piece is cut."""
    window: list[Piece] = []
    room = rows
    for piece in pieces:
        if window and piece.rows > room:
            yield window
            window, room = [], rows
        for start in range(piece.start, piece.stop, rows):
            part = Piece(piece.group, start, min(start + rows, piece.stop))
            window.append(part)
            room -= part.rows
            if room == 0:
                yield window
                window, room = [], rows
    if window:
        yield window


def wanted_of(
    windows: Sequence[Sequence[Piece]], share: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """For each window that a share of the line has rows of: its number, and which of its places these are."""
    lengths = [sum(piece.rows for piece in window) for window in windows]
    for number, parts in itertools.groupby(overlaps(lengths, share), key=lambda part: part[0]):
        yield number, [(start, stop) for _, start, stop in parts]


def even_rows(rows: int, most: int) -> int:
    """Rows of a window, ``most`` at most, so that the number of windows is a power of two.

    The borders between 2, 4 or 8 ranks are then borders of windows too, and no window is read by two of them.
    """
    windows = 1 << (-(-rows // most) - 1).bit_length()
    return -(-rows // windows)


def places_of(rows: int, seed: Sequence[int], wanted: Sequence[tuple[int, int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each of ``rows`` rows where it goes among those that are wanted, in an order drawn; -1 for one that is not.

    Args:
        rows: Rows that are shuffled together.
        seed: Of the order; nothing else decides it.
        wanted: The places in that order that are kept, ascending.
    """
    order = np.random.default_rng(seed).permutation(rows)
    count = sum(stop - start for start, stop in wanted)
    if count == rows:
        return order
    kept = np.full(rows, -1)
    kept[np.concatenate([np.arange(start, stop) for start, stop in wanted])] = np.arange(count)
    return kept[order]


def whole_rows(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory with one number for each row, or one stretch of bytes: moved in half the time of its numbers."""
    rows = array.reshape(len(array), math.prod(array.shape[1:]))
    width = rows.shape[1] * rows.itemsize
    return rows.view(f"u{width}" if width in (1, 2, 4, 8) else f"V{width}")[:, 0]
