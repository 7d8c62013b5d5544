"""How columns of a DataFrame become tensors: the dtype for each Spark type, and the expression that selects a column.

Floating-point numbers, decimals and vectors become float32, or float64 on the way to a dtype whose numbers float32
would lose. Integers and booleans keep their type. Types that cannot become tensors (times, maps, and text unless the
model takes it) are refused before any job runs, and the message says what to do instead.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql import types as T  # noqa: N812 - likewise

from spark_hvd.data.readers.dataset import Column, listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.runner.spark.series import quoted
from spark_hvd.runner.spark.session import active_session
from spark_hvd.world.words import nearest

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import SparkSession

_EXACT: dict[type[T.DataType], str] = {
    T.BooleanType: "bool",
    T.ByteType: "int8",
    T.ShortType: "int16",
    T.IntegerType: "int32",
    T.LongType: "int64",
    T.FloatType: "float32",
}
_WIDE = (T.DoubleType, T.DecimalType)
_SQL_TYPES = {"float32": "float", "float64": "double"}
_NARROW = (None, "float32", "float16", "bfloat16")
_DOUBLE_DIGITS = 15
"""Doubles distinguish all decimals that have at most this many digits."""

_REMEDIES = {
    "string": "turn text into numbers first, for example with pyspark.ml.feature.StringIndexer. A KerasEstimator takes "
    "columns of type string in feature_cols unchanged if Keras runs on TensorFlow (KERAS_BACKEND=tensorflow)",
    "timestamp": "turn it into numbers first, for example F.unix_timestamp(c), F.hour(c), F.dayofweek(c)",
    "date": "turn it into numbers first, for example F.unix_date(c), F.dayofyear(c), F.dayofweek(c)",
    "map": "take the values that you need into columns of their own, for example F.element_at(c, 'key')",
    "struct": "take its fields into columns of their own, for example df.withColumn('x', df['c']['x'])",
    "binary": "pass a function from the bytes of one value to an array in decoders, or decode it into an array first",
    "matrix": "turn it into an array first, for example with pyspark.sql.functions.udf",
    "": "cast it to a number or an array of numbers first",
}
_REMEDIES |= {"varchar": _REMEDIES["string"], "char": _REMEDIES["string"], "timestamp_ntz": _REMEDIES["timestamp"]}


def session_of(frame: Any, what: str) -> SparkSession:
    """Return the session of a DataFrame.

    Raises:
        TypeError: ``frame`` is not a Spark DataFrame.
        ClusterError: Its session has been stopped.
    """
    if not hasattr(frame, "sparkSession"):
        kind = type(frame)
        if kind.__module__.startswith("pyspark.pandas."):
            converted = "frame.to_spark()" if kind.__name__ == "DataFrame" else "series.to_frame().to_spark()"
            raise TypeError(f"{what} got a {kind.__name__} of pandas on Spark: pass {converted}")
        raise TypeError(
            f"{what} got a {kind.__module__}.{kind.__qualname__}: expected a Spark DataFrame. Convert pandas or "
            "Arrow with spark.createDataFrame(frame)"
        )
    return active_session(frame.sparkSession)


def check_columns(schema: T.StructType, names: Sequence[str], what: str, *, exact: bool = True) -> None:
    """Check that a DataFrame has each column that a parameter names exactly once.

    ``names`` must be exactly as in the schema: case matters, and dots are part of a name. ``what`` is the parameter
    that names the columns. ``exact`` tells whether the session distinguishes upper and lower case.

    Raises:
        DataError: A column is missing or occurs twice, or the session cannot distinguish it from another.
    """
    known = schema.fieldNames()
    for name in names:
        if name not in known:
            hint = nearest(name, known)
            raise DataError(f"{what} names {name!r}, which the DataFrame does not have.{hint} It has {listed(known)}")
        if known.count(name) > 1:
            raise DataError(
                f"{what} names {name!r}, which the DataFrame has {known.count(name)} times: expected once. "
                "Drop or rename the others, for example after a join."
            )
        similar = [] if exact else [each for each in known if each != name and each.casefold() == name.casefold()]
        if similar:
            raise DataError(
                f"{what} names {name!r}, which Spark does not distinguish from the column {similar[0]!r}: rename one "
                "of them, or set spark.sql.caseSensitive to true"
            )


def columns_of(
    schema: T.StructType,
    names: Sequence[str],
    *,
    decoders: Collection[str] = frozenset(),
    collated: bool = False,
    text: Collection[str] = frozenset(),
    compress_sparse: bool = False,
) -> tuple[Column, ...]:
    """Return the columns called ``names`` as they will be stored in files.

    Args:
        schema: Schema of the DataFrame.
        names: Names of the columns, in the wanted order; repeated names count once.
        decoders: Names of the binary columns that a function will turn into tensors.
        collated: A function makes tensors from whole rows, so columns may hold text and bytes.
        text: Names of the columns that may be text, which the model takes unchanged.
        compress_sparse: Store vectors as size, indices and values. This saves space if most entries are zero.

    Returns:
        One column for each name. The shape of vectors and arrays is None, because only their values show it.

    Raises:
        DataError: A column is missing, or its type cannot become a tensor.
    """
    check_columns(schema, names, "columns")
    return tuple(
        _column(name, schema[name].dataType, name in decoders, collated, name in text, compress_sparse)
        for name in dict.fromkeys(names)
    )


def widened(columns: Sequence[Column], requested: Iterable[tuple[str, str | None]]) -> tuple[Column, ...]:
    """Return ``columns``, with float64 instead of float32 where a requested (name, dtype) needs the digits."""
    wide = {name for name, dtype in requested if dtype not in _NARROW}
    return tuple(
        replace(each, dtype="float64") if each.name in wide and each.dtype == "float32" else each for each in columns
    )


def expression_of(column: Column, *, rounds: bool = True) -> SparkColumn:
    """Return the expression that selects ``column`` under its name, as numbers, lists or structs for Arrow.

    A vector becomes a list of numbers, or with encoding "sparse" a struct of size, indices and values.

    Args:
        column: A column of the DataFrame.
        rounds: Let float32 round whole numbers up to 2**53, such as ids and times, in a column of doubles or decimals.
            If False, such a number ends the job with an error. Numbers in lists and vectors are rounded in any case.
    """
    source = F.col(quoted(column.name))
    if column.spark_type in ("binary", "string"):  # decoders and models take these values unchanged
        result = source
    elif column.encoding == "sparse":
        result = _sparse(source, _SQL_TYPES[column.dtype])
    elif column.spark_type == "vector":
        from pyspark.ml.functions import vector_to_array

        # vector_to_array fails on null, which would hide the count of nulls that the writer reports
        result = F.when(source.isNotNull(), vector_to_array(source, column.dtype))
    elif column.dtype in _SQL_TYPES:
        depth = column.spark_type.count("array<")
        result = source.cast("array<" * depth + _SQL_TYPES[column.dtype] + ">" * depth)
        digits, lost = re.match(r"decimal\((\d+)", column.spark_type), None
        if column.dtype == "float64" and digits and int(digits[1]) > _DOUBLE_DIGITS:
            lost = result.cast(column.spark_type) != source
        elif column.dtype == "float32" and not rounds and (digits or column.spark_type == "double"):
            before, after = source.cast("double"), result.cast("double")
            whole = (F.rint(before) == before) & (F.abs(before) <= 2.0**53) & (before != after)
            lost = whole | ((F.abs(after) == float("inf")) & (F.abs(before) < float("inf")))
        if lost is not None:
            subject = f"column {column.name!r} of {column.spark_type} has "
            hint = "cast it to a type that fits its values, such as bigint, or to float or double to have them rounded"
            reason = F.lit(f", which {column.dtype} cannot hold: {hint}")
            message = F.concat(F.lit(subject), source.cast("string"), reason)
            result = F.when(lost, F.raise_error(message).cast(_SQL_TYPES[column.dtype])).otherwise(result)
    else:
        result = source
    return result.alias(column.name)


def _column(name: str, kind: T.DataType, decoded: bool, collated: bool, text: bool, sparse: bool) -> Column:
    spark_type = kind.simpleString()
    if isinstance(kind, T.UserDefinedType) and spark_type == "vector":
        return Column(name, "float32", None, spark_type, "sparse" if sparse else "plain")
    raw = isinstance(kind, T.BinaryType | T.StringType | T.StructType) and collated
    if raw or (isinstance(kind, T.BinaryType) and decoded) or (isinstance(kind, T.StringType) and text):
        return Column(name, "object", None, spark_type)
    inner: T.DataType = kind
    while isinstance(inner, T.ArrayType):
        inner = inner.elementType
    dtype = "float32" if isinstance(inner, _WIDE) else _EXACT.get(type(inner))
    if dtype is None:
        family = re.split(r"[^a-z_]", inner.simpleString())[0]
        remedy = _REMEDIES.get(family, _REMEDIES[""])
        raise DataError(f"column {name!r} has the type {spark_type}, which cannot become a tensor: {remedy}")
    return Column(name, dtype, None if isinstance(kind, T.ArrayType) else (), spark_type)


def _sparse(source: SparkColumn, kind: str) -> SparkColumn:
    raw: Any = F.unwrap_udt(source)  # struct<type, size, indices, values>; size and indices are null in dense vectors
    values = raw["values"]
    encoded = F.struct(
        F.coalesce(raw["size"], F.size(values)).alias("size"),
        F.coalesce(raw["indices"], F.transform(values, lambda _, i: i)).alias("indices"),
        values.cast(f"array<{kind}>").alias("values"),
    )
    return F.when(source.isNotNull(), encoded)
