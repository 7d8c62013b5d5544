"""What is wrong with data, wherever it is found: on a driver, in a Spark task, in a rank. Nulls are refused here."""

from __future__ import annotations


class DataError(RuntimeError, ValueError):
    """The data do not fit the parameters: a column missing or of a wrong type, nulls, ragged arrays, too few rows."""

    __module__ = "spark_hvd"


class TableError(DataError):
    """A Delta or Iceberg table has what ranks do not read in place, and Spark may."""


def refuse_nulls(
    name: str, nulls: int, of: str, where: str = "", *, first: int | None = None, inside: bool = False, remedy: str = ""
) -> None:
    """Refuse nulls in what models get, in a column or ``inside`` of its lists.

    Raises:
        DataError: There are so many ``of`` some rows, the ``first`` in the row of that number.
    """
    if nulls:
        if inside and not remedy:
            some = f"df.where(F.forall({name!r}, lambda value: value.isNotNull()))"
            remedy = f"fill them or drop these rows first, e.g. {some}"
        at = "" if first is None else f", the first in row {first}"
        place = where and f" in {where}"
        raise DataError(f"column {name!r}{place} has {nulls} null(s) in {of}{at}: {remedy or _without_nulls(name)}")


def refuse_unfit_nulls(name: str, nulls: int, among: str) -> None:
    """A batch that a program asks for has NaN, NaT or None for a null; a type without these has none.

    Raises:
        DataError: There are so many ``among`` values of such a type.
    """
    if nulls:
        remedy = f"{_without_nulls(name)}, or take the batch apart in a collate_fn"
        raise DataError(f"column {name!r} has {nulls} null(s) among {among}. Next: {remedy}")


def _without_nulls(name: str) -> str:
    """Right for any type of Spark's."""
    return f"fill or drop them first, e.g. df.na.drop(subset=[{name!r}])"


def without_nan(name: str, spark_type: str) -> str:
    """Return the advice for NaN or infinite values in a column of this Spark type, for messages.

    Spark's own functions for missing values look into neither vectors nor arrays, and take infinite values for numbers.
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
