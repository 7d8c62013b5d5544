"""Windows over a Spark DataFrame: Spark sorts each key, ranks cut windows out of series."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import cloudpickle
import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812

from spark_hvd import DataError
from spark_hvd.data import Windows
from spark_hvd.runner import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
SERIES, HOURS, LENGTH = 5, 300, 48


def read() -> dict[str, Any]:
    import numpy as np

    import spark_hvd.torch as hvd

    hvd.init()
    shard = hvd.get_dataset_shard("train")
    starts = []
    for batch in shard.torch_batches(32, shuffle=True):
        values = batch["a.value"].numpy()
        assert values.shape[1] == LENGTH
        assert (np.diff(values) == 1).all()
        assert (batch["the half"].numpy() == values / 2).all()
        assert (values[:, 0] // 1000 == batch["key"].numpy()).all()
        starts += values[:, 0].astype(int).tolist()
    with pytest.raises(DataError) as short:
        hvd.get_dataset_shard("short")
    with pytest.raises(DataError) as nulls:
        hvd.get_dataset_shard("nulls")
    with pytest.raises(DataError) as unfit:
        hvd.get_dataset_shard("unfit")
    return {
        "starts": starts,
        "rows": shard.rows,
        "short": str(short.value),
        "nulls": str(nulls.value),
        "unfit": str(unfit.value),
        "plain": sum(len(batch["id"]) for batch in hvd.get_dataset_shard("plain").numpy_batches(4)),
        "arrow": [each for batch in hvd.get_dataset_shard("arrow").numpy_batches(4) for each in batch["x"][:, 0]],
    }


def test_windows_over_data_frames(spark: SparkSession) -> None:
    number, hour = F.col("id") % SERIES, F.floor(F.col("id") / SERIES)
    rows = spark.range(0, SERIES * HOURS, 1, 3).select(
        number.cast("int").alias("key"),
        F.lit("same").alias("other.key"),
        F.timestamp_seconds(hour * 3600).alias("hour"),
        (number * 1000 + hour).alias("a.value"),
        ((number * 1000 + hour) / 2).cast("decimal(10,1)").alias("the half"),
    )
    asked: dict[str, Any] = {
        "keys": ["key", "other.key"],
        "order_by": "hour",
        "columns": ["a.value", "the half"],
        "length": LENGTH,
        "every": timedelta(hours=1),
    }
    some = F.when(F.col("key") != 3, F.col("`a.value`"))
    data = {
        "train": Windows(rows, **asked),
        "short": Windows(rows.where("key != 2 or hour < timestamp_seconds(3600 * 20)"), **asked),
        "nulls": Windows(rows.withColumn("the half", some), **asked),
        "unfit": Windows(rows.where("key < 2").withColumn("the half", F.lit(2**24 + 1)), **asked),
        "plain": spark.range(10),
        "arrow": Windows(pa.table({"t": range(20), "x": range(20)}), keys=[], order_by="t", columns=["x"], length=4),
    }
    one, other = run(read, num_proc=2, data=data, spark=spark)
    assert sorted(one["starts"] + other["starts"]) == [
        1000 * key + hour for key in range(SERIES) for hour in range(HOURS - LENGTH + 1)
    ]
    assert one["rows"] == SERIES * (HOURS - LENGTH + 1)
    assert min(len(one["starts"]), len(other["starts"])) > one["rows"] // 3
    assert one["short"] == other["short"]
    assert "1 series have fewer rows than a window of 48, key=2, other.key='same' has 20." in one["short"]
    assert "column 'the half' has 300 null(s) in 1 series, 300 of them in key=3, other.key='same'." in one["nulls"]
    assert "column 'the half' has 600 number(s) in 2 series that float32 cannot hold" in one["unfit"]
    assert one["plain"] + other["plain"] == 10
    assert sorted(one["arrow"] + other["arrow"]) == list(range(17))


def test_columns_are_checked_before_anything_starts(spark: SparkSession) -> None:
    rows = spark.createDataFrame([("a", 1, "x")], "key string, time int, text string")
    for columns, error in (
        (["valeu"], "no column 'valeu'"),
        (["text"], "column 'text' holds string: expected numbers"),
    ):
        windows = Windows(rows, keys=["key"], order_by="time", columns=columns, length=2)
        with pytest.raises(DataError, match=error):
            run(read, num_proc=2, data={"train": windows}, spark=spark)
