"""What an older spark_hvd saved still loads: Spark reads the class from the metadata, we read the pickles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("lightning")

from pyspark.ml import Pipeline, PipelineModel

import spark_hvd.torch as hvd
from spark_hvd.estimators import (
    EarlyStopping,
    LightningEstimator,
    LightningModel,
    LocalBackend,
    Store,
    TorchEstimator,
    TorchModel,
)
from tests.spark.saved_models import SAVED, numbers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


@pytest.mark.night
def test_a_pipeline_of_models(spark: SparkSession) -> None:
    loaded = PipelineModel.load(str(SAVED / "pipeline_model"))
    first, second = loaded.stages
    assert type(first) is TorchModel
    assert type(second) is LightningModel
    assert type(first.value_of("model")[0]) is hvd.SyncBatchNorm
    assert [row["epoch"] for row in first.value_of("history")] == [1, 2]
    row = loaded.transform(numbers(spark)).first()
    assert row is not None
    weight, bias = (each.item() for each in first.value_of("model")[1].parameters())
    assert row.prediction == row.y__output == pytest.approx(bias)
    assert weight != 0.0
    assert row.doubled == pytest.approx(second.value_of("model").layer.bias.item())


def test_a_pipeline_of_estimators(spark: SparkSession, tmp_path: Path) -> None:
    first, second = Pipeline.load(str(SAVED / "pipeline")).getStages()
    assert type(first) is TorchEstimator
    assert type(second) is LightningEstimator
    assert first.value_of("gradient_compression") is hvd.Compression.fp16
    assert [type(each) for each in first.value_of("callbacks")] == [EarlyStopping]
    first.setParams(store=Store.create(str(tmp_path)), backend=LocalBackend(1))
    assert type(first.fit(numbers(spark))) is TorchModel
