"""Converts tables in this program's memory to Spark DataFrames with the same values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark

from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.schemas.table import type_of_types
from spark_hvd.runner.spark.private import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.time32("s"): pa.time64("us"),
    pa.time32("ms"): pa.time64("us"),
    pa.time64("ns"): pa.time64("us"),
}


def frame_of(session: SparkSession, name: str, table: pa.Table) -> DataFrame:
    """Return the rows of ``data[name]`` as a DataFrame, with numbers and times widened to types that Spark has.

    Raises:
        DataError: Spark lacks the type of a column, or cannot hold one of its values.
    """
    for at, field in enumerate(table.schema):
        if (kind := _type_in_spark(field.type)) != field.type:
            try:
                table = table.set_column(at, field.with_type(kind), table.column(at).cast(kind))
            except pa.ArrowException as error:
                raise DataError(
                    f"data[{name!r}]: column {field.name!r} of {field.type} has a value that {kind}, its type in "
                    f"Spark, cannot hold: {error}. Next: convert it in the table, or write Parquet and give the path"
                ) from error
    old = int(pyspark.__version__.partition(".")[0]) < 4
    schema = pa.schema([field.with_type(_type_before_4(field.type)) for field in table.schema]) if old else table.schema
    for field in schema:
        try:
            spark_schema(pa.schema([field]))
        except Exception as error:  # PySpark's error classes differ between versions, and on Connect
            raise DataError(
                f"data[{name!r}]: column {field.name!r} is {field.type}, for which Spark has no type. Next: convert "
                "it to another type, or leave it out"
            ) from error
    # Without a schema, Spark takes timestamps without a zone for local times of the session.
    if not old:
        return session.createDataFrame(table, spark_schema(schema))
    # Through pandas, nulls of integers would become NaN, and structs maps.
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        try:
            columns.append(_objects(column))
        except (OverflowError, TypeError, ValueError) as error:
            raise DataError(
                f"data[{name!r}]: column {field.name!r} of {field.type} has a value that cannot be passed to Spark "
                f"{pyspark.__version__}: {error}. Next: convert it in the table, or write Parquet and give the path"
            ) from error
    return session.createDataFrame([*zip(*columns, strict=True)], spark_schema(schema))


def _objects(column: pa.ChunkedArray) -> list[Any]:
    values: list[Any] = column.to_pylist()
    if not pa.types.is_map(column.type):
        return values
    maps = [None if value is None else dict(value) for value in values]
    for value, made in zip(values, maps, strict=True):
        if made is not None and len(made) < len(value):
            raise ValueError(f"the map {value} has a key twice")
    return maps


def _type_before_4(kind: pa.DataType) -> pa.DataType:
    """What Spark 3.5 calls a type whose values as Python's objects are the same."""
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_type_before_4(kind.value_type))
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    return pa.date32() if pa.types.is_date64(kind) else type_of_types(kind, _type_before_4)


def _type_in_spark(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_decimal256(kind) and kind.scale <= 38:
        return pa.decimal128(min(kind.precision, 38), kind.scale)
    return _WIDER.get(kind) or type_of_types(kind, _type_in_spark)
