"""Errors in data, which the driver, Spark tasks and ranks raise, and the one place that refuses nulls."""

from __future__ import annotations


class DataError(RuntimeError, ValueError):
    """The data do not fit the parameters: missing columns, wrong types, nulls, ragged arrays, or too few rows."""

    __module__ = "spark_hvd"


class TableError(DataError):
    """A Delta or Iceberg table has a feature that ranks cannot read in place. Spark may be able to read it."""


def refuse_nulls(
    name: str, nulls: int, of: str, where: str = "", *, first: int | None = None, inside: bool = False, remedy: str = ""
) -> None:
    """Refuse nulls in the values that a model gets.

    Args:
        name: The column.
        nulls: Number of nulls.
        of: The values among which they were found, such as "80 rows".
        where: File and row group; "" if unknown.
        first: Number of the row with the first null.
        inside: Whether the nulls are inside lists.
        remedy: What to do about them; "" for the usual advice.

    Raises:
        DataError: There are nulls.
    """
    if nulls:
        if inside and not remedy:
            rows = f"df.where(F.forall({name!r}, lambda value: value.isNotNull()))"
            remedy = f"fill them or drop these rows first, e.g. {rows}"
        at = "" if first is None else f", the first in row {first}"
        place = where and f" in {where}"
        raise DataError(f"column {name!r}{place} has {nulls} null(s) in {of}{at}: {remedy or _without_nulls(name)}")


def refuse_unfit_nulls(name: str, nulls: int, among: str) -> None:
    """Refuse nulls in a batch for the user's program whose type has no NaN, NaT or None to represent them.

    Raises:
        DataError: There are ``nulls`` nulls ``among`` the values.
    """
    if nulls:
        remedy = f"{_without_nulls(name)}, or handle them in a collate_fn"
        raise DataError(f"column {name!r} has {nulls} null(s) among {among}. Next: {remedy}")


def _without_nulls(name: str) -> str:
    """Return the advice that is right for any Spark type."""
    return f"fill or drop them first, e.g. df.na.drop(subset=[{name!r}])"


def without_nan(name: str, spark_type: str) -> str:
    """Return the advice for NaN or infinite values in a column of this Spark type.

    Spark's functions for missing values do not look into vectors and arrays, and accept infinite values.
    """
    if spark_type == "vector":
        return (
            f"df.na.fill does not look into vectors: fill the columns that {name!r} is assembled from, with "
            "pyspark.ml.feature.Imputer, or leave such rows out there, by VectorAssembler(handleInvalid='skip')"
        )
    if spark_type.startswith("array<"):
        return (
            "df.na.fill does not look into arrays: leave such rows out, e.g. "
            f"df.where(F.forall({name!r}, lambda value: F.abs(value) < float('inf')))"
        )
    if spark_type:
        return (
            f"Fill or leave them out before fit: df.na.fill(0.0, [{name!r}]), df.na.drop(subset=[{name!r}]); infinite "
            f"values by df.where(F.abs({name!r}) < float('inf'))"
        )
    return "Fill or leave them out where this column is made"
