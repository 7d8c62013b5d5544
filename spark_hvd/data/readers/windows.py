"""Shuffles rows in windows: the rows of several row groups are put in one block of memory, each at a random place.

The line of an epoch is cut into windows independently of the ranks, so the order of rows does not depend on their
number. Because a global batch takes rows from all lanes, one window of each of a rank's lanes is in memory at a time.
Together, these windows have the rows of :data:`WINDOW_BYTES`. Two ranks read a window that crosses their border.
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
"""Bytes of the rows that are shuffled together, unless their number is set."""


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
    """Return row groups with these numbers of rows in the order of an epoch, which ``seed`` determines if shuffled."""
    order = np.arange(len(rows))
    if shuffle:
        np.random.default_rng((seed, epoch)).shuffle(order)
    return [Piece(group, 0, rows[group]) for group in order.tolist()]


def runs_of(pieces: Iterable[tuple[int, Piece]]) -> Iterator[list[tuple[int, Piece]]]:
    """Group (round, piece): adjacent pieces of one row group belong together if their rounds do not decrease."""
    run: list[tuple[int, Piece]] = []
    for number, piece in pieces:
        if run and (run[-1][1].group, run[-1][1].stop) == (piece.group, piece.start) and run[-1][0] <= number:
            run.append((number, piece))
            continue
        if run:
            yield run
        run = [(number, piece)]
    if run:
        yield run


def windows_of(pieces: Iterable[Piece], rows: int) -> Iterator[list[Piece]]:
    """Group pieces in their order into windows of at most ``rows`` rows. Longer pieces are cut."""
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
    """Return a number of rows per window, at most ``most``, so that the number of windows is a power of two.

    Then the borders between 2, 4 or 8 ranks are borders of windows too, so no two ranks read the same window.
    """
    windows = 1 << (-(-rows // most) - 1).bit_length()
    return -(-rows // windows)


class EpochLine:
    """The line of an epoch, cut into windows.

    If rows are shuffled, every other lane has its row groups in reverse order. Two neighbouring lanes then reach the
    row group at their border at the same time, and it is read once for both.

    Args:
        groups: Number of rows of each row group.
        lanes: Number of lanes.
        rows: Number of rows that are shuffled together, over all lanes.
        shuffle: Whether rows are shuffled.
        seed: Seed of the order.
        epoch: The epoch, which determines the order of rows within windows.
        drawn: The epoch that determines the order of row groups.
        chunk: Number of rows that are decoded at once if a row group has more than :attr:`most` rows; 0 for all.

    Attributes:
        most: Number of rows that the windows of a lane may have.
        height: Number of rows that they have. The first window of a lane may have fewer.
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
        self.most = max(1, rows // lanes)
        self.height = even_rows(max(lengths), self.most)
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
        if chunk := min(chunk, self.most):
            line = [part for piece in line for part in _parts(piece, chunk if groups[piece.group] > self.most else 0)]
        self._edges = np.array(cuts)
        self._pieces: list[list[Piece]] = [[] for _ in cuts[1:]]
        parts = overlaps([piece.rows for piece in line], pairwise(cuts))
        at = window = 0
        for piece, start, stop in parts:
            self._pieces[window].append(Piece(line[piece].group, line[piece].start + start, line[piece].start + stop))
            at += stop - start
            window += at == cuts[window + 1]

    def rounds(self, share: Share) -> Iterator[Round]:
        """Yield the rounds of a share: the windows that a rank reads together."""
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
        """Yield the pieces that a rank reads and their rounds, as :func:`runs_of` groups them."""
        windows: dict[int, list[tuple[int, Piece]]] = {}
        again: list[tuple[int, Piece]] = []
        for number, one in enumerate(self.rounds(share)):
            for window in one.windows:
                pieces = [(number, piece) for piece in self._pieces[window]]
                if window in windows:  # only if the number of ranks has changed within the epoch
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
    """Windows that are read together, and the rows that a rank takes from them, in order.

    Attributes:
        windows: Number of each window -> its number of rows.
        pieces: The pieces of row groups to read. Rows and places are counted over all windows.
        starts: The first place of each range of rows that the rank takes.
        lengths: The number of rows of each range.
        seed: With a window's number, the seed of the order of its rows; None to keep the order of the pieces.
    """

    windows: dict[int, int]
    pieces: list[Piece]
    starts: Ints
    lengths: Ints
    seed: tuple[int, int] | None

    @cached_property
    def rows(self) -> int:
        """Number of rows that the rank takes."""
        return int(self.lengths.sum())

    @cached_property
    def ends(self) -> list[int]:
        """The end of each piece in the concatenated pieces."""
        ends: list[int] = np.cumsum([piece.rows for piece in self.pieces]).tolist()
        return ends

    def places(self) -> Ints:
        """Return the place of each row of the pieces among the rows that the rank takes; -1 for other rows."""
        places = np.full(self.ends[-1], -1)
        places[stretches(self.starts, self.lengths)] = np.arange(self.rows)
        if self.seed is None:
            return places
        at = 0
        for window, rows in self.windows.items():
            order = np.random.default_rng((*self.seed, window)).permutation(rows)
            places[at : at + rows] = places[at : at + rows][order]
            at += rows
        return places


def _swap(lane: list[Piece], following: list[Piece]) -> None:
    """If two lanes share a row group, give its first rows to the lane with fewer rows, as the other must skip them."""
    last, first = lane[-1], following[0]
    if last.group == first.group and last.stop == first.start and last.rows > first.rows:
        cut = last.start + first.rows
        following[0], lane[-1] = Piece(last.group, last.start, cut), Piece(last.group, cut, first.stop)


def _parts(piece: Piece, rows: int) -> Iterator[Piece]:
    """Cut a piece at every multiple of ``rows`` in its row group. 0 keeps it whole."""
    ends = range((piece.start // rows + 1) * rows, piece.stop, rows) if rows else range(0)
    for start, stop in pairwise((piece.start, *ends, piece.stop)):
        yield Piece(piece.group, start, stop)


def _cut(pieces: Sequence[Piece], intervals: Iterable[Interval]) -> list[Piece]:
    """Return the parts of concatenated pieces that lie in ``intervals``."""
    parts = overlaps([piece.rows for piece in pieces], intervals)
    return [Piece(pieces[at].group, pieces[at].start + start, pieces[at].start + stop) for at, start, stop in parts]


def whole_rows(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View an array as one number, or one string of bytes, per row. Rows then move in half the time."""
    rows = array.reshape(len(array), math.prod(array.shape[1:]))
    width = rows.shape[1] * rows.itemsize
    return rows.view(f"u{width}" if width in (1, 2, 4, 8) else f"V{width}")[:, 0]
