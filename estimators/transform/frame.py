"""A DataFrame with the outputs of a model as new columns: one Arrow UDF, or a pandas UDF before Spark 4.1.

Pandas changes values: null and NaN become the same, times lose their zone, maps get each other's keys. So columns go to
a pandas UDF, and come back, in a form that it does not change, or are refused, except for numbers within structs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DoubleType,
    FloatType,
    IntegralType,
    MapType,
    StructType,
    TimestampType,
    UserDefinedType,
)

from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators.transform.feeds import TensorFeed
from spark_hvd.estimators.transform.outputs import Output
from spark_hvd.estimators.transform.predict import Prediction, arrow_function, pandas_function
from spark_hvd.runner.spark.session import tells_case_apart

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

_ROW = "__spark_hvd_row"


def appended(dataset: DataFrame, job: Prediction, inputs: Sequence[SparkColumn]) -> DataFrame:
    """Return ``dataset`` with a column for each output that ``job`` plans; nothing is computed yet.

    ``dataset`` must not have these columns. ``inputs`` has an expression for each column of the job's feed.
    """
    # one expression for all columns, so that Spark runs it once, and only if one of them is used
    inputs = [each.alias(f"c{i}") for i, each in enumerate(inputs)]
    fields = _by_arrow(job, inputs) if hasattr(F, "arrow_udf") else _by_pandas(dataset, job, inputs)
    columns = [_taken_out(field, output) for field, output in zip(fields, job.plan, strict=True)]
    return _row_by_row(dataset).select("*", *columns).drop(_ROW)


def check_new(dataset: DataFrame, names: Sequence[str], what: str, parameters: str) -> None:
    """Check that columns can be appended.

    Raises:
        DataError: One of them already exists, or is named twice.
    """
    fold = str if tells_case_apart(dataset.sparkSession) else str.casefold
    existing = {fold(column) for column in dataset.columns}
    for name in names:
        if fold(name) in existing:
            raise DataError(
                f"the DataFrame already has a column {name!r}, which {what} would append: drop it, or choose other "
                f"names with {parameters}"
            )
        existing.add(fold(name))


def _row_by_row(dataset: DataFrame) -> DataFrame:
    """Return the DataFrame with a column ``_ROW``, planned so that an Arrow UDF works on it.

    Since Spark 4.3, a UDF directly on a columnar scan (Parquet, cached data) gets all columns in columnar form, and
    fails on vectors, UNSUPPORTED_DATATYPE, even if it does not use them. An explode into one row each passes on rows.
    Unlike other ways, it lets Spark push filters down and keeps the partitions.
    """
    if any(isinstance(field.dataType, UserDefinedType) for field in dataset.schema.fields):
        return dataset.select("*", F.explode(F.array(F.lit(0))).alias(_ROW))
    return dataset


def _ddl(job: Prediction) -> str:
    return ", ".join(f"c{i} {output.arrow_ddl}" for i, output in enumerate(job.plan))


def _by_arrow(job: Prediction, inputs: Sequence[SparkColumn]) -> list[SparkColumn]:
    """Return the outputs by an Arrow UDF, which Spark has since 4.1."""
    result = F.arrow_udf(arrow_function(job), _ddl(job))(F.struct(*inputs))  # type: ignore[attr-defined]
    return [result[f"c{i}"] for i in range(len(job.plan))]


def _by_pandas(dataset: DataFrame, job: Prediction, inputs: Sequence[SparkColumn]) -> list[SparkColumn]:
    """Return the outputs by a pandas UDF, to which inputs go in a form that pandas does not change.

    Raises:
        DataError: A column has a type that pandas would change.
    """
    columns: list[SparkColumn] = []
    times: dict[str, str] = {}
    zone = str(dataset.sparkSession.conf.get("spark.sql.session.timeZone"))
    for column, field, name in zip(inputs, dataset.select(*inputs).schema, job.feed.columns, strict=True):
        inner, depth, nullable = field.dataType, 0, False
        while isinstance(inner, ArrayType):
            nullable |= inner.containsNull
            inner, depth = inner.elementType, depth + 1
        if wrong := _changed(inner, nested=depth > 0):
            kind, (why, instead) = field.dataType.simpleString(), wrong
            raise DataError(f"column {name!r} is of type {kind}: before Spark 4.1, {why}. Pass {instead}")
        # pandas turns null into NaN
        refused = F.raise_error(F.lit(f"column {name!r} has nulls: fill or drop them before transform or predict"))
        kept = F.coalesce(column, refused)
        if nullable and (isinstance(job.feed, TensorFeed) or isinstance(inner, FloatType | DoubleType | IntegralType)):
            kept = F.when(_has_nulls(kept, depth), refused).otherwise(kept)
        if isinstance(inner, TimestampType):
            times[field.name], kept = zone, F.unix_micros(kept)
        columns.append(kept.alias(field.name))
    result = F.pandas_udf(pandas_function(job, times), _ddl(job))(F.struct(*columns))  # type: ignore[attr-defined]
    return [_with_nan(result[f"c{i}"], output) for i, output in enumerate(job.plan)]


def _changed(type_: DataType, *, nested: bool) -> tuple[str, str] | None:
    """Return what pandas changes in values of a type, and what to pass instead; None if nothing."""
    if isinstance(type_, MapType):
        return "each row would get the keys of all rows", "F.map_entries(column)"
    if isinstance(type_, TimestampType) and nested:
        return "times within it would lose their zone", "F.unix_micros of each"
    parts = [type_.elementType] if isinstance(type_, ArrayType) else []
    if isinstance(type_, StructType):
        parts = [field.dataType for field in type_.fields]
    return next((found for part in parts if (found := _changed(part, nested=True))), None)


def _has_nulls(lists: SparkColumn, depth: int) -> SparkColumn:
    """Return whether lists, nested to this depth, have nulls at any level below the first."""
    if depth == 1:
        return F.exists(lists, lambda each: each.isNull())
    return F.exists(lists, lambda each: each.isNull() | _has_nulls(each, depth - 1))


def _with_nan(field: SparkColumn, output: Output) -> SparkColumn:
    """Return lists with NaN where PySpark has made null of it."""
    if output.element not in ("float", "double"):
        return field

    def filled(value: SparkColumn, depth: int) -> SparkColumn:
        if not depth:
            return F.coalesce(value, F.lit(math.nan).cast(output.element))
        return F.transform(value, lambda each: filled(each, depth - 1))

    return (
        F.when(_has_nulls(field, output.depth), filled(field, output.depth)).otherwise(field) if output.depth else field
    )


def _taken_out(field: SparkColumn, output: Output) -> SparkColumn:
    if output.spark_type == "vector":
        from pyspark.ml.functions import array_to_vector

        return array_to_vector(field).alias(output.name)
    same = output.spark_type == output.arrow_ddl
    return (field if same else field.cast(output.spark_type)).alias(output.name)
