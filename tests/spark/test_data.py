"""A DataFrame's rows reach the ranks of a run: each row goes to one rank, whatever the partitions."""

from __future__ import annotations

import datetime
import math
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

import spark_hvd.torch
from spark_hvd import DataError
from spark_hvd.runner import RankFailedError, RunError, run
from spark_hvd.runner.launch.data import run_data_of
from spark_hvd.runner.spark.input import InputRows, keys_of_partitions, spark_hash
from tests.conftest import ranks_alive, wait_until
from tests.spark.data_support import table_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def ids_of(name: str, seed: tuple[int, int] | None = None) -> list[int]:
    return [int(each) for each in table_of(name, seed).column("id").to_pylist()]


def folder_of(name: str) -> str:
    """Return the folder of the rows, all of which have arrived."""
    from spark_hvd.data.registry import source_of

    source = source_of(name)
    source.open()
    return str(source.folder)


@pytest.mark.parametrize("aqe", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_every_row_comes_to_one_rank(spark: SparkSession, aqe: str) -> None:
    with_aqe = spark.conf.get("spark.sql.adaptive.enabled")
    spark.conf.set("spark.sql.adaptive.enabled", aqe)
    try:
        df = spark.range(0, 3000, 1, 5).join(spark.range(0, 9000, 3, 2), "id")  # has its own shuffle
        shares = run(ids_of, ("train",), num_proc=2, data={"train": df}, spark=spark)
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", with_aqe)
    assert sorted(shares[0] + shares[1]) == list(range(0, 3000, 3))
    assert min(map(len, shares)) > 450


def test_several_ranks_of_a_task_share_its_rows(spark: SparkSession) -> None:
    df = spark.range(0, 1000, 1, 3)
    shares = run(ids_of, ("train", (1, 2)), num_proc=4, procs_per_task=2, data={"train": df}, spark=spark)
    assert sorted(each for share in shares for each in share) == list(range(1000))
    assert min(map(len, shares)) > 200


def partitions(spark: SparkSession, sizes: list[int]) -> DataFrame:
    """Return a DataFrame whose partitions have these numbers of rows."""
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    parts = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    rows = spark.sparkContext.parallelize(parts, len(parts)).flatMap(lambda part: [(each,) for each in part])
    return spark.createDataFrame(rows, "id long")


SIZES = {
    f"d{number}": sizes for number, sizes in enumerate([[0, 0], [1], [0, 1, 0], [3], [0, 400, 0], [1, 1000, 2, 0]])
}


def test_partitions_of_any_size(spark: SparkSession) -> None:
    def fn() -> dict[str, tuple[list[int], list[str]]]:
        tables = {name: table_of(name) for name in names}
        return {
            name: ([int(each) for each in table.column("id").to_pylist()], [str(field) for field in table.schema])
            for name, table in tables.items()
        }

    names = list(SIZES)
    frames = {name: partitions(spark, sizes) for name, sizes in SIZES.items()}
    first, second = run(fn, num_proc=2, data=frames, spark=spark)
    for name, sizes in SIZES.items():
        (one, fields), (other, others) = first[name], second[name]
        assert sorted(one + other) == list(range(sum(sizes))), sizes
        assert abs(len(one) - len(other)) <= 2 * len(sizes) + 2, sizes
        assert fields == others == ["pyarrow.Field<id: int64>"]


def ids_of_shards() -> list[list[list[int]]]:
    """Return this rank's batches of each data set."""
    import spark_hvd.torch as hvd

    hvd.init()
    shards = [hvd.get_dataset_shard(name) for name in ("train", "odd")]
    batches = [shard.numpy_batches(50, shuffle=True) for shard in shards]
    return [[[int(each) for each in batch["id"]] for batch in loader] for loader in batches]


def test_shards_differ_by_a_row_at_most_whatever_the_partitions(spark: SparkSession) -> None:
    df = spark.range(0, 1000, 1, 1).withColumn("text", F.col("id").cast("string"))
    data = {"train": df, "odd": partitions(spark, [0, 300, 1, 22]).where("id % 2 = 1")}
    ranks = run(ids_of_shards, num_proc=2, data=data, spark=spark)
    assert [[len(batch) for batch in train] for train, _ in ranks] == [[50] * 10] * 2
    assert sorted(len(batch) for _, odd in ranks for batch in odd) == [30, 31, 50, 50]
    for number, ids in enumerate((range(1000), range(1, 323, 2))):
        assert sorted(each for rank in ranks for batch in rank[number] for each in batch) == list(ids)


def test_several_data_sets_of_every_kind(spark: SparkSession, tmp_path: Path) -> None:
    files = tmp_path / "files.parquet"
    pq.write_table(pa.table({"id": [1]}), files)
    odd = "a `quoted.name"
    train = spark.range(0, 300).select(
        "id",
        F.col("id").cast("string").alias(odd),
        F.when(F.col("id") % 2 == 0, F.array(F.col("id"))).alias("many"),
        F.struct(F.col("id").alias("inner")).alias("pair"),
        F.lit(None).cast("timestamp").alias("at"),
        F.lit("1.5").cast("decimal(10,2)").alias("price"),
    )
    data = {
        "train": train,
        "val": spark.range(1000, 1050),
        "none": train.where("id < 0"),
        "table": pa.table({"id": [7, 8, 9]}),
        "pandas": pa.table({"id": [5, 6]}).to_pandas(),
        "files": files,
    }

    def fn() -> tuple[Any, ...]:
        from spark_hvd.data.registry import source_of

        tables = {name: table_of(name) for name in ("train", "val", "none", "table", "pandas")}
        with pytest.raises(DataError, match=r"no data set 'vale'.*'train', 'val'.*Did you mean 'val'"):
            source_of("vale")
        schemas = {name: table.schema for name, table in tables.items()}
        rows = [tables[name].to_pylist() for name in ("train", "val", "table", "pandas")]
        return rows, schemas, source_of("files").dataset.url

    shares = run(fn, num_proc=2, data=data, spark=spark)
    rows, val, table, pandas = ([*a, *b] for a, b in zip(shares[0][0], shares[1][0], strict=True))
    assert sorted(row["id"] for row in val) == list(range(1000, 1050))
    assert sorted(row["id"] for row in table) == [7, 8, 9]
    assert sorted(row["id"] for row in pandas) == [5, 6]
    assert {row["id"]: tuple(row.values()) for row in rows} == {
        i: (i, str(i), None if i % 2 else [i], {"inner": i}, None, Decimal("1.50")) for i in range(300)
    }
    (_, one, url), (_, other, _) = shares
    assert one == other
    assert one["none"] == one["train"]  # without rows, the types are the same
    assert url == str(files)


def test_a_table_keeps_its_values_in_spark(spark: SparkSession, session_zone: str) -> None:
    """Even times without a zone that occur twice or not at all in the session's time zone."""
    times = [datetime.datetime(2024, 3, 10, 2, 30), datetime.datetime(2024, 11, 3, 1, 30)]
    small, large = [2**32 - 1, 0], [2**63 - 1, 1]
    table = pa.table(
        {
            "at": pa.array(times, pa.timestamp("ns")),
            "instant": pa.array(times, pa.timestamp("ms", "UTC")),
            "inside": pa.array([{"at": each} for each in times]),
            "small": pa.array(small, pa.uint32()),
            "large": pa.array(large, pa.uint64()),
            "half": pa.array(np.array([0.5, 65504], np.float16)),
            "price": pa.array([Decimal("1.5"), None], pa.decimal256(50, 2)),
            "days": pa.array([0, 86_400_000], pa.date64()),
        }
    )

    def fn() -> Any:
        (batch,) = spark_hvd.torch.get_dataset_shard("train").torch_batches(2)
        return {name: batch["inside"]["at"] if name == "inside" else batch[name] for name in batch}

    (found,) = run(fn, num_proc=1, data={"train": table}, spark=spark)
    micros = pa.array(times).cast(pa.int64()).to_pylist()
    expected = [micros, micros, micros, small, large, [0.5, 65504.0], [1.5, math.nan], [0, 1]]
    rows = [sorted(zip(*[values.tolist() for values in found.values()], strict=True), key=lambda row: row[0])]
    assert str(rows[0]) == str(list(zip(*expected, strict=True)))


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (
            pa.array([2**63], pa.uint64()),
            r"column 'x' of uint64 has a value that int64, its type in Spark, cannot hold",
        ),
        (pa.array([1001], pa.timestamp("ns")), r"column 'x' of timestamp\[ns\] has a value .*1001"),
        (pa.array([[1]], pa.list_view(pa.int8())), r"column 'x' is list_view<.*for which Spark has no type"),
    ],
)
def test_a_table_that_spark_cannot_have_names_the_column(spark: SparkSession, column: pa.Array, text: str) -> None:
    with pytest.raises(DataError, match=r"data\['train'\]: " + text):
        run_data_of({"train": pa.table({"x": column})}).in_spark(spark)


