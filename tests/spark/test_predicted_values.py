"""Values on their way to a model and back stay as they are, by an Arrow UDF and by the pandas UDF of older Sparks."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import TYPE_CHECKING

import cloudpickle
import pytest
import torch
from pyspark.sql import functions as F  # noqa: N812

import spark_hvd
from spark_hvd.data.readers.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.usefixtures("each_way")
def test_values_stay_as_they_are(spark: SparkSession) -> None:
    """Pandas, before Spark 4.1, would take zones from times, make NaN null, and whole numbers beside a null floats."""
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "America/Los_Angeles")
    now = "timestamp_seconds(1730622600 + 3600 * id) t, timestamp_ntz'2024-03-10 02:30:00' n, interval '1' day i"
    frame = session.range(2).coalesce(1).selectExpr("id", *now.split(", "))  # an hour that occurs twice there
    large = 2**53 + 1
    results = {
        "long": [large, None],
        "longs": [[large, None], None],
        "double": torch.tensor([math.nan, 1.0]),
        "vector": torch.tensor([[math.nan, 1.0], [2.0, 3.0]]),
    }
    types = {"seen": "string", "long": "long", "longs": "array<long>", "double": "double", "vector": "vector"}
    predicted = spark_hvd.predict(
        frame,
        lambda: lambda seen: {"seen": seen, **results},
        columns=["t", "n", "i"],
        outputs=types,
        collate=lambda t, n, i: ([repr((each[0].timestamp(), *each[1:])) for each in zip(t, n, i, strict=True)],),
    )
    day = "datetime.datetime(2024, 3, 10, 2, 30), datetime.timedelta(days=1)"
    rows = predicted.orderBy("id").select(*types).collect()
    assert [row.seen for row in rows] == [f"({second}, {day})" for second in (1730622600.0, 1730626200.0)]
    assert ([row.long for row in rows], [row.longs for row in rows]) == ([large, None], [[large, None], None])
    assert repr([(row.double, row.vector.tolist()) for row in rows]) == "[(nan, [nan, 1.0]), (1.0, [2.0, 3.0])]"


@pytest.mark.slow
def test_what_pandas_would_change_is_refused(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "arrow_udf", raising=False)
    predict = partial(spark_hvd.predict, columns="x", outputs="array<double>", collate=lambda x: (x,))
    for value, text in (
        (
            "map('a', 1)",
            "map<string,int>: before Spark 4.1, each row would get the keys of all rows. Pass F.map_entries",
        ),
        ("array(current_timestamp())", "array<timestamp>: .*times within it would lose their zone. Pass F.unix_micros"),
        ("struct(current_timestamp() AS t)", "struct<t:timestamp>: .*times within it would lose"),
    ):
        with pytest.raises(DataError, match=text):
            predict(spark.range(1).selectExpr(f"{value} AS x"), lambda: lambda x: x)
    for value in ("array(1D, NULL)", "array(1, NULL)"):
        with pytest.raises(Exception, match="column 'x' has nulls"):
            predict(spark.range(1).selectExpr(f"{value} AS x"), lambda: lambda x: x).collect()
    with pytest.raises(Exception, match="has None within lists of double"):
        predict(spark.range(1).selectExpr("1 AS x"), lambda: lambda x: [[math.nan, None]]).collect()
