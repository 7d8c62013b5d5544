"""Estimators with the rest of Spark ML: Pipelines, CrossValidator, TrainValidationSplit, saving and loading."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import cloudpickle
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import functions as F  # noqa: N812
from torch import nn

from spark_hvd.estimators import Store, TorchEstimator, TorchModel
from tests.spark.estimator_support import estimator, frame, linear, reference, same
from tests.spark.test_torch_estimator import mse

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    data = frame(spark).select(
        *[F.col("features")[i].alias(f"x{i}") for i in range(3)],
        "value",
        F.when(F.col("value") > 1, "high").when(F.col("value") > -1, "middle").otherwise("low").alias("level"),
        F.col("late").cast("double").alias("label"),
    )
    return data.cache()


@pytest.mark.night
def test_pipeline_with_three_classes(df: DataFrame, tmp_path: Path) -> None:
    network = estimator(
        linear(3),
        label_cols=["class"],
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.Adam(params, lr=0.05),
        epochs=15,
        output_cols=["scores"],
    )
    stages = [
        StringIndexer(inputCol="level", outputCol="class"),
        VectorAssembler(inputCols=["x0", "x1", "x2"], outputCol="features"),
        network,
    ]
    model = Pipeline(stages=stages).fit(df)
    predicted = model.transform(df)
    assert {"scores", "rawPrediction", "probability", "prediction"} <= set(predicted.columns)
    accuracy = MulticlassClassificationEvaluator(labelCol="class", metricName="accuracy")
    assert accuracy.evaluate(predicted) > 0.85
    model.write().overwrite().save(str(tmp_path / "pipeline"))
    again = PipelineModel.load(str(tmp_path / "pipeline"))
    assert [r.prediction for r in again.transform(df).collect()] == [r.prediction for r in predicted.collect()]


def binary(**changed: object) -> TorchEstimator:
    return estimator(linear(), label_cols=["label"], loss=nn.BCEWithLogitsLoss(), batch_size=40, **changed)


@pytest.mark.night
def test_cross_validator_with_threads(df: DataFrame) -> None:
    made = binary()
    rates = [lambda params: torch.optim.SGD(params, lr=1e-6), lambda params: torch.optim.SGD(params, lr=0.5)]
    grid = ParamGridBuilder().addGrid(made.optimizer, rates).build()
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["x0", "x1", "x2"], outputCol="features"), made])
    validator = CrossValidator(
        estimator=pipeline,
        estimatorParamMaps=grid,
        evaluator=BinaryClassificationEvaluator(),
        numFolds=2,
        parallelism=2,
        seed=1,
    )
    model = validator.fit(df)
    assert model.avgMetrics[1] > 0.95
    assert model.avgMetrics[1] > model.avgMetrics[0]
    assert isinstance(model, CrossValidatorModel)
    assert isinstance(model.bestModel.stages[-1], TorchModel)


@pytest.mark.slow
def test_train_validation_split(df: DataFrame) -> None:
    assembled = VectorAssembler(inputCols=["x0", "x1", "x2"], outputCol="features").transform(df)
    made = estimator(linear(), epochs=6)
    grid = ParamGridBuilder().addGrid(made.batch_size, [8, 1000]).build()
    split = TrainValidationSplit(
        estimator=made, estimatorParamMaps=grid, evaluator=RegressionEvaluator(labelCol="value"), seed=1
    )
    model = split.fit(assembled)
    assert model.validationMetrics[0] < model.validationMetrics[1]  # many small steps get further


def test_an_estimator_is_saved_and_loaded(spark: SparkSession, tmp_path: Path) -> None:
    made = estimator(store=Store.create(tmp_path / "store"), gradient_clip_norm=100.0)
    made.write().save(str(tmp_path / "estimator"))
    loaded = TorchEstimator.load(str(tmp_path / "estimator"))
    assert loaded.uid == made.uid
    assert loaded.getBatchSize() == 16
    assert loaded.getStore().url == str(tmp_path / "store")
    same(loaded.fit(frame(spark)).getModel(), reference(mse))
