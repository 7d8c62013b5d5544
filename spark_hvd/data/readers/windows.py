"""Rows are shuffled in windows: row groups are gathered in one block of memory, each row at a place drawn for it.

Windows are cut out of the line of an epoch, whoever reads it, so that the order of rows does not depend on the number
of ranks. As a global batch takes rows from all lanes, a window of each of a rank's lanes is in memory at once; together
they have the rows of :data:`WINDOW_BYTES`. A window at the cut between two ranks is read by both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from spark_hvd.data.readers.sharding import (
    Interval,
    Ints,
    Share,
    Turns,
    cut_at,
    lane_order,
    overlaps,
    rows_of,
    stretches,
)

WINDOW_BYTES = 64 << 20
"""Memory of rows that are shuffled together where their number is not given."""


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
    """Return the row groups, with these numbers of rows, in the order of an epoch.

    Shuffled by ``seed`` if asked for.
    """
    order = np.arange(len(rows))
    if shuffle:
        np.random.default_rng((seed, epoch)).shuffle(order)
    return [Piece(group, 0, rows[group]) for group in order.tolist()]


def runs_of(asked: Iterable[tuple[int, Piece]]) -> Iterator[list[tuple[int, Piece]]]:
    """Pieces of one row group that follow each other without a gap, in rounds that do so too, together."""
    run: list[tuple[int, Piece]] = []
    for number, piece in asked:
        if run and (run[-1][1].group, run[-1][1].stop) == (piece.group, piece.start) and run[-1][0] <= number:
            run.append((number, piece))
            continue
        if run:
            yield run
        run = [(number, piece)]
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


def even_rows(rows: int, most: int) -> int:
    """Return the number of rows in a window, at most ``most``, so that the number of windows is a power of two.

    The borders between 2, 4 or 8 ranks are then borders of windows too, and no window is read by two of them.
    """
    windows = 1 << (-(-rows // most) - 1).bit_length()
    return -(-rows // windows)


class EpochLine:
    """The rows of an epoch in the order of its line, cut into windows.

    Shuffled, every other lane has its row groups in reverse, so that two neighbours come to the row group at their
    border at the same time: it is read once for both. ``groups`` has the rows of each row group; ``rows`` are shuffled
    together, of all lanes. ``drawn`` is the epoch of the row groups' order; of those larger than a window, ``chunk``
    rows are decoded at once.

    Attributes:
        height: Rows of a window; the first one of a lane may have fewer.
        one_round: Whether one window of each lane holds all rows.
    """

    def __init__(
        self,
        groups: Sequence[int],
        lanes: int,
        rows: int,
        *,
        shuffle: bool,
        seed: int,
        epoch: int,
        drawn: int,
        chunk: int = 0,
    ) -> None:
        self._lanes, self._seed = lanes, (seed, epoch) if shuffle else None
        pieces, total = row_groups_of(groups, shuffle=shuffle, seed=seed, epoch=drawn), sum(groups)
        lengths = [rows_of(total, lane, lanes) for lane in lane_order(lanes).tolist()]
        self.height = even_rows(max(lengths), max(1, rows // lanes))
        self.one_round = self.height >= max(lengths)
        at, cuts = 0, [0]
        line: list[Piece] = []
        lanes_of_line = [
            _cut(pieces, [(stop - length, stop)]) for stop, length in zip(accumulate(lengths), lengths, strict=True)
        ]
        for number, (lane, length) in enumerate(zip(lanes_of_line, lengths, strict=True)):
            if shuffle and number + 1 < lanes:
                _swap(lane, lanes_of_line[number + 1])
            line += reversed(lane) if shuffle and number % 2 else lane
            at += length
            cuts += [*range(at, at - length, -self.height)][::-1]
        if chunk := min(chunk, self.height):
            line = [part for piece in line for part in _parts(piece, chunk if groups[piece.group] > self.height else 0)]
        self._edges = np.array(cuts)
        self._pieces: list[list[Piece]] = [[] for _ in cuts[1:]]
        parts = overlaps([piece.rows for piece in line], pairwise(cuts))
        at = window = 0
        for piece, start, stop in parts:
            self._pieces[window].append(Piece(line[piece].group, line[piece].start + start, line[piece].start + stop))
            at += stop - start
            window += at == cuts[window + 1]

    def rounds(self, share: Share) -> Iterator[Round]:
        """Yield the windows that a rank reads together, one round at a time."""
        if isinstance(share, Turns):
            rows = self.height * self._lanes
            for low in range((share.left - 1) // rows * rows, -1, -rows):
                number, starts, stops = cut_at(*share.between(low, min(low + rows, share.left)), self._edges)
                if len(number):
                    yield self._round(number, starts, stops)
            return
        bounds = np.array(share, np.int64).reshape(-1, 2)
        number, starts, stops = cut_at(bounds[:, 0], bounds[:, 1], self._edges)
        cuts = np.flatnonzero(np.diff(number // self._lanes)) + 1
        for one in zip(*(np.split(each, cuts) for each in (number, starts, stops)), strict=True):
            if len(one[0]):
                yield self._round(*one)

    def runs(self, share: Share) -> Iterator[list[tuple[int, Piece]]]:
        """Yield what a rank reads and in which round, as :func:`runs_of` arranges it."""
        windows: dict[int, list[tuple[int, Piece]]] = {}
        again: list[tuple[int, Piece]] = []
        for number, one in enumerate(self.rounds(share)):
            for window in one.windows:
                pieces = [(number, piece) for piece in self._pieces[window]]
                if window in windows:  # only where the number of ranks has changed within the epoch
                    again += pieces
                else:
                    windows[window] = pieces
        yield from runs_of(each for window in sorted(windows) for each in windows[window])
        yield from runs_of(again)

    def _round(self, number: Ints, starts: Ints, stops: Ints) -> Round:
        windows = np.unique(number)
        rows = self._edges[windows + 1] - self._edges[windows]
        shift = (np.cumsum(rows) - rows - self._edges[windows])[np.searchsorted(windows, number)]
        return Round(
            windows=dict(zip(windows.tolist(), rows.tolist(), strict=True)),
            pieces=[piece for window in windows.tolist() for piece in self._pieces[window]],
            starts=starts + shift,
            lengths=stops - starts,
            seed=self._seed,
        )


@dataclass(frozen=True)
class Round:
    """Windows that are read at once, and which of their rows a rank takes, in its order.

    Attributes:
        windows: Their numbers, and how many rows each has.
        pieces: What is read of row groups for them. Rows and their places are counted over all windows.
        starts: The first place of each run of rows that is taken.
        lengths: How many rows it has.
        seed: Seed of the order of the rows in a window, with the window's number; None for the order of the pieces.
    """

    windows: dict[int, int]
    pieces: list[Piece]
    starts: Ints
    lengths: Ints
    seed: tuple[int, int] | None

    @cached_property
    def rows(self) -> int:
        """How many rows the rank takes."""
        return int(self.lengths.sum())

    @cached_property
    def ends(self) -> list[int]:
        """Where the rows of each piece end, where pieces lie end to end."""
        found: list[int] = np.cumsum([piece.rows for piece in self.pieces]).tolist()
        return found

    def places(self) -> Ints:
        """Return, for each row of the pieces, its place among those that the rank takes; -1 if it does not take it."""
        orders, at = [], 0
        for window, rows in self.windows.items():
            drawn = None if self.seed is None else np.random.default_rng((*self.seed, window))
            orders.append((np.arange(rows) if drawn is None else drawn.permutation(rows)) + at)
            at += rows
        order: Ints = np.concatenate(orders) if len(orders) > 1 else orders[0]
        if self.rows == at and len(self.starts) == 1:
            return order
        taken = np.full(at, -1)
        taken[stretches(self.starts, self.lengths)] = np.arange(self.rows)
        found: Ints = taken[order]
        return found


def _swap(lane: list[Piece], following: list[Piece]) -> None:
    """Of a row group that two lanes cut, let the one with more rows have the first: the other has to pass them over."""
    last, first = lane[-1], following[0]
    if last.group == first.group and last.stop == first.start and last.rows > first.rows:
        cut = last.start + first.rows
        following[0], lane[-1] = Piece(last.group, last.start, cut), Piece(last.group, cut, first.stop)


def _parts(piece: Piece, rows: int) -> Iterator[Piece]:
    """Yield a piece, cut at every multiple of ``rows`` in its row group; 0 leaves it whole."""
    ends = range((piece.start // rows + 1) * rows, piece.stop, rows) if rows else range(0)
    for start, stop in pairwise((piece.start, *ends, piece.stop)):
        yield Piece(piece.group, start, stop)


def _cut(pieces: Sequence[Piece], intervals: Iterable[Interval]) -> list[Piece]:
    """Return the parts of concatenated pieces that lie in intervals."""
    parts = overlaps([piece.rows for piece in pieces], intervals)
    return [Piece(pieces[at].group, pieces[at].start + start, pieces[at].start + stop) for at, start, stop in parts]


def whole_rows(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the same memory as one number or one stretch of bytes per row, which moves in half the time."""
    rows = array.reshape(len(array), math.prod(array.shape[1:]))
    width = rows.shape[1] * rows.itemsize
    return rows.view(f"u{width}" if width in (1, 2, 4, 8) else f"V{width}")[:, 0]
