"""Tables that ranks cannot read in place come to them over Spark, if it can read them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pyarrow as pa
import pytest

from spark_hvd import DataError
from spark_hvd.runner import run
from spark_hvd.runner.launch.data import given
from tests.delta_log import added, column, head, logged, vector

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rows_of_shard() -> list[int]:
    import spark_hvd.torch as hvd

    batches = hvd.get_dataset_shard("train").arrow_batches(10)
    return [row for batch in batches for row in batch.column("x").to_pylist()]


def test_spark_reads_a_table_that_ranks_cannot(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A source of Python's stands for Delta's, which has jars of its own: what it gives are the rows of no file."""
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
    sets = given({"train": tmp_path})
    with pytest.raises(
        DataError, match=r"of version 0 of the Delta table .*TypeWidening.* Spark cannot read it in this "
    ):
        sets.read_by(spark)
    with pytest.raises(DataError, match="TypeWidening"):
        sets.without_spark("run_local")
    able = spark.newSession()
    able.dataSource.register(Delta)
    with caplog.at_level(logging.WARNING, "spark_hvd"):
        some, others = run(rows_of_shard, num_proc=2, data={"train": tmp_path}, spark=able, verbose=0)
    assert sorted(some + others) == list(range(10))
    (said,) = (each.message for each in caplog.records if "is read by Spark" in each.message)
    assert said.startswith(
        "data['train'] is read by Spark, and its rows go to the ranks over it: cannot list the files"
    )
