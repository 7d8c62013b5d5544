"""The order of a DataFrame's rows in an epoch, and the rank of each row. Pure functions of numbers.

A hash of its number puts every row into one of :data:`BUCKETS` buckets, as Spark's bucketing does. The concatenated
buckets are cut into one share per rank; shares differ by one row at most. Each epoch has its own order of the buckets.
So the order of an epoch depends neither on the order in which rows arrive nor on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from spark_hvd.data.readers.sharding import Ints, stretches

BUCKETS = 4096
"""Number of hash buckets of a data set; they have nothing to do with the buckets of gradients."""
STRIDE = 2531
"""Step between the buckets of consecutive rows: odd and the golden section of BUCKETS, which spreads even few rows."""

BUCKET, ID, SOURCE = "__bucket", "__id", "__source"
"""The columns that Spark passes to tasks besides :func:`struct_of`. SOURCE is the number of the row's data set."""

ROW = (1 << 33) - 1
"""The bits of monotonically_increasing_id() that number rows; higher bits number partitions."""

Piece = tuple[int, int, int, int]
"""A range of rows of a bucket: the bucket, the first row, how many rows from there on are done, and how many there are.

The rows of a bucket are counted in the bucket's order, which differs in each epoch.
"""

Seed = tuple[int, int]
"""The user's seed, and the number of the epoch."""


def struct_of(source: int) -> str:
    """Return the name of the column that holds the rows of a data set, if there are several data sets."""
    return f"__row{source}"


OURS = {BUCKET, ID, SOURCE, struct_of(0)}
"""Reserved names, which no user's column may have."""


class Owned(NamedTuple):
    """The rows of the buckets that a rank takes in every epoch, in ascending order; none is empty.

    Attributes:
        buckets: The numbers of the buckets.
        firsts: The first row of each bucket that the rank takes, in the order of the epoch.
        lengths: The number of rows that it takes from there on.
    """

    buckets: Ints
    firsts: Ints
    lengths: Ints


def owned_by(part: int, parts: int, counts: Ints) -> Owned:
    """Return the share of one of ``parts`` ranks in buckets with these numbers of rows; shares differ by a row at most.

    Two ranks share the buckets at the border between them: one takes the first rows, the other takes the last ones.
    """
    ends = np.cumsum(counts)
    each, more = divmod(int(ends[-1]), parts)
    low, high = part * each + min(part, more), (part + 1) * each + min(part + 1, more)
    firsts, stops = (np.clip(edge - (ends - counts), 0, counts) for edge in (low, high))
    buckets = np.flatnonzero(firsts < stops)
    return Owned(buckets, firsts[buckets], (stops - firsts)[buckets])


