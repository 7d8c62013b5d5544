"""Finds the classes of a label column, in one Spark job before a fit that also counts nulls."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql import types as T  # noqa: N812 - likewise

from spark_hvd.data.readers.errors import DataError, refuse_nulls
from spark_hvd.estimators.classifiers.labels import Labels
from spark_hvd.runner.spark.names import job_named
from spark_hvd.runner.spark.series import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MAX_CLASSES = 10_000
_INTEGERS = {"tinyint", "smallint", "int", "bigint", "boolean"}


def labels_of(df: DataFrame, column: str, features: str, who: str) -> Labels:
    """Find the classes of ``column`` in all rows, and check that neither it nor ``features`` has nulls.

    ``column`` holds text, numbers or booleans, or arrays of 0 and 1. ``who`` is the caller, which the Spark UI shows.

    Raises:
        DataError: There are nulls, fewer than two classes or too many, or arrays of different lengths; or the type of
            ``column`` is not allowed.
    """
    kind = df.schema[column].dataType
    text = kind.simpleString()
    missing = F.sum(F.col(quoted(features)).isNull().cast("int")).alias("missing")
    if isinstance(kind, T.ArrayType) and isinstance(kind.elementType, T.NumericType):
        return _multi_label(df, column, features, text, missing, who)
    if not isinstance(kind, T.NumericType | T.StringType | T.BooleanType):
        raise DataError(
            f"label column {column!r} is of type {text}: expected text, numbers or booleans that are classes, or "
            "arrays with 0 or 1 for each class"
        )
    grouped = df.groupBy(F.col(quoted(column)).alias("class")).agg(F.count("*").alias("rows"), missing)
    with job_named(grouped, f"spark_hvd: {who} looks for the classes of {column!r}"):
        rows = grouped.limit(_MAX_CLASSES + 1).collect()
    total = sum(row["rows"] for row in rows)
    refuse_nulls(features, sum(row["missing"] for row in rows), f"{total} rows")
    refuse_nulls(column, sum(row["rows"] for row in rows if row["class"] is None), f"{total} rows")
    classes = [_plain(row["class"], text) for row in rows]
    if any(isinstance(each, float) and math.isnan(each) for each in classes):
        raise DataError(f"label column {column!r} has NaN: drop these rows before fit")
    if not 2 <= len(classes) <= _MAX_CLASSES:
        has = f"more than {_MAX_CLASSES:,} values" if classes else "no rows"
        has = f"one value only, {classes[0]!r}" if len(classes) == 1 else has
        raise DataError(f"label column {column!r} has {has}: expected from 2 to {_MAX_CLASSES:,} classes")
    return Labels(column, text, len(classes), tuple(sorted(classes)))


def _multi_label(df: DataFrame, column: str, features: str, text: str, missing: Any, who: str) -> Labels:
    values = F.col(quoted(column))
    wrong = F.exists(values, lambda each: each.isNull() | ((each != 0) & (each != 1)))
    statistics = df.agg(
        F.count("*").alias("rows"),
        missing,
        F.sum(values.isNull().cast("int")).alias("nulls"),
        F.min(F.size(values)).alias("shortest"),
        F.max(F.size(values)).alias("longest"),
        F.sum(wrong.cast("int")).alias("wrong"),
    )
    with job_named(statistics, f"spark_hvd: {who} looks for the classes of {column!r}"):
        row = statistics.collect()[0]
    if not row["rows"]:
        raise DataError(f"label column {column!r} has no rows: expected at least one")
    refuse_nulls(features, row["missing"], f"{row['rows']} rows")
    refuse_nulls(column, row["nulls"], f"{row['rows']} rows")
    if row["shortest"] != row["longest"] or not row["longest"]:
        raise DataError(
            f"label column {column!r} has arrays of {row['shortest']} to {row['longest']} values: expected 0 or 1 "
            "for each class, the same number in all rows"
        )
    if row["wrong"]:
        raise DataError(f"label column {column!r} has {row['wrong']} arrays with other values than 0 and 1")
    return Labels(column, text, row["longest"])


def _plain(value: Any, text: str) -> Any:
    """Return a class as a value that JSON can hold; decimals become floating-point."""
    return value if text in _INTEGERS or text == "string" else float(value)
