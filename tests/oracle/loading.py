"""A data set of any columns and partitions, whose loaders are compared with the DataFrame's own rows."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import strategies as st

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
TINY = 2.0**-140
"""A number that is denormal in float32."""


@dataclass(frozen=True)
class Kind:
    """A type of column.

    Attributes:
        spark: Its name in Spark.
        values: Some of its values, unusual ones first.
        numpy: A value's type in a numpy batch.
        nullable: Whether a batch can hold a null; with torch, a null time becomes no value.
    """

    spark: str
    values: Sequence[Any]
    numpy: Callable[[Any], Any]
    nullable: bool = False


def _float(dtype: type) -> Callable[[Any], Any]:
    return lambda value: np.array(np.nan if value is None else value, dtype)


def _int(bits: int) -> Kind:
    name = {8: "tinyint", 16: "smallint", 32: "int", 64: "bigint"}[bits]
    most = (1 << (bits - 1)) - 1
    return Kind(name, (most, -most - 1, 0, 1, -3), lambda value: np.array(value, f"int{bits}"))


def _micros(value: datetime.datetime | None) -> Any:
    if value is None:
        return np.datetime64("NaT", "us")
    return np.datetime64((value.astimezone(datetime.UTC) - EPOCH) // datetime.timedelta(microseconds=1), "us")


def _list(dtype: str) -> Callable[[Any], Any]:
    return lambda value: np.array(value, dtype)


KINDS = {
    **{kind.spark: kind for kind in map(_int, (8, 16, 32, 64))},
    "float": Kind("float", (0.1, -0.0, float("inf"), float("nan"), TINY), _float(np.float32), True),
    "double": Kind("double", (0.1, 1e300, float("-inf"), 5e-324, 2.0**53 + 2), _float(np.float64), True),
    "decimal": Kind("decimal(20,2)", (Decimal("12345678901.25"), Decimal("-0.01")), _float(np.float64), True),
    "boolean": Kind("boolean", (True, False), lambda value: np.array(value, bool)),
    "date": Kind(
        "date",
        (datetime.date(1969, 12, 31), datetime.date(2026, 11, 25)),
        lambda value: np.datetime64("NaT" if value is None else value, "D"),
        True,
    ),
    "timestamp": Kind(
        "timestamp",
        (EPOCH - datetime.timedelta(microseconds=1), EPOCH + datetime.timedelta(days=20000, microseconds=7)),
        _micros,
        True,
    ),
    "string": Kind("string", ("", "ä\0b", "x" * 40), lambda value: value, True),
    "binary": Kind("binary", (b"", b"\0\xff", b"x" * 40), lambda value: None if value is None else bytes(value), True),
    "array<double>": Kind("array<double>", ([0.1, 1e300], [-1.0, 2.5]), _list("float64")),
    "array<bigint>": Kind("array<bigint>", ([2**62 + 1, 0, -1], [1, 2, 3]), _list("int64")),
    "array<array<float>>": Kind("array<array<float>>", ([[0.5, 1.0]], [[-0.25, 3.0]]), _list("float32")),
    "array<string>": Kind("array<string>", (["a"], [], ["b", "c"]), list),
}


@dataclass(frozen=True)
class DataCase:
    """A data set and how it is read.

    Attributes:
        partitions: Number of rows of each partition.
        kinds: Types of the columns, names in :data:`KINDS`.
        nulls: Whether there are nulls where the type allows them.
        seed: Seed of the values.
        door: "frame", or "files" as written by Spark.
        batch_size: Rows in a rank's batch.
        shuffle: Option of the loader.
        drop_last: Option of the loader.
        window_rows: Option of the loader.
        tensors: Whether batches are torch tensors.
    """

    partitions: tuple[int, ...]
    kinds: tuple[str, ...]
    nulls: bool
    seed: int
    door: str
    batch_size: int
    shuffle: bool
    drop_last: bool
    window_rows: int | None
    tensors: bool

    @property
    def rows(self) -> int:
        """Number of rows in all partitions."""
        return sum(self.partitions)


data_cases = st.builds(
    DataCase,
    partitions=st.lists(st.sampled_from((0, 1, 2, 7, 40, 150)), min_size=1, max_size=4).filter(any).map(tuple),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5, unique=True).map(tuple),
    nulls=st.booleans(),
    seed=st.integers(0, 999),
    door=st.sampled_from(("frame", "frame", "files")),
    batch_size=st.sampled_from((1, 3, 16, 500)),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    window_rows=st.sampled_from((None, 20)),
    tensors=st.booleans(),
)


def frame_of(spark: SparkSession, case: DataCase) -> DataFrame:
    """Return the rows, numbered in a column "row", in partitions of these sizes."""
    draw, first, parts = np.random.default_rng(case.seed), 0, []
    for count in case.partitions:
        part = []
        for row in range(first, first + count):
            values: list[Any] = []
            for name in case.kinds:
                kind = KINDS[name]
                nullable = kind.nullable and not (case.tensors and name in ("date", "timestamp"))
                if case.nulls and nullable and draw.random() < 0.2:
                    values.append(None)
                else:
                    values.append(kind.values[int(draw.integers(len(kind.values)))])
            part.append((row, *values))
        parts.append(part)
        first += count
    rows = spark.sparkContext.parallelize(parts, len(parts)).flatMap(lambda part: part)
    columns = [f"c{number} {KINDS[name].spark}" for number, name in enumerate(case.kinds)]
    return spark.createDataFrame(rows, ", ".join(["row bigint", *columns]))


def read(name: str, case: DataCase) -> Any:
    """Return two epochs of batches on this rank, or the text of the error."""
    import spark_hvd.torch as hvd
    from spark_hvd import DataError

    shard = hvd.get_dataset_shard(name)
    make: Any = shard.torch_batches if case.tensors else shard.numpy_batches
    loader = make(
        case.batch_size, shuffle=case.shuffle, drop_last=case.drop_last, window_rows=case.window_rows, seed=case.seed
    )
    try:
        return [[_plain(batch) for batch in loader] for _ in range(2)]
    except DataError as error:
        return str(error)


def _plain(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: each.numpy() if isinstance(each, torch.Tensor) else each for name, each in batch.items()}


def check_loaded(case: DataCase, rows: Sequence[Any], ranks: Sequence[Any]) -> None:
    """Each row occurs once per epoch, unchanged, in equal steps of shards that differ by a row."""
    size = len(ranks)
    if case.rows < size:
        assert all("rows for" in text or "row for" in text for text in ranks), ranks
        return
    assert not any(isinstance(found, str) for found in ranks), ranks
    each = case.rows // size
    steps = max(1, each // case.batch_size) if case.drop_last else -(-each // case.batch_size)
    expected = {row["row"]: row for row in rows}
    for epoch in range(2):
        batches = [found[epoch] for found in ranks]
        assert [len(found) for found in batches] == [steps] * size
        counts = [sum(len(batch["row"]) for batch in found) for found in batches]
        seen = [int(row) for found in batches for batch in found for row in batch["row"]]
        assert len(set(seen)) == len(seen)
        if case.drop_last and each >= case.batch_size:
            assert {len(batch["row"]) for found in batches for batch in found} == {case.batch_size}
        else:
            assert max(counts) - min(counts) <= 1
            assert set(seen) <= set(expected)
            assert case.drop_last or len(seen) == case.rows
        for found in batches:
            for batch in found:
                _check_values(case, expected, batch)


def _check_values(case: DataCase, expected: dict[int, Any], batch: dict[str, Any]) -> None:
    for number, name in enumerate(case.kinds):
        column = f"c{number}"
        for row, value in zip(batch["row"], batch[column], strict=True):
            wanted = KINDS[name].numpy(expected[int(row)][column])
            if case.tensors and isinstance(wanted, np.datetime64):
                wanted = wanted.astype(np.int64)
            if isinstance(wanted, np.ndarray | np.generic):
                value = np.asarray(value)
                assert value.dtype == wanted.dtype, (column, name, value.dtype, wanted.dtype)
                assert value.tobytes() == wanted.tobytes() or ((value != value).all() and (wanted != wanted).all()), (
                    f"{column}, {name}, of row {row}: {value!r} for {wanted!r}"
                )
            else:
                assert value == wanted, f"{column}, {name}, of row {row}: {value!r} for {wanted!r}"