def buckets_of(part: int, parts: int) -> range:
    """Return the buckets whose rows Spark brings to one of ``parts`` ranks."""
    return range(-(-part * BUCKETS // parts), -(-(part + 1) * BUCKETS // parts))


class Move(NamedTuple):
    """Rows of a bucket that one rank sends to another.

    ``first`` is the number of the first one, in the order of the DataFrame.
    """

    source: int
    target: int
    bucket: int
    first: int
    rows: int


def moves_of(weights: Ints, rows: Ints, parts: Sequence[int], held: Sequence[range], most: int) -> Iterator[list[Move]]:
    """Yield, in rounds, the rows that ranks send each other: buckets that Spark brought to the neighbouring task.

    Spark places rows before they are counted, so tasks have unequal shares. Once all ranks know the number of rows of
    each bucket, each can work out which rank lacks which rows.

    A bucket is sent whole, because which ranks take which of its rows differs in each epoch.

    Args:
        weights: The number of rows or windows of each bucket, whichever are shared equally.
        rows: The number of rows of each bucket.
        parts: The part of each rank. Ranks and parts are numbered differently.
        held: The buckets whose rows each rank can read.
        most: Maximum number of rows that a rank sends to another in a round.
    """
    size, has = len(parts), {part: rank for rank, part in enumerate(parts)}
    pending: dict[tuple[int, int], list[Move]] = {}
    for target, part in enumerate(parts):
        for bucket in owned_by(part, size, weights).buckets.tolist():
            if bucket in held[target]:
                continue
            source = has[bucket * size // BUCKETS]
            of_pair = pending.setdefault((source, target), [])
            for first in range(0, int(rows[bucket]), most):
                of_pair.append(Move(source, target, bucket, first, min(most, int(rows[bucket]) - first)))
    for number in range(max(map(len, pending.values()), default=0)):
        yield [moves[number] for moves in pending.values() if number < len(moves)]


def order_of(seed: Seed | None) -> Ints:
    """Return the buckets in the order of an epoch; ascending for None."""
    return np.arange(BUCKETS) if seed is None else np.random.default_rng(seed).permutation(BUCKETS)


def keys_of(ids: Ints, seed: Seed | None) -> Ints | np.ndarray[Any, np.dtype[np.uint64]]:
    """Return the keys that order the rows of a bucket, all different; without a seed, the ids themselves."""
    if seed is None:
        return ids
    keys = ids.view(np.uint64) ^ np.random.default_rng(seed).integers(1 << 64, dtype=np.uint64, endpoint=False)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64, a bijection
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(factor)
    keys ^= keys >> np.uint64(31)
    return keys


def order_in_buckets(places: np.ndarray[Any, np.dtype[np.int16]], ids: Ints, seed: Seed | None) -> Ints:
    """Return the order of rows: by the places of their buckets, and within each bucket by :func:`keys_of`.

    One integer per row holds its place, as many bits of its key as fit, and its own number. Sorting these takes a third
    of the time of an argsort.
    """
    keys = keys_of(ids, seed).view(np.uint64)
    if seed is None:  # move the bits of the partition next to those of the row, which need fewer than 33 bits
        within = keys & np.uint64(ROW)
        keys = keys >> np.uint64(33) << np.uint64(_bits(within)) | within
    number_bits = _bits(np.arange(len(ids))[-1:])
    above = 64 - _bits(places)
    cut = max(0, _bits(keys) + number_bits - above)
    combined = places.astype(np.uint64) << np.uint64(above) if above < 64 else np.zeros(len(ids), np.uint64)
    combined |= keys >> np.uint64(cut) << np.uint64(number_bits)
    combined |= np.arange(len(ids), dtype=np.uint64)
    combined.sort()
    # If keys are equal without the bits that were cut off, these bits decide.
    if cut and ((combined[1:] ^ combined[:-1]) >> np.uint64(number_bits) == 0).any():
        return np.lexsort((keys, places))
    order: Ints = (combined & np.uint64((1 << number_bits) - 1)).view(np.int64)
    return order


def _bits(numbers: np.ndarray[Any, Any]) -> int:
    return int(numbers.max(initial=0)).bit_length()


def windows_of(pieces: Iterable[Piece], rows: int) -> Iterator[list[Piece]]:
    """Yield groups of pieces, in their order, of at most ``rows`` rows, done or not; a longer piece is alone."""
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
    """Return the order in which a rank takes the rest of a window, as row numbers in its concatenated buckets.

    The rows of a bucket keep their order, mixed with those of the other buckets. The order depends only on lengths, so
    every rank knows how far another is in its buckets, and finished rows do not change the order of the rest.
    ``pieces`` and ``number`` are those of the window. Without a seed, buckets come one after the other.
    """
    _, _, done, lengths = np.array(pieces, np.int64).reshape(-1, 4).T
    order = np.arange(lengths.sum()) if seed is None else _mixed(lengths, (*seed, number))
    if done.any():
        left = np.zeros(len(order), bool)
        left[stretches(np.cumsum(lengths) - lengths + done, lengths - done)] = True
        order = order[left[order]]
    return order


def _mixed(lengths: Ints, seed: tuple[int, ...]) -> Ints:
    # Each row draws a number, whose lowest bits are replaced by its piece. Sorting these numbers mixes the pieces.
    pieces = np.repeat(np.arange(len(lengths), dtype=np.uint32), lengths)
    mask = (1 << _bits(pieces[-1:])) - 1
    dtype = np.dtype(np.uint32 if (mask + 1) * len(pieces) < 1 << 32 else np.uint64)
    highest = np.iinfo(dtype).max
    drawn = np.random.default_rng(seed).integers(highest, size=len(pieces), dtype=dtype, endpoint=True)
    drawn &= dtype.type(highest - mask)
    drawn |= pieces
    drawn.sort()
    order: Ints = np.empty(len(pieces), np.int64)
    order[np.argsort((drawn & dtype.type(mask)).astype(np.min_scalar_type(mask)), kind="stable")] = np.arange(
        len(pieces)
    )
    return order
