"""Values and types of the columns that TorchModel.transform appends, for every kind of input and label."""

from __future__ import annotations

import sys
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest
import torch
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, DoubleType, IntegerType, StructType
from torch import nn

from spark_hvd.estimators.torch.model import TorchModel
from tests.spark.model_support import expected, hundred_rows, net

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Constant(nn.Module):
    """Returns the same outputs for every row."""

    def __init__(self, *values: Any) -> None:
        super().__init__()
        self.values = [torch.tensor(value) for value in values]

    def forward(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return [value.expand(len(rows), *value.shape) for value in self.values]


class Two(nn.Module):
    """Has two inputs and two outputs."""

    def forward(self, number: torch.Tensor, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": number + vector.sum(1), "scaled": number[:, None] * vector}


@pytest.fixture(params=["arrow_udf", pytest.param("pandas_udf", marks=pytest.mark.slow)])
def adapter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use both adapters to Python: that of Spark from 4.1 on, and the older one."""
    if request.param == "pandas_udf":
        monkeypatch.delattr(F, "arrow_udf", raising=False)
    elif not hasattr(F, "arrow_udf"):
        pytest.skip("needs Spark 4.1")
    return str(request.param)


@pytest.fixture(scope="module")
def numbers(spark: SparkSession) -> DataFrame:
    return hundred_rows(spark)


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


@pytest.mark.parametrize("scores", ["logits", "probabilities", pytest.param("logits (rows,)", marks=pytest.mark.slow)])
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


def test_nulls_are_refused(adapter: str, numbers: DataFrame) -> None:
    model = TorchModel(model=net(1), feature_columns=["features"], label_columns=["label"], loss=nn.MSELoss())
    holes = numbers.withColumn("features", F.expr("if(id = 5, null, features)"))
    with pytest.raises(Exception, match=r"column 'features'( in transform)? has (1 null|nulls)"):
        model.transform(holes).collect()


def test_nan_is_a_value(numbers: DataFrame) -> None:
    nan = numbers.withColumn("a", F.expr("if(id = 5, cast('nan' as float), a)"))
    single = TorchModel(model=nn.Identity(), feature_columns=["a"], label_columns=["a"])
    assert sum(np.isnan(row.a__output) for row in single.transform(nan).collect()) == 1
