"""Rows are shuffled in windows: row groups are gathered in one block of memory, each row at a place drawn for it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from spark_hvd.estimators.readers.batches import Blocks
from spark_hvd.estimators.readers.sharding import Piece

WINDOW_BYTES = 64 << 20
"""Memory of a window where its number of rows is not given."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""For the itemsize of a dtype the integers that can hold its values; numpy has not all dtypes of torch."""


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


class Window:
    """Memory for the rows of some pieces, which several threads fill."""

    def __init__(self, pieces: Sequence[Piece], seed: Sequence[int]) -> None:
        self._ends = np.cumsum([piece.rows for piece in pieces]).tolist()
        self._seed = seed
        self._lock = threading.Lock()
        self._order = np.empty(0, np.int64)
        self._blocks: Blocks = []

    def put(self, number: int, blocks: Blocks) -> None:
        """Take in the rows of piece ``number`` of the window."""
        with self._lock:
            if not self._blocks:  # only now is it known which shapes the columns have
                self._order = np.random.default_rng(self._seed).permutation(self._ends[-1])
                self._blocks = [block.new_empty((self._ends[-1], *block.shape[1:])) for block in blocks]
        end = self._ends[number]
        places = self._order[end - len(blocks[0]) : end]
        for mine, block in zip(self._blocks, blocks, strict=True):
            # By numpy: torch would start a team of threads in each thread that reads.
            bits = _BITS[block.itemsize]
            mine.view(bits).numpy()[places] = block.view(bits).numpy()

    def take(self) -> Blocks:
        """The shuffled rows; the window is empty then. Once all pieces are in."""
        blocks, self._blocks = self._blocks, []
        return blocks
