"""In which order the rows of a DataFrame stand in an epoch, and which rank has them. Pure functions of numbers.

Every row belongs to one of :data:`UNITS` units. A rank owns consecutive units; an epoch goes through them in an order
of its own. So neither the order in which rows arrive nor the number of ranks decides the line of an epoch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

UNITS = 4096
STRIDE = 2531
"""From a row's unit to the next row's: odd, and the golden section of UNITS, so that few rows too are spread evenly."""

UNIT, ID, SOURCE = "__unit", "__id", "__source"
"""The columns that Spark gives tasks besides :func:`struct_of`; the last tells of which data set a row is."""

Ints = np.ndarray[Any, np.dtype[np.int64]]
Seed = tuple[int, int]
"""The user's, and the epoch's number."""


def struct_of(source: int) -> str:
    """The column that holds the rows of a data set."""
    return f"__row{source}"


def units_of(part: int, parts: int) -> range:
    """The units of one of ``parts`` ranks."""
    return range(-(-part * UNITS // parts), -(-(part + 1) * UNITS // parts))


def order_of(seed: Seed | None) -> Ints:
    """The units in the order of an epoch; ascending for None."""
    return np.arange(UNITS) if seed is None else np.random.default_rng(seed).permutation(UNITS)


def keys_of(ids: Ints, seed: Seed | None) -> Ints | np.ndarray[Any, np.dtype[np.uint64]]:
    """By what rows of a unit are ordered: no two ids have the same key. The ids themselves for None."""
    if seed is None:
        return ids
    keys = ids.view(np.uint64) ^ np.random.default_rng(seed).integers(1 << 64, dtype=np.uint64, endpoint=False)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64, a bijection
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(factor)
    keys ^= keys >> np.uint64(31)
    return keys
