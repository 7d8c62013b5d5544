"""TorchModel.transform: values and types of what it appends, how the model travels, and what it refuses."""

from __future__ import annotations

import os
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest
import torch
from pyspark.ml import Estimator, Pipeline, PipelineModel
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, DoubleType, IntegerType, StructField, StructType
from torch import nn

from spark_hvd.estimators.errors import DataError, ModelError
from spark_hvd.estimators.readers.dataset import Column
from spark_hvd.estimators.torch.model import TorchModel
from spark_hvd.estimators.training.head import Head
from spark_hvd.estimators.training.inputs import TensorSpec
from spark_hvd.estimators.transform.meta import ModelMeta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Constant(nn.Module):
    """Gives the same outputs for every row."""

    def __init__(self, *values: Any) -> None:
        super().__init__()
        self.values = [torch.tensor(value) for value in values]

    def forward(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return [value.expand(len(rows), *value.shape) for value in self.values]


class Rows(nn.Module):
    """Gives the number of rows it got."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.full((len(rows), 1), float(len(rows)))


class Counted(nn.Module):
    """Writes down which process loads it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = str(path)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class Two(nn.Module):
    """Two inputs, two outputs."""

    def forward(self, number: torch.Tensor, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": number + vector.sum(1), "scaled": number[:, None] * vector}


@pytest.fixture(params=["arrow_udf", "pandas_udf"])
def adapter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways into Python: that of Spark from 4.1 on, and that of older ones."""
    if request.param == "pandas_udf":
        monkeypatch.delattr(F, "arrow_udf", raising=False)
    elif not hasattr(F, "arrow_udf"):
        pytest.skip("needs Spark 4.1")
    return str(request.param)


@pytest.fixture(scope="module")
def numbers(spark: SparkSession) -> DataFrame:
    """100 rows: id, a (float), b (double), whole (int), label (double, 0 1 2), features (vector of a, b)."""
    frame = spark.range(0, 100, 1, 2).selectExpr(
        "id", "cast(id as float) a", "id / 2 as b", "cast(id as int) whole", "cast(id % 3 as double) label"
    )
    return VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame).cache()


def expected(model: nn.Module, frame: DataFrame) -> np.ndarray[Any, Any]:
    rows = torch.tensor([[row.a, row.b] for row in frame.orderBy("id").collect()], dtype=torch.float32)
    with torch.inference_mode():
        return model.eval()(rows).double().numpy()  # type: ignore[no-any-return]


def net(outputs: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs))


@pytest.mark.parametrize("last", [nn.Identity(), nn.Flatten(0)], ids=["(rows, 1)", "(rows,)"])
def test_regression_keeps_the_frame_and_appends_columns(adapter: str, last: nn.Module, numbers: DataFrame) -> None:
    model = TorchModel(model=net(1).append(last), feature_columns="features", label_columns="label", loss=nn.MSELoss())
    result = model.transform(numbers)
    assert result.columns == [*numbers.columns, "label__output", "prediction"]
    assert result.schema.fields[: len(numbers.columns)] == numbers.schema.fields
    assert result.schema["features"].metadata == numbers.schema["features"].metadata != {}
    assert [result.schema[name].dataType for name in ("label__output", "prediction")] == [DoubleType(), DoubleType()]
    rows = result.orderBy("id").collect()
    assert [row.id for row in rows] == list(range(100))
    np.testing.assert_allclose([row.prediction for row in rows], expected(net(1), numbers)[:, 0], atol=1e-5)
    assert all(row.prediction == row.label__output for row in rows)
    error = RegressionEvaluator(metricName="mse").evaluate(result)
    assert error == pytest.approx(np.mean([(row.prediction - row.label) ** 2 for row in rows]))


def test_multiclass(adapter: str, numbers: DataFrame) -> None:
    model = TorchModel(
        model=net(3), feature_columns=["features"], label_columns=["label"], loss=[nn.CrossEntropyLoss()], batch_size=7
    )
    result = model.transform(numbers)
    rows = result.orderBy("id").collect()
    scores = expected(net(3), numbers)
    assert isinstance(result.schema["label__output"].dataType, VectorUDT)
    np.testing.assert_allclose([row.rawPrediction.toArray() for row in rows], scores, atol=1e-5)
    np.testing.assert_allclose([row.label__output.toArray() for row in rows], scores, atol=1e-5)
    probabilities = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose([row.probability.toArray() for row in rows], probabilities, atol=1e-6)
    assert [row.prediction for row in rows] == scores.argmax(1).tolist()
    accuracy = np.mean([row.prediction == row.label for row in rows])
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(result) == pytest.approx(accuracy)
    surprise = -np.mean([np.log(row.probability[int(row.label)]) for row in rows])
    assert MulticlassClassificationEvaluator(metricName="logLoss").evaluate(result) == pytest.approx(surprise)


@pytest.mark.parametrize("scores", ["logits", "probabilities", "logits (rows,)"])
def test_binary(scores: str, numbers: DataFrame) -> None:
    module, loss = net(1, seed=3), nn.BCELoss() if scores == "probabilities" else nn.BCEWithLogitsLoss()
    with torch.no_grad():  # outputs on both sides of zero
        module[2].bias -= float(np.median(expected(module, numbers)))
    logits = expected(module, numbers)[:, 0]
    if scores == "probabilities":
        module.append(nn.Sigmoid())
    if scores == "logits (rows,)":
        module.append(nn.Flatten(0))
    frame = numbers.withColumn("label", F.expr("id > 40"))
    model = TorchModel(model=module, feature_columns=["features"], label_columns=["label"], loss=loss)
    result = model.transform(frame)
    rows = result.orderBy("id").collect()
    assert {row.prediction for row in rows} == {0.0, 1.0}
    np.testing.assert_allclose([row.rawPrediction.toArray() for row in rows], np.stack([-logits, logits], 1), atol=1e-4)
    probabilities = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose([row.probability[1] for row in rows], probabilities, atol=1e-5)
    assert all(row.probability[0] + row.probability[1] == pytest.approx(1) for row in rows)
    assert [row.prediction == 1 for row in rows] == [row.label__output for row in rows]
    positive, negative = logits[41:], logits[:41]
    area = np.mean(positive[:, None] > negative[None, :])
    score = BinaryClassificationEvaluator().evaluate(result.withColumn("label", F.col("label").cast("double")))
    assert score == pytest.approx(area, abs=0.01)


BY_LABEL: list[tuple[str, Any, str, Any]] = [  # the label's type, the output for a row, the column's type, its value
    ("double", 2.5, "double", 2.5),
    ("float", [2.5], "float", 2.5),
    ("int", 2.6, "int", 3),
    ("int", -2.6, "int", -3),
    ("bigint", 1e30, "bigint", 2**63 - 1024),
    ("tinyint", 300.0, "tinyint", 127),
    ("smallint", float("nan"), "smallint", None),
    ("int", 7, "int", 7),
    ("boolean", 0.6, "boolean", True),
    ("boolean", 0.4, "boolean", False),
    ("decimal(10,2)", 2.625, "decimal(10,2)", Decimal("2.63")),
    ("string", 2.5, "double", 2.5),
    ("string", [1.0, 2.0], "vector", Vectors.dense(1, 2)),
    ("int", [1.0, 2.0], "vector", Vectors.dense(1, 2)),
    ("array<float>", [1.0, 2.0], "array<float>", [1.0, 2.0]),
    ("array<float>", [[1.0, 2.0]], "array<float>", [1.0, 2.0]),
    ("array<int>", [1.4, 1.6], "array<int>", [1, 2]),
    ("array<double>", 1.5, "array<double>", [1.5]),
    ("array<array<double>>", [[1.0, 2.0], [3.0, 4.0]], "array<array<double>>", [[1.0, 2.0], [3.0, 4.0]]),
    ("array<array<double>>", [1.0, 2.0], "array<double>", [1.0, 2.0]),
    ("array<decimal(4,1)>", [1.5], "array<decimal(4,1)>", [Decimal("1.5")]),
]


def test_outputs_have_the_type_of_their_label(adapter: str, numbers: DataFrame) -> None:
    labels = [F.lit(None).cast(label).alias(f"l{i}") for i, (label, *_) in enumerate(BY_LABEL)]
    model = TorchModel(
        model=Constant(*(output for _, output, _, _ in BY_LABEL)),
        feature_columns=["a"],
        label_columns=[f"l{i}" for i in range(len(BY_LABEL))],
    )
    result = model.transform(numbers.limit(3).select("a", *labels)).select("*")
    appended = result.schema.fields[1 + len(BY_LABEL) :]
    assert [field.name for field in appended] == [f"l{i}__output" for i in range(len(BY_LABEL))]
    assert [field.dataType.simpleString() for field in appended] == [kind for _, _, kind, _ in BY_LABEL]
    for row in result.collect():
        assert list(row[1 + len(BY_LABEL) :]) == [value for *_, value in BY_LABEL]


def test_vector_label_gives_vector_and_unknown_labels_do_not_matter(spark: SparkSession, numbers: DataFrame) -> None:
    model = TorchModel(model=Constant([1.0], 4.0), feature_columns=["a"], label_columns=["features", "gone"])
    row = model.transform(numbers).select("features__output", "gone__output").head()
    assert row == (Vectors.dense(1.0), 4.0)


def test_several_inputs_and_outputs_dense_and_sparse(adapter: str, spark: SparkSession) -> None:
    rows = [
        (1, 2.0, Vectors.dense(1, 0, 3), [1, 2]),
        (2, 3.0, Vectors.sparse(3, [1], [5.0]), [3, 4]),
        (3, 4.0, Vectors.sparse(3, [], []), [5, 6]),
    ]
    schema = StructType().add("id", IntegerType()).add("a.b", DoubleType())
    schema = schema.add("v", VectorUDT()).add("list", ArrayType(IntegerType()))
    frame = spark.createDataFrame(rows, schema)
    model = TorchModel(model=Two(), feature_columns=["a.b", "v"], label_columns=["id", "list"], output_cols=["x", "y"])
    result = model.transform(frame).orderBy("id").select("x", "y").collect()
    assert [tuple(row) for row in result] == [(6, [2, 0, 6]), (8, [0, 15, 0]), (4, [0, 0, 0])]
    again = model.copy({model.feature_columns: ["a.b", "list"]}).transform(frame).orderBy("id").select("x", "y")
    assert [tuple(row) for row in again.collect()] == [(5, [2, 4]), (10, [9, 12]), (15, [20, 24])]


def test_shapes_dtypes_and_nested_arrays(adapter: str, spark: SparkSession) -> None:
    frame = spark.createDataFrame([([[1, 2], [3, 4]], 3)], "nested array<array<int>>, word int")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding.from_pretrained(torch.arange(10.0)[:, None])

        def forward(self, nested: torch.Tensor, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            assert nested.shape[1:] == (1, 4)
            return nested.sum((1, 2)), self.words(word)

    model = TorchModel(
        model=Model(),
        feature_columns=["nested", "word"],
        label_columns=["x", "y"],
        input_shapes=[[-1, 1, 4], None],
        input_dtypes=[None, torch.int64],
    )
    assert model.transform(frame).select("x__output", "y__output").head() == (10.0, 3.0)


def test_decoders(adapter: str, spark: SparkSession) -> None:
    frame = spark.createDataFrame([(bytearray([1, 2, 3]),), (bytearray([4, 5, 6]),)], "image binary")
    model = TorchModel(
        model=nn.Identity(),
        feature_columns=["image"],
        label_columns=["x"],
        decoders={"image": lambda data: np.frombuffer(data, np.uint8)},
    )
    assert {tuple(row[0]) for row in model.transform(frame).select("x__output").collect()} == {(1, 2, 3), (4, 5, 6)}


@pytest.mark.parametrize("partitions", [1, 3])
def test_partitions_and_batches(numbers: DataFrame, partitions: int) -> None:
    model = TorchModel(model=Rows(), feature_columns=["a"], label_columns=["label"], batch_size=8)
    sizes = Counter(row[0] for row in model.transform(numbers.coalesce(1)).select("label__output").collect())
    assert sizes == {8.0: 96, 4.0: 4}
    spread = model.transform(numbers.repartition(partitions)).select("id", "label__output").collect()
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
    assert len(loads) <= 2  # local[2]


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
    with pytest.raises(DataError, match="a column 'prediction' already"):
        model.transform(numbers.withColumn("Prediction", F.lit(1)))
    with pytest.raises(DataError, match="a column 'label__output' already"):
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


def test_nulls_are_refused(adapter: str, numbers: DataFrame) -> None:
    model = TorchModel(model=net(1), feature_columns=["features"], label_columns=["label"], loss=nn.MSELoss())
    holes = numbers.withColumn("features", F.expr("if(id = 5, null, features)"))
    with pytest.raises(Exception, match=r"column 'features'( in transform)? has (1 null|nulls)"):
        model.transform(holes).collect()


def test_nan_is_a_value(numbers: DataFrame) -> None:
    nan = numbers.withColumn("a", F.expr("if(id = 5, cast('nan' as float), a)"))
    single = TorchModel(model=nn.Identity(), feature_columns=["a"], label_columns=["a"])
    assert sum(np.isnan(row.a__output) for row in single.transform(nan).collect()) == 1


class FixedEstimator(Estimator):  # type: ignore[type-arg]
    """Trains nothing."""

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
    df = spark.createDataFrame([(i, Vectors.dense([float(i), 1.0])) for i in range(7)], schema)
    if source == "parquet":
        df.write.parquet(str(tmp_path / "rows"))
        df = spark.read.parquet(str(tmp_path / "rows"))
    else:
        df = df.cache()
        df.count()
    net = nn.Linear(2, 1)
    model = TorchModel(model=net, feature_columns=["features"], label_columns=["y"], loss=nn.MSELoss())
    with torch.no_grad():
        expected = {i: net(torch.tensor([[float(i), 1.0]])).item() for i in range(7)}
    for row in model.transform(df).collect():
        assert row["prediction"] == pytest.approx(expected[row["id"]], abs=1e-5)
