"""Materialised data are found again exactly if they are the same, and are removed when no fit needs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_hvd.data.readers.dataset import DatasetMeta
from spark_hvd.estimators.data import reuse
from spark_hvd.estimators.data.columns import columns_of
from spark_hvd.estimators.data.materialize import materialize
from spark_hvd.estimators.data.reuse import clear_materialized_data, delete_unused, fingerprint
from spark_hvd.store import Store

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture(scope="module")
def path(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(spark, tmp_path_factory.mktemp("rows"))


def written(spark: SparkSession, folder: Path) -> str:
    """Write the rows as Parquet."""
    spark.createDataFrame(ROWS, "a int, b double").write.parquet(f"{folder}/in")
    return f"{folder}/in"


def write(df: DataFrame, store: Store, names: tuple[str, ...] = ("a", "b"), **options: Any) -> DatasetMeta:
    return materialize(df, columns_of(df.schema, names), store, **{"num_proc": 1, **options})[0]


def test_the_same_data_in_another_dataframe_object_are_found(spark: SparkSession, store: Store, path: str) -> None:
    first = write(spark.read.parquet(path), store)
    assert write(spark.read.parquet(path), store) == first
    filtered = write(spark.read.parquet(path).filter("a > 1"), store)
    assert (filtered.rows, first.rows) == (3, 4)
    assert write(spark.read.parquet(path).where(F.col("a") > 1), store) == filtered


OPTIONS: list[dict[str, Any]] = [
    {"names": ("a",)},
    {"names": ("b", "a")},
    {"validation": 0.5},
    {"seed": 1},
    {"num_proc": 2},
    {"partitions_per_process": 3},
]


def test_other_options_are_other_data(spark: SparkSession, store: Store, path: str) -> None:
    urls = {write(spark.read.parquet(path), store).url}
    for options in OPTIONS:
        other = write(spark.read.parquet(path), store, **options)
        assert other.url not in urls, options
        assert write(spark.read.parquet(path), store, **options) == other, options
        urls.add(other.url)


def test_changed_files_at_the_same_path(spark: SparkSession, store: Store, tmp_path: Path) -> None:
    path = written(spark, tmp_path)
    old = spark.read.parquet(path)
    first = write(old, store)
    spark.createDataFrame([(9, 9.0)], "a int, b double").write.mode("overwrite").parquet(path)
    assert write(spark.read.parquet(path), store).rows == 1
    with_rows = max(Path(path).glob("*.parquet"), key=lambda file: file.stat().st_size)
    Path(path, "part-more.parquet").write_bytes(with_rows.read_bytes())
    assert write(spark.read.parquet(path), store).rows == 2
    assert first.rows == 4
    assert fingerprint(old) is None  # its files are gone


def test_a_file_overwritten_in_place_is_noticed_by_an_old_dataframe(spark: SparkSession, tmp_path: Path) -> None:
    pd.DataFrame({"a": [1, 2]}).to_parquet(tmp_path / "one.parquet")
    df = spark.read.parquet(f"{tmp_path}/one.parquet")
    first = fingerprint(df)
    assert first is not None
    assert fingerprint(df) == first
    pd.DataFrame({"a": [3, 4]}).to_parquet(tmp_path / "one.parquet")
    os.utime(tmp_path / "one.parquet", (1e9, 1e9))
    assert fingerprint(df) not in (None, first)


def test_options_of_the_source_count(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1;2\n3;4\n")

    def read(**options: Any) -> str | None:
        return fingerprint(spark.read.csv(f"{tmp_path}/a.csv", schema="a string, b string", **options))

    assert read(sep=";") == read(sep=";") is not None
    assert len({read(sep=";"), read(sep=","), read(sep=";", nullValue="1"), read(sep=";", header=True)}) == 4


def test_renamed_columns_are_told_apart(spark: SparkSession, path: str) -> None:
    df = spark.read.parquet(path)
    assert fingerprint(df.selectExpr("a as x", "b as y")) != fingerprint(df.selectExpr("a as y", "b as x"))
    assert fingerprint(df.selectExpr("a as x")) != fingerprint(df.selectExpr("a as y"))


def test_settings_of_the_session_count(spark: SparkSession, path: str) -> None:
    df = spark.read.parquet(path)
    first = fingerprint(df)
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        assert fingerprint(df) != first
    finally:
        spark.conf.unset("spark.sql.session.timeZone")
    assert fingerprint(df) == first


@pytest.mark.parametrize(
    ("pandas", "arrow"),
    [
        (False, "true"),
        (True, "false"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, "false"), (True, "true"))),
    ],
)
def test_created_dataframes_are_the_same_only_as_one_object(
    spark: SparkSession, store: Store, arrow: str, pandas: bool
) -> None:
    spark.conf.set("spark.sql.execution.arrow.pyspark.enabled", arrow)

    def create(rows: list[tuple[int, float]]) -> DataFrame:
        data: Any = pd.DataFrame(rows, columns=["a", "b"]) if pandas else rows
        return spark.createDataFrame(data, "a long, b double")

    try:
        one, other = create(ROWS), create([*ROWS[:-1], (4, 5.0)])
        assert write(one, store).url != write(other, store).url
        assert write(one, store).url == write(one.select("*"), store).url
        assert fingerprint(one) != fingerprint(create(ROWS))
    finally:
        spark.conf.unset("spark.sql.execution.arrow.pyspark.enabled")


def test_splits_and_ranges(spark: SparkSession, path: str) -> None:
    df = spark.read.parquet(path)
    one, other = df.randomSplit([0.5, 0.5], seed=1)
    again, _ = spark.read.parquet(path).randomSplit([0.5, 0.5], seed=1)
    assert fingerprint(one) == fingerprint(again) is not None
    found = {fingerprint(part) for part in (df, one, other, df.randomSplit([0.5, 0.5], seed=2)[0])}
    assert len(found) == 4
    assert fingerprint(spark.range(5)) == fingerprint(spark.range(5)) != fingerprint(spark.range(6))


def test_cached_data_count_as_what_is_in_the_cache(spark: SparkSession, path: str) -> None:
    plain = fingerprint(spark.read.parquet(path))
    df = spark.read.parquet(path).cache()
    first = fingerprint(df)
    assert first not in (None, plain)
    assert fingerprint(df.select("*")) == first
    df.unpersist(blocking=True)
    assert fingerprint(spark.read.parquet(path)) == plain
    df.cache()
    assert fingerprint(df) not in (None, first, plain)
    df.unpersist(blocking=True)


def test_functions_of_the_user_count(spark: SparkSession, path: str) -> None:
    df = spark.read.parquet(path)
    functions = (lambda x: x + 1, lambda x: x + 2)
    found = [fingerprint(df.withColumn("c", F.udf(fn, "int")("a"))) for fn in functions]
    assert None not in found
    assert found[0] != found[1]


def test_conditions_and_literals_count(spark: SparkSession, path: str) -> None:
    df = spark.read.parquet(path)
    clauses = ["a > 1", "a > 2", "a >= 1", "b > 1", "a > 1 and b > 1", "cast(a as string) > '1'"]
    found = [fingerprint(df.where(clause)) for clause in clauses]
    assert None not in found
    assert len(set(found)) == len(clauses)
    assert fingerprint(spark.read.parquet(path).where("a > 1")) == found[0]


def test_columns_of_the_source_count_whatever_they_are_called_later(spark: SparkSession, path: str) -> None:
    frames = [spark.read.schema(schema).parquet(path).toDF("x") for schema in ("a int", "c int", "a long")]
    found = [fingerprint(df) for df in frames]
    assert None not in found
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    "derive",
    [
        lambda df: df.withColumn("c", F.rand()),
        lambda df: df.withColumn("c", F.udf(lambda: 1, "int").asNondeterministic()()),
        lambda df: df.withColumn("c", F.unix_timestamp(F.current_timestamp())),
        lambda df: df.where("a in (select max(a) from other)"),
        lambda df: df.sparkSession.readStream.format("rate").load(),
    ],
)
def test_what_is_not_known_for_certain_has_no_fingerprint(
    spark: SparkSession, path: str, derive: Callable[[DataFrame], DataFrame]
) -> None:
    df = spark.read.parquet(path)
    df.createOrReplaceTempView("other")
    assert fingerprint(derive(df)) is None


def test_without_fingerprint_nothing_is_found(spark: SparkSession, store: Store, path: str) -> None:
    df = spark.read.parquet(path).withColumn("c", F.rand(1))
    assert write(df, store).url != write(df, store).url


def test_damaged_data_are_written_anew(spark: SparkSession, store: Store, path: str) -> None:
    data = write(spark.read.parquet(path), store)
    for damage in ("gone", "longer", "manifest", "version"):
        first, file = data, Path(data.row_groups[0].file)
        (manifest,) = Path(store.url).rglob("_spark_hvd.json")
        if damage == "gone":
            file.unlink()
        elif damage == "longer":
            file.write_bytes(file.read_bytes() + b"x")
        elif damage == "manifest":
            manifest.write_text(manifest.read_text()[:-20])
        else:
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": reuse.FORMAT + 1}))
        data = write(spark.read.parquet(path), store)
        assert data.url != first.url, damage
        assert all(Path(group.file).exists() for group in data.row_groups), damage
        assert write(spark.read.parquet(path), store) == data, damage


def test_two_threads_write_once(spark: SparkSession, store: Store, path: str) -> None:
    found: list[DatasetMeta] = []

    def fit() -> None:
        found.append(write(spark.read.parquet(path), store))

    threads = [threading.Thread(target=fit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({meta.url for meta in found}) == 1
    assert len(list(Path(store.url).rglob("train"))) == 1


def test_unused_data_are_deleted_by_age(spark: SparkSession, store: Store, path: str) -> None:
    df = spark.read.parquet(path)
    old, new = write(df, store), write(df, store, seed=5)
    used = Path(old.url).parents[1] / "_used"
    assert time.time() - float(used.read_text()) < 60
    used.write_text(repr(time.time() - 7.1 * 86400))
    (Path(store.url) / "intermediate_data/somebody else's").mkdir()
    delete_unused(store)
    assert [Path(meta.url).exists() for meta in (old, new)] == [False, True]
    clear_materialized_data(store)
    assert [path.name for path in Path(store.url, "intermediate_data").iterdir()] == ["somebody else's"]


def test_clearing_reaches_the_other_paths_of_a_store(spark: SparkSession, tmp_path: Path, path: str) -> None:
    store = Store.create(tmp_path / "store", train_path=tmp_path / "train", val_path=tmp_path / "held")
    (tmp_path / "train").mkdir()
    (tmp_path / "train/mine.txt").write_text("")
    write(spark.read.parquet(path).union(spark.read.parquet(path)), store, validation=0.5)
    clear_materialized_data(store)
    clear_materialized_data(store)
    assert [path.name for path in (tmp_path / "train").iterdir()] == ["mine.txt"]
    assert list((tmp_path / "held").iterdir()) == []


DRIVER = """
import os, sys
from tests.conftest import start_session
from tests.spark.test_reuse import write
from spark_hvd.store import Store
spark = start_session("local[1]")
df, store = spark.read.parquet(sys.argv[1]), Store.create(sys.argv[2])
print("wrote", write(df, store).url, flush=True)
if os.fork() == 0:
    sys.exit()
os.wait()
print("there", os.path.exists(write(df, store).url), flush=True)
if sys.argv[3] == "killed":
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("end", ["ended", pytest.param("killed", marks=pytest.mark.night)])
def test_data_go_with_their_driver_unless_it_is_killed(store: Store, path: str, end: str) -> None:
    command = [sys.executable, "-c", DRIVER, path, store.url, end]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        lines = []
        for line in driver.stdout:
            lines += [line.split()[1]] if line.startswith(("wrote", "there")) else []
            if len(lines) == 2 and end == "killed":
                driver.send_signal(signal.SIGKILL)
    own, there = lines
    assert there == "True"
    assert Path(own).exists() == (end == "killed")
