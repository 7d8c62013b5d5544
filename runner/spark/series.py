"""Windows over a DataFrame's series: Spark sorts each key's rows, and Python makes a row of each piece of a series."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from spark_hvd.data.series.pieces import checked, pieces_of_sorted
from spark_hvd.runner.spark.session import choose_python

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from spark_hvd.data.series.windows import Windows


def series_of(windows: Windows) -> tuple[DataFrame, Mapping[bytes, bytes]]:
    """Return a DataFrame with a row for each piece of a series, and the metadata that describes the pieces.

    Raises:
        SetupError: The executors' Python cannot be used.
        DataError: A column is missing, or has an unsuitable type.
    """
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import ArrayType, FloatType, LongType, StringType, StructField, StructType

    rows, spec = windows.rows, windows.spec
    choose_python(rows.sparkSession)  # first: mapInArrow records the interpreter
    known = checked(arrow_schema(rows.schema, rows.sparkSession), spec)
    names = list(dict.fromkeys([*spec.keys, spec.order_by, *spec.columns]))
    wanted = [F.col(quoted(name)) for name in names]
    # Columns get numbers for names: mapInArrow takes a name with dots for a field of a struct.
    keys = [f"c{at}" for at in range(len(spec.keys))]
    long = rows.select(*[column.alias(f"c{at}") for at, column in enumerate(wanted)])
    long = long.repartition(*keys) if keys else long.repartition(1)

    def cut(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for pieces in pieces_of_sorted((batch.rename_columns(names) for batch in batches), spec):
            yield pieces.rename_columns([f"c{at}" for at in range(len(known))])

    kinds = [*(rows.schema[name].dataType for name in spec.keys), *[ArrayType(FloatType())] * len(spec.columns)]
    made = StructType([StructField(f"c{at}", kind) for at, kind in enumerate([*kinds, StringType(), LongType()])])
    return long.sortWithinPartitions(*keys, f"c{names.index(spec.order_by)}").mapInArrow(cut, made).toDF(
        *known.names
    ), known.metadata


def arrow_schema(schema: StructType, session: SparkSession) -> pa.Schema:
    """Convert a schema of Spark's to one of Arrow's."""
    from pyspark.sql.pandas.types import to_arrow_schema

    given: dict[str, Any] = {}
    if "timezone" in inspect.signature(to_arrow_schema).parameters:  # PySpark 3.5 has no such argument
        given["timezone"] = session.conf.get("spark.sql.session.timeZone")
    return to_arrow_schema(schema, **given)


def quoted(name: str) -> str:
    """Quote a column's name for an expression, in which dots would mean fields."""
    return "`" + name.replace("`", "``") + "`"
