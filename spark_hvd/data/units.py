"""In which order the rows of a DataFrame stand in an epoch, and which rank has them. Pure functions of numbers.

Every row belongs to one of :data:`UNITS` units. Laid end to end, these are cut into one share a rank, equal but for a
row; an epoch goes through them in an order of its own. So neither the order in which rows arrive nor the number of
ranks decides the line of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from spark_hvd.data.readers.sharding import Ints, stretches

UNITS = 4096
STRIDE = 2531
"""From a row's unit to the next row's: odd, and the golden section of UNITS, so that few rows too are spread evenly."""

UNIT, ID, SOURCE = "__unit", "__id", "__source"
"""The columns that Spark gives tasks besides :func:`struct_of`; the last tells of which data set a row is."""

ROW = (1 << 33) - 1
"""The bits of monotonically_increasing_id() that number rows; those above number partitions."""

Piece = tuple[int, int, int, int]
"""A unit, the first of its rows that is meant, how many from there on are done, and how many there are.

Rows of a unit are counted and taken in its order, which is another one in each epoch.
"""

Seed = tuple[int, int]
"""The user's, and the epoch's number."""


def struct_of(source: int) -> str:
    """Return the name of the column that holds the rows of a data set, if there are several data sets."""
    return f"__row{source}"


OURS = {UNIT, ID, SOURCE, struct_of(0)}
"""Names that no column of the user's may have."""


class Owned(NamedTuple):
    """What a rank takes of the units in every epoch, in ascending order; none is empty.

    Attributes:
        units: Their numbers.
        firsts: The first row that it takes of each, in the order of the epoch.
        lengths: How many from there on.
    """

    units: Ints
    firsts: Ints
    lengths: Ints


def owned_by(part: int, parts: int, counts: Ints) -> Owned:
    """Return the share of one of ``parts`` ranks in units with these numbers of rows; ranks differ by at most one row.

    Two ranks share the units at the border between them: one takes the first rows, the other takes the last ones.
    """
    ends = np.cumsum(counts)
    each, more = divmod(int(ends[-1]), parts)
    low, high = part * each + min(part, more), (part + 1) * each + min(part + 1, more)
    firsts, stops = (np.clip(edge - (ends - counts), 0, counts) for edge in (low, high))
    units = np.flatnonzero(firsts < stops)
    return Owned(units, firsts[units], (stops - firsts)[units])


