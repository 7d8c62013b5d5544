"""Columns: which types become which tensors, and the values that Arrow gets."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import SparkSession
from pyspark.sql import types as T  # noqa: N812

from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators.data.columns import check_columns, columns_of, expression_of

SCHEMA = T.StructType(
    [
        T.StructField("byte", T.ByteType()),
        T.StructField("short", T.ShortType()),
        T.StructField("int", T.IntegerType()),
        T.StructField("long", T.LongType()),
        T.StructField("float", T.FloatType()),
        T.StructField("double", T.DoubleType()),
        T.StructField("decimal", T.DecimalType(10, 2)),
        T.StructField("boolean", T.BooleanType()),
        T.StructField("a.dot", T.DoubleType()),
        T.StructField("a space", T.IntegerType()),
        T.StructField("tick`s", T.LongType()),
        T.StructField("numbers", T.ArrayType(T.DoubleType())),
        T.StructField("nested", T.ArrayType(T.ArrayType(T.DecimalType(6, 3)))),
        T.StructField("flags", T.ArrayType(T.BooleanType())),
        T.StructField("vector", VectorUDT()),
        T.StructField("bytes", T.BinaryType()),
    ]
)
ROW = (1, 2, 3, 2**40, 0.5, 0.25, Decimal("1.50"), True, 2.5, 7, 8, [1.0, 2.0], [[Decimal("0.125")]], [True, False])
ROWS = [(*ROW, Vectors.dense([1, 0, 2]), b"ab"), (*ROW, Vectors.sparse(3, [1], [4.0]), b""), (*[None] * 16,)]


def test_dtypes_shapes_and_spark_types() -> None:
    columns = columns_of(SCHEMA, SCHEMA.fieldNames(), decoders={"bytes"})
    assert [(c.name, c.dtype, c.shape, c.spark_type) for c in columns] == [
        ("byte", "int8", (), "tinyint"),
        ("short", "int16", (), "smallint"),
        ("int", "int32", (), "int"),
        ("long", "int64", (), "bigint"),
        ("float", "float32", (), "float"),
        ("double", "float32", (), "double"),
        ("decimal", "float32", (), "decimal(10,2)"),
        ("boolean", "bool", (), "boolean"),
        ("a.dot", "float32", (), "double"),
        ("a space", "int32", (), "int"),
        ("tick`s", "int64", (), "bigint"),
        ("numbers", "float32", None, "array<double>"),
        ("nested", "float32", None, "array<array<decimal(6,3)>>"),
        ("flags", "bool", None, "array<boolean>"),
        ("vector", "float32", None, "vector"),
        ("bytes", "object", None, "binary"),
    ]
    assert {c.encoding for c in columns} == {"plain"}


def test_compress_sparse_concerns_vectors_only_and_names_count_once() -> None:
    columns = columns_of(SCHEMA, ["vector", "numbers", "vector"], compress_sparse=True)
    assert [(column.name, column.encoding) for column in columns] == [("vector", "sparse"), ("numbers", "plain")]


def test_arrow_gets_the_values_of_every_type(spark: SparkSession) -> None:
    df = spark.createDataFrame(ROWS, SCHEMA)
    columns = columns_of(SCHEMA, SCHEMA.fieldNames(), decoders={"bytes"})
    table = df.select([expression_of(column) for column in columns]).toArrow()
    expected: list[Any] = [1, 2, 3, 2**40, 0.5, 0.25, 1.5, True, 2.5, 7, 8, [1, 2], [[0.125]], [True, False]]
    assert table.column_names == SCHEMA.fieldNames()
    assert [list(row.values()) for row in table.to_pylist()] == [
        [*expected, [1, 0, 2], b"ab"],
        [*expected, [0, 4, 0], b""],
        [None] * 16,
    ]
    assert [str(kind).replace("element: ", "").replace(" not null", "") for kind in table.schema.types] == [
        *("int8", "int16", "int32", "int64", "float", "float", "float", "bool", "float", "int32", "int64"),
        *("list<float>", "list<list<float>>", "list<bool>", "list<float>", "binary"),
    ]


def test_sparse_encoding_of_sparse_dense_empty_and_null_vectors(spark: SparkSession) -> None:
    df = spark.createDataFrame([*((row[-2],) for row in ROWS), (Vectors.dense([]),)], _vectors())
    (column,) = columns_of(df.schema, ["v"], compress_sparse=True)
    table = df.select(expression_of(column)).toArrow()
    assert table["v"].to_pylist() == [
        {"size": 3, "indices": [0, 1, 2], "values": [1, 0, 2]},
        {"size": 3, "indices": [1], "values": [4]},
        None,
        {"size": 0, "indices": [], "values": []},
    ]
    assert str(table.schema.types[0].field("values").type.value_type) == "float"


def _vectors() -> T.StructType:
    return T.StructType([T.StructField("v", VectorUDT())])


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("string", "StringIndexer"),
        ("varchar(3)", "StringIndexer"),
        ("timestamp", "unix_timestamp"),
        ("timestamp_ntz", "unix_timestamp"),
        ("date", "dayofyear"),
        ("map<string,int>", "element_at"),
        ("struct<x:int>", "withColumn"),
        ("binary", "decode it into an array"),
        ("array<string>", "StringIndexer"),
        ("array<array<timestamp>>", "unix_timestamp"),
        ("interval day to second", "cast"),
        ("void", "cast"),
    ],
)
def test_types_without_a_tensor_name_column_type_and_remedy(kind: str, hint: str, spark: SparkSession) -> None:
    schema = spark.sql(f"select cast(null as {kind}) as c").schema
    with pytest.raises(DataError, match=hint) as caught:
        columns_of(schema, ["c"])
    assert "'c'" in str(caught.value)
    assert schema["c"].dataType.simpleString() in str(caught.value)


def test_missing_columns_are_named_with_the_nearest_name() -> None:
    with pytest.raises(DataError, match=r"feature_cols names 'Doubel', .*Did you mean 'double'\? It has 'byte'"):
        check_columns(SCHEMA, ["int", "Doubel"], "feature_cols")
    with pytest.raises(DataError, match=r"label_cols names 'zzz', which the DataFrame does not have\. It has 'byte'"):
        check_columns(SCHEMA, ["zzz"], "label_cols")
    with pytest.raises(DataError, match=r"Did you mean 'a\.dot'"):
        columns_of(SCHEMA, ["a_dot"])
    check_columns(SCHEMA, SCHEMA.fieldNames(), "feature_cols")


def test_a_name_that_the_dataframe_has_twice(spark: SparkSession) -> None:
    schema = spark.sql("select 1 as x, 2 as x, 3 as y").schema
    with pytest.raises(DataError, match=r"'x', which the DataFrame has 2 times"):
        columns_of(schema, ["x"])
    assert columns_of(schema, ["y"]) == (Column("y", "int32", (), "int"),)
