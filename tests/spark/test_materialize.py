"""A DataFrame in the store: values, row groups, splits, checks; nothing remains of a failed write."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import TaskContext
from pyspark.ml.linalg import DenseMatrix, Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_hvd.data.readers.dataset import DatasetMeta
from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators.data.columns import columns_of
from spark_hvd.estimators.data.materialize import materialize
from spark_hvd.estimators.data.reuse import clear_materialized_data
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def write(
    df: DataFrame, store: Store, names: Sequence[str] | None = None, *, decoders: Sequence[str] = (), **options: Any
) -> tuple[DatasetMeta, DatasetMeta | None]:
    sparse = options.pop("compress_sparse", False)
    columns = columns_of(df.schema, names or df.columns, decoders=decoders, compress_sparse=sparse)
    return materialize(df, columns, store, **{"num_proc": 2, **options})


def rows_of(meta: DatasetMeta) -> list[dict[str, Any]]:
    """Return all rows, in the order of the row groups."""
    groups = [pq.ParquetFile(group.file).read_row_group(group.index) for group in meta.row_groups]
    assert [len(group) for group in groups] == [group.rows for group in meta.row_groups]
    return [row for group in groups for row in group.to_pylist()]


def left_in(store: Store) -> list[str]:
    return [path.name for path in Path(store.url).rglob("*") if path.is_file() and path.name != "_used"]


def test_values_of_every_type(spark: SparkSession, store: Store) -> None:
    rows = [
        (1, 2**40, 0.5, Decimal("1.25"), True, [[1, 2], [3, 4], [5, 6]], Vectors.dense([1, 0]), b"x", 1.0, 2.0),
        (2, -1, -0.5, Decimal("0.75"), False, [[6, 5], [4, 3], [2, 1]], Vectors.sparse(2, [1], [3]), b"", 3.0, 4.0),
    ]
    names = ["i", "long", "double", "decimal", "flag", "nested", "vector", "bytes", "a.dot", "a space"]
    df = spark.createDataFrame(rows, names)
    train, held = write(df.coalesce(1), store, decoders=["bytes"])
    assert held is None
    assert train.rows == 2
    assert {column.name: (column.dtype, column.shape) for column in train.columns} == {
        "i": ("int64", ()),
        "long": ("int64", ()),
        "double": ("float32", ()),
        "decimal": ("float32", ()),
        "flag": ("bool", ()),
        "nested": ("int64", (3, 2)),
        "vector": ("float32", (2,)),
        "bytes": ("object", None),
        "a.dot": ("float32", ()),
        "a space": ("float32", ()),
    }
    values = [(1, 2**40, 0.5, 1.25, True, [1, 2, 3, 4, 5, 6], [1, 0], b"x", 1, 2)]
    values += [(2, -1, -0.5, 0.75, False, [6, 5, 4, 3, 2, 1], [0, 3], b"", 3, 4)]
    assert sorted((tuple(row.values()) for row in rows_of(train)), key=lambda row: row[0]) == values
    schema = pq.read_schema(train.row_groups[0].file)
    assert schema.names == names
    assert not any(field.nullable for field in schema)
    assert train.bytes == sum(Path(file).stat().st_size for file in {group.file for group in train.row_groups})


def test_sparse_vectors_stay_sparse(spark: SparkSession, store: Store) -> None:
    vectors = [Vectors.sparse(1000, [5, 900], [1, 2]), Vectors.dense([0.0] * 1000), Vectors.sparse(1000, [], [])]
    df = spark.createDataFrame([(i, vector) for i, vector in enumerate(vectors)], ["i", "v"]).coalesce(1)
    train, _ = write(df, store, compress_sparse=True)
    assert (train.column("v").shape, train.column("v").encoding) == ((1000,), "sparse")
    assert [row["v"] for row in sorted(rows_of(train), key=lambda row: row["i"])] == [
        {"size": 1000, "indices": [5, 900], "values": [1, 2]},
        {"size": 1000, "indices": list(range(1000)), "values": [0] * 1000},
        {"size": 1000, "indices": [], "values": []},
    ]


def test_one_partition_has_row_groups_for_all_ranks(spark: SparkSession, store: Store) -> None:
    train, _ = write(spark.range(0, 60_000, numPartitions=1), store, num_proc=4, partitions_per_process=5)
    sizes = [group.rows for group in train.row_groups]
    assert len({group.file for group in train.row_groups}) == 1
    assert 20 <= len(sizes) < 60
    assert min(sizes) >= 1000
    assert [row["id"] for row in rows_of(train)] == list(range(60_000))


def test_large_rows_make_row_groups_of_bounded_size(spark: SparkSession, store: Store) -> None:
    df = spark.range(0, 700, numPartitions=1).select(F.array_repeat(F.rand(1), 10_000).alias("x"))
    train, _ = write(df, store, num_proc=1, partitions_per_process=1)  # 28 MB in rows of 40 kB
    assert train.column("x").shape == (10_000,)
    sizes = [group.rows for group in train.row_groups]
    assert sum(sizes) == 700
    assert max(sizes) * 40_004 <= 1.5 * 2**24
    assert len(sizes) in (2, 3)


@pytest.mark.slow
def test_fifty_partitions_most_of_them_empty(spark: SparkSession, store: Store) -> None:
    df = spark.range(0, 5000, numPartitions=50).filter("id % 1000 < 7")
    train, _ = write(df, store)
    assert len({group.file for group in train.row_groups}) == 5
    assert [group.file for group in train.row_groups] == sorted(group.file for group in train.row_groups)
    assert [row["id"] for row in rows_of(train)] == [i for i in range(5000) if i % 1000 < 7]


def test_a_share_for_validation_is_drawn_alike_each_time(spark: SparkSession, store: Store) -> None:
    df = spark.range(0, 4000, numPartitions=3)
    splits = []
    for seed in (1, 1, 2):
        clear_materialized_data(store)
        train, held = write(df, store, validation=0.25, seed=seed)
        assert held is not None
        splits.append(([row["id"] for row in rows_of(train)], [row["id"] for row in rows_of(held)]))
        assert sorted(splits[-1][0] + splits[-1][1]) == list(range(4000))
        assert 850 < held.rows < 1150
    assert splits[0] == splits[1]
    assert splits[0] != splits[2]


@pytest.mark.parametrize("kind", ["boolean", "int"])
def test_a_column_says_what_is_for_validation(spark: SparkSession, store: Store, kind: str) -> None:
    df = spark.range(0, 100, numPartitions=3).withColumn("for.validation", (F.col("id") % 5 == 0).cast(kind))
    train, held = write(df, store, ["id"], validation="for.validation")
    assert held is not None
    assert [row["id"] for row in rows_of(held)] == list(range(0, 100, 5))
    assert [row["id"] for row in rows_of(train)] == [i for i in range(100) if i % 5]
    assert [column.name for column in train.columns] == ["id"]
    both, _ = write(df, store, ["for.validation", "id"], validation="for.validation")
    assert not any(row["for.validation"] for row in rows_of(both))


def test_the_dataframe_is_computed_once(spark: SparkSession, store: Store) -> None:
    count = spark.sparkContext.accumulator(0)

    def counting(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            count.add(batch.num_rows)
            yield batch

    df = spark.range(0, 1000, numPartitions=2).mapInArrow(counting, "id long")
    write(df, store, validation=0.5)
    assert count.value == 1000


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (["nullif(id % 4, 0) as x"], r"column 'x' has 25 null\(s\) in 100 rows: .*df\.na\.drop\(subset=\['x'\]\)"),
        (["array(1, nullif(id, 3)) as x"], r"column 'x' has 1 null\(s\) in the lists of 100 rows: .*forall"),
        (["if(id = 7, null, array(1)) as x"], r"column 'x' has 1 null\(s\) in 100 rows"),
        (["array_repeat(1, if(id = 70, 3, 4)) as x"], r"column 'x' has lists or vectors of length 3 and of 4"),
        (["array_repeat(1, if(id < 50, 3, 4)) as x"], r"column 'x' has lists or vectors of length 3 and of 4"),
        (["array(array(1), array_repeat(1, 1 + int(id = 9))) as x"], r"column 'x' has lists .* length 1 and of 2"),
        (
            ["if(id < 50, array(array(1, 1)), array(array(1), array(1))) as x"],
            r"column 'x' has lists or vectors of shape \(1, 2\) and of \(2, 1\)",
        ),
    ],
)
def test_nulls_and_ragged_lists(spark: SparkSession, store: Store, select: list[str], message: str) -> None:
    df = spark.range(0, 100, numPartitions=2).selectExpr(*select)
    with pytest.raises(DataError, match=message):
        write(df, store)
    assert left_in(store) == []


def test_null_and_ragged_vectors(spark: SparkSession, store: Store) -> None:
    null = spark.createDataFrame([(Vectors.dense([1, 2]),), (None,)], ["v"])
    ragged = spark.createDataFrame([(Vectors.dense([1, 2]),), (Vectors.sparse(3, [], []),)], ["v"])
    for sparse in (False, True):
        with pytest.raises(DataError, match=r"column 'v' has 1 null\(s\) in 2 rows"):
            write(null, store, compress_sparse=sparse)
        with pytest.raises(DataError, match="column 'v' has lists or vectors of length 2 and of 3"):
            write(ragged, store, compress_sparse=sparse)


@pytest.mark.parametrize(
    ("rows", "validation", "message"),
    [
        (0, None, "the DataFrame has no rows"),
        (3, 1e-9, r"no rows for validation: validation=1e-09 leaves none of 3\. Use another share"),
        (3, 1 - 1e-9, "no rows for training"),
        (3, "never", r"no rows for validation: validation='never' leaves none of 3\. Check that column"),
        (3, "always", "no rows for training: validation='always'"),
        (3, "unknown", r"column 'unknown' has 3 null\(s\) in 3 rows"),
        (3, "nevr", "validation names 'nevr', .*Did you mean 'never'"),
        (3, "text", r"validation='text' is a column of type string: expected boolean or integer"),
    ],
)
def test_splits_that_cannot_be(spark: SparkSession, store: Store, rows: int, validation: Any, message: str) -> None:
    marks = ["false as never", "1 as always", "cast(null as int) as unknown", "'a' as text"]
    df = spark.range(0, rows, numPartitions=2).selectExpr("id", *marks)
    with pytest.raises(DataError, match=message):
        write(df, store, ["id"], validation=validation)
    assert left_in(store) == []


@pytest.mark.parametrize("validation", [0, 1, 1.5, -0.1, float("nan")])
def test_a_share_out_of_range(spark: SparkSession, store: Store, validation: float) -> None:
    with pytest.raises(ValueError, match="expected a share of the rows above 0 and below 1"):
        write(spark.range(3), store, validation=validation)


def test_an_error_of_the_plan_is_raised_as_it_is_and_leaves_nothing(spark: SparkSession, store: Store) -> None:
    def explode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        if context is not None and context.partitionId() == 1:
            raise RuntimeError("the user's own")

    df = spark.range(0, 100, numPartitions=2).mapInArrow(explode, "id long")
    with pytest.raises(Exception, match="the user's own"):
        write(df, store)
    assert left_in(store) == []


def test_a_store_that_tasks_cannot_write(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="Spark tasks do not see it"):
        write(spark.range(3), Store.create("memory://x"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        write(spark.range(3), Store.create(tmp_path / "file" / "below"))


def test_data_go_to_the_paths_of_the_store(spark: SparkSession, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", train_path=tmp_path / "train", val_path=tmp_path / "held")
    train, held = write(spark.range(0, 100, numPartitions=1), store, validation=0.5)
    assert held is not None
    assert train.url.startswith(f"{tmp_path}/train/")
    assert held.url.startswith(f"{tmp_path}/held/")
    assert len(rows_of(train)) + len(rows_of(held)) == 100


def test_matrices_are_refused(spark: SparkSession, store: Store) -> None:
    df = spark.createDataFrame([(DenseMatrix(1, 2, [1, 2]),)], ["m"])
    with pytest.raises(DataError, match="turn it into an array"):
        write(df, store)
