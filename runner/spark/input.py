"""DataFrames as the input of a run's barrier stage: each task gets only the rows that its ranks own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_hvd.data.bucketing import BUCKET, BUCKETS, ID, ROW, SOURCE, STRIDE, struct_of
from spark_hvd.data.series.windows import Windows
from spark_hvd.runner.spark.series import arrow_schema, quoted, series_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType


@dataclass(frozen=True)
class Split:
    """A DataFrame that is computed once and split into two data sets.

    Attributes:
        frame: All rows.
        columns: The columns that ranks get.
        other: Name of the second data set.
        is_other: Whether a row belongs to the second data set; never null.
    """

    frame: DataFrame
    columns: Sequence[str]
    other: str
    is_other: Column


@dataclass(frozen=True)
class InputRows:
    """The rows that tasks get.

    Attributes:
        frame: All rows, in one partition per task.
        schemas: For each data set, by name and in order: the number of the struct column that holds its rows (see
            :func:`~spark_hvd.data.bucketing.struct_of`), and its schema in Arrow's format. A single data set is not put
            into a struct.
    """

    frame: DataFrame
    schemas: Mapping[str, tuple[int, bytes]]

    @classmethod
    def of(cls, frames: Mapping[str, DataFrame | Split | Windows], tasks: int) -> InputRows:
        """Combine data sets into one frame with a partition for each of ``tasks`` tasks."""
        from pyspark.sql import functions as F  # noqa: N812

        shaped: list[tuple[DataFrame, Sequence[str], Column]] = []
        schemas: dict[str, tuple[int, bytes]] = {}
        for name, value in frames.items():
            metadata = None
            if isinstance(value, Windows):
                frame, metadata = series_of(value)
            else:
                frame = with_lists(value.frame if isinstance(value, Split) else value)
            columns, first = frame.columns, len(schemas)
            source, names = F.lit(first), [name]
            if isinstance(value, Split):
                columns = list(value.columns)
                source, names = F.when(value.is_other, first + 1).otherwise(first), [name, value.other]
            arrow = arrow_schema(_schema_of(frame, columns), frame.sparkSession).with_metadata(metadata)
            schema = arrow.serialize().to_pybytes()
            schemas |= dict.fromkeys(names, (len(shaped), schema))
            shaped.append((frame, columns, source))
        return cls(_frame_of(shaped, tasks), schemas)


def with_lists(frame: DataFrame) -> DataFrame:
    """Convert Spark ML's vectors to lists of numbers; Arrow would show the fields of their representation."""
    vectors = [field.name for field in frame.schema.fields if type(field.dataType).__name__ == "VectorUDT"]
    if not vectors:
        return frame
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F  # noqa: N812

    columns = {name: F.col(quoted(name)) for name in frame.columns}
    for name in vectors:  # vector_to_array fails on null
        columns[name] = F.when(columns[name].isNotNull(), vector_to_array(columns[name])).alias(name)
    return frame.select(*columns.values())


def _schema_of(frame: DataFrame, columns: Sequence[str]) -> StructType:
    from pyspark.sql.types import StructType

    return StructType([frame.schema[name] for name in columns])


def _numbered(schema: StructType) -> StructType:
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(f"c{at}", field.dataType, field.nullable) for at, field in enumerate(schema.fields)])


def _frame_of(frames: Sequence[tuple[DataFrame, Sequence[str], Column]], tasks: int) -> DataFrame:
    """Return one frame with a partition for each task, which holds all rows of the task's ranks."""
    from pyspark.sql import functions as F  # noqa: N812

    selected = []
    # Columns get numbers for names: mapInArrow takes a name with dots for a field of a struct, and whether it tells "a"
    # from "A" depends on the thread's session.
    given = [[F.col(quoted(name)).alias(f"c{at}") for at, name in enumerate(columns)] for _, columns, _ in frames]
    kinds = [_numbered(_schema_of(frame, columns)) for frame, columns, _ in frames]
    for number, (frame, _, source) in enumerate(frames):
        rows = [F.lit(None).cast(kind).alias(struct_of(at)) for at, kind in enumerate(kinds)]
        rows[number] = F.struct(*given[number]).alias(struct_of(number))
        if len(frames) == 1:
            rows = given[0]  # columns in a struct take Spark a quarter longer
        numbered = frame.select(F.monotonically_increasing_id().alias(ID), source.alias(SOURCE), *rows)
        bucket = f"cast(pmod(({ID} & {ROW}L) * {STRIDE} + hash(shiftright({ID}, 33)), {BUCKETS}) as int)"
        selected.append(numbered.withColumn(BUCKET, F.expr(bucket)))
    together = selected[0]
    for other in selected[1:]:
        together = together.union(other)
    # The hash of a row's key decides its partition, so we choose keys by their hashes. Adaptive execution leaves the
    # number of partitions alone if the plan names it.
    keys = ", ".join(map(str, keys_of_partitions(tasks)))
    return together.repartition(
        tasks, F.expr(f"element_at(array({keys}), cast({BUCKET} * {tasks}L div {BUCKETS} as int) + 1)")
    )


def keys_of_partitions(partitions: int) -> list[int]:
    """Return, for each partition, an integer that Spark's hash partitioning puts there."""
    found: dict[int, int] = {}
    key = 0
    while len(found) < partitions:
        found.setdefault(spark_hash(key) % partitions, key)
        key += 1
    return [found[partition] for partition in range(partitions)]


def spark_hash(value: int) -> int:
    """Compute Spark's ``hash`` of an int: Murmur3 with 32 bits and seed 42."""
    mixed = _rotated(value * 0xCC9E2D51, 15) * 0x1B873593
    state = (_rotated(42 ^ mixed & _WORD, 13) * 5 + 0xE6546B64) & _WORD
    state ^= 4  # the number of bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ state >> shift) * factor) & _WORD
    state ^= state >> 16
    return state - (1 << 32) if state >> 31 else state


_WORD = (1 << 32) - 1


def _rotated(value: int, bits: int) -> int:
    value &= _WORD
    return (value << bits | value >> 32 - bits) & _WORD