@pytest.fixture
def session_zone(spark: SparkSession) -> Iterator[str]:
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    yield "America/New_York"
    spark.conf.unset("spark.sql.session.timeZone")  # setting a default differs from not setting it, for later tests


def test_a_shard_gives_each_row_once_an_epoch(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(0, 500, 1, 3).write.parquet(f"{tmp_path}/val")
    train = spark.range(0, 1000, 1, 5).selectExpr("id", "id / 2.0 as half", "cast(id as string) as name")

    def fn() -> Any:
        import spark_hvd.torch as hvd

        hvd.init()
        shard, val = hvd.get_dataset_shard("train"), hvd.get_dataset_shard("val")
        loader = shard.torch_batches(32, shuffle=True, features=["half"])
        epochs = []
        for _ in range(2):
            batches = list(loader)
            assert len(batches) == len(loader) == shard.steps(32)
            for batch in batches:
                assert batch["features"].tolist() == [[row / 2] for row in batch["id"].tolist()]
                assert batch["name"] == [str(row) for row in batch["id"].tolist()]
            epochs.append([row for batch in batches for row in batch["id"].tolist()])
        held = [row for batch in val.numpy_batches(7) for row in batch["id"].tolist()]
        return shard.rows, shard.schema.names, epochs, held

    (rows, names, epochs, held), (_, _, others, rest) = run(
        fn, num_proc=2, data={"train": train, "val": f"{tmp_path}/val"}, spark=spark
    )
    assert (rows, names) == (1000, ["id", "half", "name"])
    for one, other in zip(epochs, others, strict=True):
        assert sorted(one + other) == list(range(1000))
    assert epochs[0] != epochs[1]
    assert sorted(held + rest) == list(range(500))
    # A rank has the same rows in each epoch, except those of the bucket that it shares with the next rank.
    assert len(set(epochs[0]) ^ set(epochs[1])) <= 4


def test_fewer_rows_than_ranks(spark: SparkSession) -> None:
    def fn() -> list[str]:
        import spark_hvd.torch as hvd

        hvd.init()
        texts = []
        for name in ("one", "none"):
            with pytest.raises(DataError) as caught:
                list(hvd.get_dataset_shard(name).arrow_batches())
            texts.append(str(caught.value))
        return texts

    for one, none in run(fn, num_proc=2, data={"one": spark.range(1), "none": spark.range(0)}, spark=spark, verbose=0):
        assert one.startswith("data set 'one' has 1 row for 2 ranks: expected at least one for each")
        assert none.startswith("data set 'none' has no rows: expected at least one for each rank. Next: check")


def test_directories_of_partitions_are_columns(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.range(40).withColumn("half", F.col("id") % 2).withColumn("name", F.concat(F.lit("a/b="), F.col("half")))
    df.write.partitionBy("half", "name").parquet(f"{tmp_path}/parts")

    def fn() -> list[dict[str, Any]]:
        import spark_hvd.torch as hvd

        hvd.init()
        return [row for batch in hvd.get_dataset_shard("train").arrow_batches() for row in batch.to_pylist()]

    (rows,) = run(fn, num_proc=1, data={"train": tmp_path / "parts"}, spark=spark)
    assert sorted(rows, key=lambda row: row["id"]) == [
        {"id": number, "half": number % 2, "name": f"a/b={number % 2}"} for number in range(40)
    ]
    with pytest.raises(DataError, match=r"there is no .*: expected a Parquet file or a directory"):
        run_data_of({"train": tmp_path / "nothing"})


def test_vectors_of_spark_ml_come_as_lists(spark: SparkSession) -> None:
    vectors = [Vectors.dense([1.0, 2.0]), Vectors.sparse(2, [1], [3.0]), None]
    df = spark.createDataFrame(list(enumerate(vectors)), StructType().add("id", "long").add("v", VectorUDT()))
    (rows,) = run(lambda: table_of("train").to_pydict(), num_proc=1, data={"train": df}, spark=spark)
    assert dict(zip(rows["id"], rows["v"], strict=True)) == {0: [1.0, 2.0], 1: [0.0, 3.0], 2: None}


def test_a_run_need_not_read_its_data(spark: SparkSession) -> None:
    df = spark.range(0, 40_000, 1, 2).selectExpr("id", "repeat('x', 500) as text")  # 20 MB in four batches
    assert run(lambda: 1, num_proc=2, data={"train": df}, spark=spark) == [1, 1]


def test_a_plan_that_fails_ends_the_run_with_its_cause(spark: SparkSession) -> None:
    @F.udf("long")
    def fails(number: int) -> int:
        if number == 70:
            raise ValueError("on row seventy")
        return number

    df = spark.range(0, 100, 1, 2).select(fails("id").alias("id"))
    with pytest.raises(RunError, match="on row seventy"):
        run(ids_of, ("train",), num_proc=2, data={"train": df}, spark=spark)


def test_rows_of_a_random_plan_are_the_same_when_ranks_are_started_again(spark: SparkSession, tmp_path: Path) -> None:
    def fn(folder: str) -> bool:
        import torch

        import spark_hvd.torch as hvd

        rows = pickle.dumps(table_of("train", (0, 1)).to_pydict())
        before = Path(folder) / f"{hvd.rank()}"
        if before.exists():
            return before.read_bytes() == rows
        before.write_bytes(rows)
        hvd.allreduce(torch.ones(1))
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(1))
        return False

    df = spark.range(0, 500, 1, 3).withColumn("x", F.rand()).where("x < 0.7")
    assert run(fn, (str(tmp_path),), num_proc=2, data={"train": df}, max_restarts=1, spark=spark) == [True, True]


def test_rows_go_with_the_run(spark: SparkSession) -> None:
    folders = run(folder_of, ("train",), num_proc=2, data={"train": spark.range(100)}, spark=spark)
    assert len(set(folders)) == 2
    assert not any(map(os.path.exists, folders))


@pytest.mark.parametrize("whom", ["rank", "task"])
def test_rows_go_with_who_is_killed(spark: SparkSession, tmp_path: Path, whom: str) -> None:
    def fn() -> None:

        import spark_hvd.torch as hvd

        folder = folder_of("train")
        (tmp_path / f"{hvd.rank()}").write_text(folder)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        if hvd.rank() == 1:
            os.kill(os.getpid() if whom == "rank" else holder_of(Path(folder).parent), signal.SIGKILL)
        while True:
            time.sleep(1)

    def holder_of(folder: Path) -> int:
        """Return the process that holds the folder's lock."""
        opened = Path("/proc").glob("[0-9]*/fd/*")
        return next(int(fd.parts[2]) for fd in opened if os.path.realpath(fd) == os.path.realpath(folder))

    with pytest.raises(RunError):
        run(fn, num_proc=2, data={"train": spark.range(100)}, spark=spark)
    wait_until(lambda: not ranks_alive())
    for rank in range(2):
        folder = Path((tmp_path / f"{rank}").read_text())
        wait_until(lambda folder=folder: not folder.exists())


def test_a_full_disk_is_an_error_of_the_ranks_that_read(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    from spark_hvd.runner.spark import entry

    real = entry.task_of

    def limited(*args: Any, **more: Any) -> Any:
        task = real(*args, **more)

        def with_limit(batches: Any) -> Any:
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
            try:
                yield from task(batches)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        return with_limit

    monkeypatch.setattr("spark_hvd.runner.launch.attempt.task_of", limited)
    df = spark.range(0, 30_000, 1, 2).selectExpr("id", "sha2(cast(id as string), 512) as text")
    with pytest.raises(RankFailedError, match=r"the rows of the DataFrame cannot be kept here: .*spark.local.dir"):
        run(ids_of, ("train",), num_proc=2, data={"train": df}, spark=spark)


def test_keys_are_hashed_as_spark_does(spark: SparkSession) -> None:
    found = spark.range(-2000, 2000).selectExpr("cast(id as int) as key", "hash(cast(id as int)) as hash").collect()
    assert [spark_hash(row.key) for row in found] == [row.hash for row in found]
    assert [spark_hash(key) % 37 for key in keys_of_partitions(37)] == list(range(37))
    frame = InputRows.of({"train": spark.range(0, 500, 1, 3)}, 7).frame
    assert frame.rdd.getNumPartitions() == 7
    counts = frame.select(F.spark_partition_id().alias("at"), "__bucket").collect()
    assert all(row["__bucket"] * 7 // 4096 == row["at"] for row in counts)
