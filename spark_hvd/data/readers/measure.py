"""Checks all rows before training starts: no nulls, lists of equal length, and usable weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError, refuse_nulls


@dataclass(frozen=True, slots=True)
class Uses:
    """The names of columns with a special use.

    Attributes:
        weights: The column of the rows' weights.
        labels: The columns of labels.
        nullable: The columns that may have nulls, because ``transformation_fn`` processes them first.
    """

    weights: str | None = None
    labels: tuple[str, ...] = ()
    nullable: tuple[str, ...] = ()


_NOTHING = Uses()


@dataclass(slots=True)
class ColumnFindings:
    """What was measured of the columns of some rows.

    Attributes:
        rows: Number of rows.
        nulls: Column name -> number of rows where it is null.
        inner_nulls: Column name -> number of nulls inside its lists.
        shapes: Column name -> shape of its values; binary columns have none.
        weights: Name of a data set ("training", "validation") -> sum of the weights of its rows, if they have weights.
        odd_weights: Number of weights that are negative, NaN or infinite, and one of them.
        lowest: Name of a label column -> its lowest number.
    """

    rows: int = 0
    nulls: dict[str, int] = field(default_factory=dict)
    inner_nulls: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    odd_weights: tuple[int, float] = (0, 0.0)
    lowest: dict[str, float] = field(default_factory=dict)

    def add(self, column: Column, array: pa.Array, uses: Uses = _NOTHING) -> None:
        """Measure a column of some rows; the caller adds their number to ``rows``.

        Raises:
            DataError: Lists or vectors have different lengths.
        """
        if column.name in uses.nullable:
            array = array.drop_null()
        if self.count(column.name, array) or column.dtype == "object" or not len(array):
            return
        if column.encoding == "sparse":
            sizes = pc.min_max(array.field(array.type.get_field_index("size")))
            self._agree(column.name, (_one(sizes["min"].as_py() or 0, sizes["max"].as_py() or 0, column.name),))
            return
        if column.name in uses.labels and column.name not in uses.nullable and not pa.types.is_nested(array.type):
            lowest = pc.min(array).as_py()
            if lowest is not None:  # it is None if all values are NaN
                self._lower(column.name, float(lowest))
        values, shape = array, []
        while is_list(values.type):
            shape.append(_one(*least_and_most(values), column.name))
            values = values.flatten()
            if _count(self.inner_nulls, column.name, values):
                return
        self._agree(column.name, tuple(shape))

    def count(self, name: str, array: pa.Array) -> int:
        """Count the nulls of a column of some rows, and return their number."""
        return _count(self.nulls, name, array)

    def weigh(self, dataset: str, weights: pa.Array | pa.ChunkedArray) -> None:
        """Add the weights of some rows of a data set: numbers without nulls. Lists of weights are ignored."""
        if not len(weights) or pa.types.is_nested(weights.type):
            return
        values = weights.to_numpy(zero_copy_only=False)
        odd = values[~(np.isfinite(values) & (values >= 0))]
        if len(odd):
            self.odd_weights = (self.odd_weights[0] + len(odd), float(odd[0]))
        self.weights[dataset] = self.weights.get(dataset, 0.0) + float(values.sum())

    @property
    def has_nulls(self) -> bool:
        """Whether a null was found."""
        return bool(self.nulls or self.inner_nulls)

    @classmethod
    def together(cls, parts: Iterable[ColumnFindings]) -> ColumnFindings:
        """Merge the findings of several tasks.

        Raises:
            DataError: Lists or vectors have different lengths.
        """
        parts = list(parts)
        whole = cls(sum(part.rows for part in parts), _sum(part.nulls for part in parts))
        whole.inner_nulls = _sum(part.inner_nulls for part in parts)
        for part in parts:
            for name, shape in part.shapes.items():
                whole._agree(name, shape)
            for name, lowest in part.lowest.items():
                whole._lower(name, lowest)
            for name, weight in part.weights.items():
                whole.weights[name] = whole.weights.get(name, 0.0) + weight
            if part.odd_weights[0]:
                whole.odd_weights = (whole.odd_weights[0] + part.odd_weights[0], part.odd_weights[1])
        return whole

    def check(self, weights: str | None = None) -> None:
        """Check that there are no nulls, and that the weights in the column ``weights`` can be used.

        Raises:
            DataError: There are nulls; or weights are negative, NaN or infinite, or all are 0.
        """
        for name, count in self.nulls.items():
            refuse_nulls(name, count, f"{self.rows} rows")
        for name, count in self.inner_nulls.items():
            refuse_nulls(name, count, f"the lists of {self.rows} rows", inside=True)
        if weights is None:
            return
        if self.odd_weights[0]:
            raise DataError(no_weights(weights, *self.odd_weights, f"{self.rows} rows"))
        for dataset, total in self.weights.items():
            if not total:
                raise DataError(
                    f"sample_weight_col={weights!r}: all weights of the rows for {dataset} are 0: expected one "
                    "above 0. Check how that column is made, or omit sample_weight_col"
                )

    def of(self, columns: Sequence[Column]) -> tuple[Column, ...]:
        """Return ``columns`` with the measured shapes and lowest labels."""
        return tuple(
            replace(each, shape=self.shapes.get(each.name, each.shape), lowest=self.lowest.get(each.name))
            for each in columns
        )

    def _lower(self, name: str, value: float) -> None:
        self.lowest[name] = min(value, self.lowest.get(name, value))

    def _agree(self, name: str, shape: tuple[int, ...]) -> None:
        known = self.shapes.setdefault(name, shape)
        if known != shape:
            raise DataError(_ragged(name, known, shape))


def no_weights(name: str, odd: int, one: float, where: str) -> str:
    """Return the error message for unusable weights of a column: their number ``odd``, and ``one`` of them."""
    return (
        f"sample_weight_col={name!r} has {odd} of {where} whose weight is negative, NaN or infinite, such as {one:g}: "
        f"expected numbers from 0. Correct or drop these rows, for example df.where(F.col({name!r}) >= 0)"
    )


def _count(nulls: dict[str, int], name: str, array: pa.Array) -> int:
    if array.null_count:
        nulls[name] = nulls.get(name, 0) + array.null_count
    return int(array.null_count)


def is_list(kind: pa.DataType) -> bool:
    """Return whether a type is a list type: list, large list or fixed-size list."""
    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def least_and_most(lists: pa.Array) -> tuple[int, int]:
    """Return the minimum and maximum length of the lists in an array; 0 if there are none."""
    if pa.types.is_fixed_size_list(lists.type):
        return lists.type.list_size, lists.type.list_size
    lengths = pc.min_max(pc.list_value_length(lists))
    return lengths["min"].as_py() or 0, lengths["max"].as_py() or 0


def _one(least: int, most: int, name: str) -> int:
    if least != most:
        raise DataError(_ragged(name, (least,), (most,)))
    return least


def _ragged(name: str, one: tuple[int, ...], other: tuple[int, ...]) -> str:
    flat = len(one) == len(other) == 1
    values = f"of length {one[0]} and of {other[0]}" if flat else f"of shape {one} and of {other}"
    return (
        f"column {name!r} has lists or vectors {values}: expected one length for all rows. "
        "Pad or cut them to one length before fit."
    )


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
