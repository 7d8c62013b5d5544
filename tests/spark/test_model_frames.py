"""How TorchModel.transform treats DataFrames: partitions, plans, existing columns, pipelines; what it refuses."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest
import torch
from pyspark.ml import Estimator, Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import IntegerType, StructField, StructType
from torch import nn

from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators import predict
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.torch.model import TorchModel
from spark_hvd.estimators.training.head import Head
from spark_hvd.estimators.training.inputs import TensorSpec
from spark_hvd.estimators.transform.meta import ModelMeta
from tests.conftest import daemon_of
from tests.spark.model_support import expected, hundred_rows, net

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Rows(nn.Module):
    """Returns the number of its rows."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.full((len(rows), 1), float(len(rows)))


class Counted(nn.Module):
    """Records which process loads it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = str(path)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


@pytest.fixture(scope="module")
def numbers(spark: SparkSession) -> DataFrame:
    return hundred_rows(spark)


def test_partitions_and_batches(numbers: DataFrame) -> None:
    model = TorchModel(model=Rows(), feature_columns=["a"], label_columns=["label"], batch_size=8)
    sizes = Counter(row[0] for row in model.transform(numbers.coalesce(1)).select("label__output").collect())
    assert sizes == {8.0: 96, 4.0: 4}
    spread = model.transform(numbers.repartition(3)).select("id", "label__output").collect()
    assert sorted(row.id for row in spread) == list(range(100))
    assert max(row.label__output for row in spread) == 8


def test_empty_partitions_and_empty_frames(spark: SparkSession, numbers: DataFrame) -> None:
    model = TorchModel(model=net(3), feature_columns=["features"], label_columns=["label"], loss=nn.CrossEntropyLoss())
    sparse = spark.createDataFrame(numbers.limit(1).collect() * 2, numbers.schema).repartition(4)
    assert model.transform(sparse).count() == 2
    assert len(model.transform(sparse).collect()) == 2
    empty = model.transform(numbers.where("id < 0"))
    assert empty.collect() == []
    assert empty.columns == model.transform(numbers).columns
    nothing = spark.createDataFrame([], StructType([StructField("features", VectorUDT())]))
    assert [field.dataType.simpleString() for field in model.transform(nothing).schema] == ["vector"] * 4 + ["double"]
    assert model.transform(nothing).collect() == []


def test_loaded_once_in_each_worker(numbers: DataFrame, tmp_path: Path) -> None:
    log = tmp_path / "loads"
    model = TorchModel(model=Counted(log), feature_columns=["a"], label_columns=["label"])
    result = model.transform(numbers.repartition(6))
    assert len(result.collect()) == len(result.where("id >= 0").collect()) == 100
    loads = Counter(line for line in log.read_text().split() if line != str(os.getpid()))
    assert set(loads.values()) == {1}
    assert len(loads) <= 4  # of local[2]: each task may have had another worker for the rows, which came from Python


def test_only_features_travel_and_the_model_runs_once(numbers: DataFrame) -> None:
    model = TorchModel(model=net(3), feature_columns=["features"], label_columns=["label"], loss=nn.CrossEntropyLoss())
    result = model.transform(numbers)

    def plan(frame: DataFrame) -> str:
        return str(frame._jdf.queryExecution().executedPlan().toString())

    assert plan(result).count("EvalPython") == 1
    assert plan(result.where("prediction > 0")).count("EvalPython") == 1
    assert plan(result.select("id", "label")).count("EvalPython") == 0
    python = next(line for line in plan(result).splitlines() if "EvalPython" in line)
    assert "features" in python.split("]")[0]
    assert "label" not in python.split("]")[0]


def test_the_given_module_is_left_as_it_is(numbers: DataFrame) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1))
    model = TorchModel(model=module, feature_columns=["features"], label_columns=["label"])
    result = model.transform(numbers).select("label__output")
    assert result.collect() == result.collect()  # no dropout
    assert module.training
    assert module[0].num_batches_tracked == 0
    assert model.getModel() is module
    assert model.copy().getModel() is module


def test_metadata_of_training(numbers: DataFrame) -> None:
    meta = ModelMeta(
        inputs=(TensorSpec(Column("features", "float32", (2,), "vector"), "float32"),),
        labels=(Column("gone", "int32", (), "int"),),
        head=Head("regression"),
        shapes=((1,),),
    )
    assert ModelMeta.from_json(meta.to_json()) == meta
    model = TorchModel(model=net(1), feature_columns=["features"], label_columns=["gone"], metadata=meta)
    rows = model.transform(numbers).orderBy("id").collect()
    values = expected(net(1), numbers)[:, 0]
    assert [row.gone__output for row in rows] == np.round(values).astype(int).tolist()
    np.testing.assert_allclose([row.prediction for row in rows], values, atol=1e-5)
    arrays = numbers.withColumn("features", F.array("a", "b"))
    assert model.transform(arrays).orderBy("id").head().prediction == pytest.approx(values[0])  # type: ignore[union-attr]
    with pytest.raises(DataError, match="'features' is of type double, but the model was trained with vector: cast it"):
        model.transform(numbers.withColumn("features", F.col("b")))
    with pytest.raises(DataError, match="feature_columns names 'features', which the DataFrame does not have"):
        model.transform(numbers.drop("features"))


def test_column_names_can_be_chosen_or_left_out(numbers: DataFrame) -> None:
    model = TorchModel(
        model=net(3),
        feature_columns=["features"],
        label_columns=["label"],
        loss=nn.CrossEntropyLoss(),
        raw_prediction_col="",
        prediction_col="class",
    )
    assert model.setOutputCols(["scores"]) is model
    assert model.transform(numbers).columns == [*numbers.columns, "scores", "probability", "class"]
    assert model.setLabelColoumns(["x"]).getLabelColumns() == ["x"]


def test_refusals(numbers: DataFrame) -> None:
    model = TorchModel(model=net(1), feature_columns=["features"], label_columns=["label"], loss=nn.MSELoss())
    with pytest.raises(DataError, match="already has a column 'prediction'"):
        model.transform(numbers.withColumn("Prediction", F.lit(1)))
    with pytest.raises(DataError, match="already has a column 'label__output'"):
        model.transform(model.transform(numbers))
    with pytest.raises(ModelError, match=r"does not run on two rows of zeros \('a': torch.float32 \(2,\)\)"):
        model.copy({model.feature_columns: ["a"]}).transform(numbers)
    with pytest.raises(ModelError, match=r"returns 1 outputs, expected one for each of 'label__output', 'b__output'"):
        model.copy({model.label_columns: ["label", "b"]}).transform(numbers)
    with pytest.raises(ValueError, match="transform needs model"):
        TorchModel(feature_columns=["features"], label_columns=["label"]).transform(numbers)
    with pytest.raises(ValueError, match="transform needs label_columns"):
        TorchModel(model=net(1), feature_columns=["features"]).transform(numbers)
    with pytest.raises(ValueError, match=r"input_shapes.*expected 1, one for each of 'features'"):
        model.copy({model.input_shapes: [[-1, 2], [-1, 2]]}).transform(numbers)
    with pytest.raises(TypeError, match=r"no parameter 'featur_columns'\. Did you mean 'feature_columns'"):
        TorchModel(featur_columns=["a"])


class FixedEstimator(Estimator):  # type: ignore[type-arg]
    """Does not train."""

    def _fit(self, dataset: DataFrame) -> TorchModel:
        return TorchModel(model=net(1), feature_columns=["features"], label_columns=["label"], loss=nn.MSELoss())


def test_in_a_pipeline_and_in_cross_validation(numbers: DataFrame) -> None:
    plain = numbers.drop("features")
    stages = [VectorAssembler(inputCols=["a", "b"], outputCol="features"), FixedEstimator()]
    fitted = Pipeline(stages=stages).fit(plain)
    assert isinstance(fitted, PipelineModel)
    values = expected(net(1), numbers)[:, 0]
    rows = fitted.transform(plain).orderBy("id").collect()
    np.testing.assert_allclose([row.prediction for row in rows], values, atol=1e-5)
    evaluator = RegressionEvaluator(metricName="mse")
    grid = ParamGridBuilder().build()
    chosen = CrossValidator(
        estimator=FixedEstimator(), estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, seed=1
    ).fit(numbers)
    assert isinstance(chosen.bestModel, TorchModel)
    labels = np.arange(100) % 3
    assert chosen.avgMetrics[0] == pytest.approx(np.mean((values - labels) ** 2), rel=0.2)


@pytest.mark.parametrize("source", ["parquet", "cache"])
def test_vectors_in_columnar_scans(spark: SparkSession, tmp_path: Path, source: str) -> None:
    schema = StructType([StructField("id", IntegerType()), StructField("features", VectorUDT())])
    vectors = [Vectors.sparse(2, [0], [float(i)]) if i % 2 else Vectors.dense([float(i), 1.0]) for i in range(7)]
    df = spark.createDataFrame([*enumerate(vectors)], schema)
    if source == "parquet":
        df.write.parquet(str(tmp_path / "rows"))
        df = spark.read.parquet(str(tmp_path / "rows"))
    else:
        df = df.cache()
        df.count()
    net = nn.Linear(2, 1)
    model = TorchModel(model=net, feature_columns=["features"], label_columns=["y"], loss=nn.MSELoss())
    with torch.no_grad():
        expected = {i: net(torch.tensor([[float(i), 1.0 - i % 2]])).item() for i in range(7)}
    for row in model.transform(df).collect():
        assert row["prediction"] == pytest.approx(expected[row["id"]], abs=1e-5)


@pytest.mark.slow
def test_the_garbage_of_a_worker_leaves_out_what_it_has_imported(spark: SparkSession) -> None:
    frame = spark.range(0, 4, 1, 2).selectExpr("array(cast(id as float)) x")
    with daemon_of(spark, "pyspark.daemon"):
        rows = predict(frame, Spared, columns="x", outputs="int").collect()
    assert min(row.prediction for row in rows) > 100_000


class Spared(nn.Module):
    """Returns how many objects garbage collection skips."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.full((len(rows),), gc.get_freeze_count())
