"""A fit without a store: partitions go to ranks unchanged, and only the ranks' hosts get files."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.sql import functions as F  # noqa: N812
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd import DataError
from spark_hvd.estimators import TorchEstimator
from spark_hvd.estimators.fit import plan
from tests.spark.estimator_support import estimator, frame, means, ordered

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 1000


class Recorder(nn.Module):
    """Records which rows it is trained on and which it only sees, a file per rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)
        self.linear = nn.Linear(1, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if hvd.is_initialized():
            kind = "train" if self.training else "validation"
            with open(Path(self.folder) / f"{kind}-{hvd.rank()}", "a") as file:
                file.write(" ".join(str(int(row)) for row in rows.flatten()) + "\n")
        return self.linear(rows.view(-1, 1) / ROWS)


def seen(folder: Path, kind: str) -> Counter[int]:
    """Return how often each row was seen on any rank."""
    return Counter(int(row) for path in folder.glob(f"{kind}-*") for row in path.read_text().split())


def steps(folder: Path, kind: str) -> list[int]:
    """Return the batches of each rank."""
    return [len(path.read_text().splitlines()) for path in sorted(folder.glob(f"{kind}-*"))]


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    """Most rows in one partition, some partitions empty."""
    rows = spark.range(0, ROWS, 1, 8).withColumn("key", F.when(F.col("id") < 900, 1).otherwise(F.col("id")))
    spread = rows.repartition(6, "key")
    return spread.select(F.col("id").cast("float").alias("x"), (F.col("id") * 0.5).alias("value"), "id").cache()


@pytest.mark.parametrize("shuffle", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_row_once_an_epoch(df: DataFrame, tmp_path: Path, shuffle: bool) -> None:
    fitted = estimator(Recorder(tmp_path), feature_cols=["x"], shuffle=shuffle, batch_size=50, epochs=2).fit(df)
    assert seen(tmp_path, "train") == dict.fromkeys(range(ROWS), 2)
    one, other = steps(tmp_path, "train")
    assert one == other == 2 * 10
    assert len(fitted.getHistory()) == 2


@pytest.mark.parametrize("validation", [pytest.param("held", marks=pytest.mark.night), 0.25])
@pytest.mark.slow
def test_rows_for_validation_are_others(df: DataFrame, tmp_path: Path, validation: str | float) -> None:
    held = df.withColumn("held", F.col("id") % 5 == 0).repartitionByRange(2, "held")  # each has rows of only one kind
    held = held.withColumnRenamed("x", "__held")
    estimator(Recorder(tmp_path), feature_cols=["__held"], validation=validation, epochs=2).fit(held)
    trained, validated = seen(tmp_path, "train"), seen(tmp_path, "validation")
    assert not trained.keys() & validated.keys()
    assert trained | validated == dict.fromkeys(range(ROWS), 2)
    if validation == "held":
        assert validated.keys() == set(range(0, ROWS, 5))
    else:
        assert 150 < len(validated) < 350


@pytest.mark.parametrize(
    ("validation", "text"),
    [("held", r"column 'held' has 1 null\(s\) in \d+ rows"), ("id", r"column 'id \(validation\)' has 8 null\(s\)")],
)
def test_marks_that_are_null(df: DataFrame, tmp_path: Path, validation: str, text: str) -> None:
    held = df.withColumn("held", F.when(F.col("id") != 77, F.col("id") % 5 == 0))
    held = held.withColumn("id", F.when(F.col("id") > 7, F.col("id")))
    given = {"transformation_fn": lambda rows: rows.fillna(0)} if validation == "id" else {}
    labels = ["id"] if validation == "id" else ["value"]
    with pytest.raises(DataError, match=text):
        estimator(Recorder(tmp_path), feature_cols=["x"], label_cols=labels, validation=validation, **given).fit(held)


def filled(rows: pd.DataFrame) -> pd.DataFrame:
    features = [np.zeros(3, np.float32) if value is None else value for value in rows["features"]]
    return rows.assign(value=rows["value"].fillna(0.5), features=features)


@pytest.mark.parametrize("made", [estimator, pytest.param(ordered, marks=pytest.mark.slow)])
def test_nulls_are_for_transformation_fn_to_fill(spark: SparkSession, made: Callable[..., TorchEstimator]) -> None:
    whole = frame(spark)
    odd = F.col("row") % 7 == 6
    holes = whole.withColumn("value", F.when(~odd, F.col("value"))).withColumn(
        "features", F.when(F.col("row") % 30 < 29, F.col("features"))
    )
    mended = whole.withColumn("value", F.when(~odd, F.col("value")).otherwise(0.5)).withColumn(
        "features", F.when(F.col("row") % 30 < 29, F.col("features")).otherwise(F.expr("array_repeat(0f, 3)"))
    )
    history = made(transformation_fn=filled).fit(holes).getHistory()
    expected = made().fit(mended).getHistory()
    assert [means(row) for row in history] == [pytest.approx(means(row)) for row in expected]
    with pytest.raises(
        DataError, match=r"column 'features' in the first rows has 1 null\(s\) in 32 rows after transformation_fn"
    ):
        made(transformation_fn=lambda rows: rows).fit(holes)


@pytest.mark.slow
def test_no_rows_are_written_where_checkpoints_are(df: DataFrame, tmp_path: Path) -> None:
    estimator(Recorder(tmp_path), feature_cols=["x"], run_id="first").fit(df)
    (folder,) = plan._temporary  # of all fits of this process
    before = set(Path(folder.path).rglob("*.parquet"))
    estimator(Recorder(tmp_path), feature_cols=["x"], run_id="second").fit(df)
    assert set(Path(folder.path).rglob("*.parquet")) == before
    assert [path for path in Path(folder.path).rglob("*.ckpt") if "second" in str(path)]


def test_columns_of_any_name(spark: SparkSession) -> None:
    odd = spark.range(8).select(F.col("id").cast("float").alias("a.dot"), F.lit(1.0).alias("back`tick"))
    names = {"feature_cols": ["a.dot"], "label_cols": ["back`tick"]}
    model = estimator(nn.Linear(1, 1), input_shapes=[[-1, 1]], epochs=1, batch_size=4, **names).fit(odd)
    rows = model.setOutputCols(["o.ut"]).transform(odd).collect()
    assert [row["a.dot"] for row in rows] == list(range(8))
    assert rows[0]["o.ut"] == pytest.approx(float(model.getModel()(torch.zeros(1, 1)).item()))


def test_names_that_only_case_tells_apart(spark: SparkSession) -> None:
    names = {"feature_cols": ["a"], "label_cols": ["A"]}
    given = estimator(nn.Linear(1, 1), input_shapes=[[-1, 1]], epochs=1, batch_size=4, **names)
    with pytest.raises(DataError, match="feature_cols names 'a', which Spark does not distinguish from the column 'A'"):
        given.fit(spark.createDataFrame([(1.0, 2.0)] * 8, "a double, A double"))
    exact = spark.newSession()
    exact.conf.set("spark.sql.caseSensitive", "true")
    cased = exact.range(8).select(F.lit(1.0).alias("a"), F.lit(2.0).alias("A"))
    with ThreadPoolExecutor(1) as pool:  # the first session is the active one there
        model = pool.submit(given.fit, cased).result()
        rows = pool.submit(lambda: model.setOutputCols(["out"]).transform(cased).collect()).result()
    assert [(row["a"], row["A"]) for row in rows] == [(1.0, 2.0)] * 8
