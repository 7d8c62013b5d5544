"""Tables that ranks cannot read in place come to them over Spark, if it can read them."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from spark_hvd import DataError
from spark_hvd.data.parquet import dataset_of
from spark_hvd.runner import run
from spark_hvd.runner.launch.data import run_data_of
from spark_hvd.store import Store
from tests.delta_log import added, column, head, logged, vector

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.slow  # by day: tests/unit/test_table_*.py
def test_spark_reads_a_table_that_ranks_cannot(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A Python data source replaces Delta's, which needs its own jars: its rows are in no file."""
    pytest.importorskip("deltalake")
    datasource = pytest.importorskip("pyspark.sql.datasource")  # Spark 4

    class Reader(datasource.DataSourceReader):  # type: ignore[misc, name-defined]
        def read(self, partition: Any) -> Iterator[tuple[int]]:
            yield from ((number,) for number in range(10))

    class Delta(datasource.DataSource):  # type: ignore[misc, name-defined]
        @classmethod
        def name(cls) -> str:
            return "delta"

        def schema(self) -> str:
            return "x long"

        def reader(self, schema: Any) -> Reader:
            assert self.options["path"] == f"file://{tmp_path}"
            return Reader()

    file = added(tmp_path, "a.parquet", pa.table({"x": [1, 2]}), deletionVector=vector(0))
    logged(tmp_path, [*head([column("x", "long")], ["deletionVectors", "typeWidening"]), file])
    with pytest.raises(DataError, match=r"of version 0 of the Delta .*TypeWidening.* Spark cannot read it in "):
        run(os.getpid, num_proc=2, data={"train": tmp_path}, spark=spark)
    sets = run_data_of({"train": tmp_path})
    with pytest.raises(DataError, match="TypeWidening"):
        sets.without_spark("run_local")
    able = spark.newSession()
    able.dataSource.register(Delta)
    with caplog.at_level(logging.WARNING, "spark_hvd"):
        frame = sets.read_by(able).frames["train"]
    assert sorted(row.x for row in frame.collect()) == list(range(10))  # type: ignore[union-attr]
    (said,) = (each.message for each in caplog.records if "is read by Spark" in each.message)
    assert said.startswith("data['train'] is read by Spark, which sends its rows to the ranks: cannot list the ")
    assert said.endswith("Unsupported table features required: [TypeWidening].")

    class Alike(Delta):
        def schema(self) -> str:
            return "x long, X long"

    mistaken = spark.newSession()
    mistaken.dataSource.register(Alike)
    with pytest.raises(ValueError, match="has more than one column 'X' for Spark"):
        sets.read_by(mistaken)


@pytest.mark.slow  # by day: tests/unit/test_table_files.py
def test_files_count_that_spark_counts_in_the_directory_of_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    before, after = str(tmp_path / "before"), tmp_path / "a stream's"
    spark.range(10).selectExpr("id", "id % 2 AS `the half`").write.parquet(before)
    rows = spark.readStream.schema("id long, `the half` long").parquet(before)
    stream = rows.writeStream.format("parquet").partitionBy("the half").trigger(availableNow=True)
    stream.option("checkpointLocation", str(tmp_path / "log")).start(str(after)).awaitTermination()
    written = sorted(after.glob("*/*.parquet"))[0]
    shutil.copy(written, written.with_name(f"killed-{written.name}"))
    assert spark.read.parquet(str(after)).count() == 10
    assert dataset_of(Store.create(after), str(after)).rows == 10