def units_of(part: int, parts: int) -> range:
    """Return the units whose rows Spark brings to one of ``parts`` ranks."""
    return range(-(-part * UNITS // parts), -(-(part + 1) * UNITS // parts))


class Move(NamedTuple):
    """Rows of a unit that one rank sends to another.

    ``first`` is the number of the first one, in the order of the DataFrame.
    """

    source: int
    target: int
    unit: int
    first: int
    rows: int


def moves_of(weights: Ints, rows: Ints, parts: Sequence[int], held: Sequence[range], most: int) -> Iterator[list[Move]]:
    """Yield what ranks send each other, in rounds: units at the border of two tasks, which Spark brought to the other.

    Spark places rows before anybody has counted them, so tasks differ by some. Once all ranks know how many rows each
    unit has, each knows by itself who lacks which.

    A unit is sent whole, for each epoch draws anew which of its rows are whose.

    Args:
        weights: What is shared equally, of each unit: rows, or windows.
        rows: Rows of each unit.
        parts: The part of each rank, as ranks and parts are numbered in two ways.
        held: The units of which each rank can read the rows.
        most: Rows that a rank sends another in a round, at most.
    """
    size, has = len(parts), {part: rank for rank, part in enumerate(parts)}
    pending: dict[tuple[int, int], list[Move]] = {}
    for target, part in enumerate(parts):
        for unit in owned_by(part, size, weights).units.tolist():
            if unit in held[target]:
                continue
            source = has[unit * size // UNITS]
            of_pair = pending.setdefault((source, target), [])
            for first in range(0, int(rows[unit]), most):
                of_pair.append(Move(source, target, unit, first, min(most, int(rows[unit]) - first)))
    for number in range(max(map(len, pending.values()), default=0)):
        yield [moves[number] for moves in pending.values() if number < len(moves)]


def order_of(seed: Seed | None) -> Ints:
    """Return the units in the order of an epoch; ascending for None."""
    return np.arange(UNITS) if seed is None else np.random.default_rng(seed).permutation(UNITS)


def keys_of(ids: Ints, seed: Seed | None) -> Ints | np.ndarray[Any, np.dtype[np.uint64]]:
    """Return the keys that order the rows of a unit, all different; without a seed, the ids themselves."""
    if seed is None:
        return ids
    keys = ids.view(np.uint64) ^ np.random.default_rng(seed).integers(1 << 64, dtype=np.uint64, endpoint=False)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64, a bijection
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(factor)
    keys ^= keys >> np.uint64(31)
    return keys


def order_in_units(places: np.ndarray[Any, np.dtype[np.int16]], ids: Ints, seed: Seed | None) -> Ints:
    """Return the order of rows: by the places of their units, and within each unit by :func:`keys_of`.

    One number a row holds its place, as much of its key as there is room for, and its own number: sorting numbers takes
    a third of the time of finding in which order they would be sorted.
    """
    keys = keys_of(ids, seed).view(np.uint64)
    if seed is None:  # numbers of partitions move next to those of rows in them, which are shorter than their 33 bits
        within = keys & np.uint64(ROW)
        keys = keys >> np.uint64(33) << np.uint64(_bits(within)) | within
    here = _bits(np.arange(len(ids))[-1:])
    above = 64 - _bits(places)
    cut = max(0, _bits(keys) + here - above)
    found = places.astype(np.uint64) << np.uint64(above) if above < 64 else np.zeros(len(ids), np.uint64)
    found |= keys >> np.uint64(cut) << np.uint64(here)
    found |= np.arange(len(ids), dtype=np.uint64)
    found.sort()
    if cut and ((found[1:] ^ found[:-1]) >> np.uint64(here) == 0).any():  # what was cut off decides
        return np.lexsort((keys, places))
    order: Ints = (found & np.uint64((1 << here) - 1)).view(np.int64)
    return order


def _bits(numbers: np.ndarray[Any, Any]) -> int:
    return int(numbers.max(initial=0)).bit_length()


def windows_of(pieces: Iterable[Piece], rows: int) -> Iterator[list[Piece]]:
    """Pieces, in their order, as many together as have at most ``rows`` rows, done or not; a longer one is alone."""
    window: list[Piece] = []
    room = rows
    for piece in pieces:
        length = piece[-1]
        if window and length > room:
            yield window
            window, room = [], rows
        if length:
            window.append(piece)
            room -= length
    if window:
        yield window


def mixing(pieces: Sequence[Piece], seed: Seed | None, number: int) -> Ints:
    """Return the order in which a rank takes the rest of a window, as row numbers in its concatenated units.

    The rows of a unit come in their order, and those of all units among each other. Only lengths decide it, so that
    every rank knows how far another is in its units, and what is done changes nothing in the order of the others.
    ``pieces`` and ``number`` are the window's. Without a seed, units come one after the other.
    """
    _, _, done, lengths = np.array(pieces, np.int64).reshape(-1, 4).T
    order = np.arange(lengths.sum()) if seed is None else _mixed(lengths, (*seed, number))
    if done.any():
        left = np.zeros(len(order), bool)
        left[stretches(np.cumsum(lengths) - lengths + done, lengths - done)] = True
        order = order[left[order]]
    return order


def _mixed(lengths: Ints, seed: tuple[int, ...]) -> Ints:
    # Each row draws a number, whose lowest bits then say of which piece it is: sorting them mixes the pieces.
    whose = np.repeat(np.arange(len(lengths), dtype=np.uint32), lengths)
    piece = (1 << _bits(whose[-1:])) - 1
    dtype = np.dtype(np.uint32 if (piece + 1) * len(whose) < 1 << 32 else np.uint64)
    most = np.iinfo(dtype).max
    drawn = np.random.default_rng(seed).integers(most, size=len(whose), dtype=dtype, endpoint=True)
    drawn &= dtype.type(most - piece)
    drawn |= whose
    drawn.sort()
    order: Ints = np.empty(len(whose), np.int64)
    order[np.argsort((drawn & dtype.type(piece)).astype(np.min_scalar_type(piece)), kind="stable")] = np.arange(
        len(whose)
    )
    return order
