"""A DataFrame with the outputs of a model as new columns: one Arrow UDF, or a pandas UDF before Spark 4.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import UserDefinedType

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
    result = _predicted(job, inputs)
    columns = [_taken_out(result[f"c{i}"], output) for i, output in enumerate(job.plan)]
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


def _predicted(job: Prediction, inputs: Sequence[SparkColumn]) -> SparkColumn:
    ddl = ", ".join(f"c{i} {output.arrow_ddl}" for i, output in enumerate(job.plan))
    columns = [each.alias(f"c{i}") for i, each in enumerate(inputs)]
    if hasattr(F, "arrow_udf"):  # since Spark 4.1
        return F.arrow_udf(arrow_function(job), ddl)(F.struct(*columns))  # type: ignore[no-any-return]
    for i, name in enumerate(job.feed.columns):  # pandas would turn null into NaN
        message = f"column {name!r} has nulls: fill or drop them before transform or predict"
        refused = F.raise_error(F.lit(message))
        column = F.coalesce(columns[i], refused)
        if isinstance(job.feed, TensorFeed) and (depth := job.feed.inputs[i].column.spark_type.count("array<")):
            column = F.when(_has_nulls(column, depth), refused).otherwise(column)
        columns[i] = column.alias(f"c{i}")
    return F.pandas_udf(pandas_function(job), ddl)(F.struct(*columns))  # type: ignore[attr-defined, no-any-return]


def _has_nulls(lists: SparkColumn, depth: int) -> SparkColumn:
    """Return whether lists, nested to this depth, have nulls at any level below the first."""
    if depth == 1:
        return F.exists(lists, lambda each: each.isNull())
    return F.exists(lists, lambda each: each.isNull() | _has_nulls(each, depth - 1))


def _taken_out(field: SparkColumn, output: Output) -> SparkColumn:
    if output.spark_type == "vector":
        from pyspark.ml.functions import array_to_vector

        return array_to_vector(field).alias(output.name)
    same = output.spark_type == output.arrow_ddl
    return (field if same else field.cast(output.spark_type)).alias(output.name)
