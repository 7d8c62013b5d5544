"""Errors in parameters or data are raised before ranks start, naming the value and the next step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest
import torch
from pyspark.ml import Estimator, Pipeline
from pyspark.ml.classification import OneVsRest
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.functions import array_to_vector
from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol, HasPredictionCol
from pyspark.ml.tuning import CrossValidator
from pyspark.sql import functions as F  # noqa: N812
from torch import nn
from torch.nn import functional

from spark_hvd.estimators import (
    DataError,
    LocalBackend,
    ModelError,
    NotFiniteLossError,
    Store,
    TorchEstimator,
    TorchModel,
)
from spark_hvd.estimators.fit.plan import label_of
from spark_hvd.estimators.torch.trial import try_transform
from tests.spark.estimator_support import estimator, frame, linear, ordered

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return frame(spark).cache()


CONSTRUCTION: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"batchsize": 3}, r"no parameter 'batchsize'\. Did you mean 'batch_size'\?"),
    "gone": ({"data_module": 1}, "no parameter 'data_module': use reader="),
    "zero": ({"batch_size": 0}, "batch_size=0: expected a whole number, at least 1"),
    "fraction": ({"epochs": 1.5}, r"epochs=1\.5: expected a whole number"),
    "share": ({"validation": 1.2}, r"validation=1\.2: expected a share"),
    "word": ({"reader": "arow"}, r"reader='arow': expected 'arrow' or 'petastorm'\. Did you mean 'arrow'\?"),
    "flag": ({"shuffle": "yes"}, "shuffle='yes': expected True or False"),
    "twice": ({"feature_cols": ["a", "a"]}, "a is named more than once"),
    "shapes": ({"input_shapes": [3]}, r"input_shapes=\[3\]: expected a list of shapes"),
    "dtype": ({"input_dtypes": ["float31"]}, "'float31' is not a torch dtype"),
    "model": ({"model": nn.Linear}, "expected a torch.nn.Module"),
    "store": ({"store": 3}, "store=3: expected a Store, or its path or URL"),
    "callback": ({"callbacks": [int]}, "expected a list of callbacks"),
    "callback that is a function": ({"callbacks": [print]}, "a subclass of Callback"),
    "class of a loss": ({"loss": nn.MSELoss}, r"such as torch\.nn\.MSELoss\(\), not its class"),
    "clip": ({"gradient_clip_norm": -1}, "gradient_clip_norm=-1: expected a number above 0"),
}


@pytest.mark.parametrize("case", CONSTRUCTION)
def test_at_construction(case: str) -> None:
    given, message = CONSTRUCTION[case]
    with pytest.raises((TypeError, ValueError), match=message):
        TorchEstimator(**given)


def test_values_of_a_grid_are_checked_at_fit(df: DataFrame) -> None:
    made = estimator()
    with pytest.raises(ValueError, match="batch_size=0"):
        made.fit(df, {made.batch_size: 0})


class Noting(torch.optim.SGD):
    """Keeps what numpy computed in its state, or fails."""

    def __init__(self, params: Any, error: Exception | None = None) -> None:
        super().__init__(params, lr=0.1)
        self._error = error

    def step(self, closure: Any = None) -> Any:
        if self._error is not None:
            raise self._error
        super().step(closure)
        first = self.param_groups[0]["params"][0]
        self.state[first]["norm"] = np.float64(1.0)


class Scores(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.outputs = outputs

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.linear(x)] * self.outputs


class Otherwise(nn.Module):
    """Returns different outputs in evaluation and in training."""

    def __init__(self, evaluated: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.evaluated = evaluated

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) if self.training else self.evaluated(self.linear(x))


class Squeezed(nn.Linear):
    """Ends in squeeze(), which removes the row dimension if there is one row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).squeeze()


FIT: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no features": ({"feature_cols": None}, ValueError, "feature_cols is missing"),
    "no loss": ({"loss": None}, ValueError, r"loss is missing: pass .* torch\.nn\.MSELoss"),
    "no optimizer": ({"optimizer": None}, ValueError, "optimizer is missing"),
    "two losses": ({"loss_constructors": [nn.MSELoss]}, ValueError, "both given"),
    "two numbers of ranks": ({"backend": LocalBackend(2)}, ValueError, "num_proc=2 and backend are both given"),
    "column": ({"feature_cols": ["feature"]}, DataError, r"feature_cols names 'feature'.* Did you mean 'features'\?"),
    "label column": ({"label_cols": ["valu"]}, DataError, r"label_cols names 'valu'.* Did you mean 'value'\?"),
    "weight column": ({"sample_weight_col": "w"}, DataError, "sample_weight_col names 'w'"),
    "validation column": ({"validation": "value"}, DataError, "validation='value' is a column of type double"),
    "shape": (
        {"model": nn.Linear(4, 1)},
        ModelError,
        r"model\(\*inputs\) failed .* before ranks were started.*features: float32 \[32, 3\]",
    ),
    "input shape": ({"input_shapes": [[-1, 2, 2]]}, ModelError, r"does not fit into the requested shape \[-1, 2, 2\]"),
    "dtype": ({"input_dtypes": ["int64"]}, DataError, "column 'features' has 96 of 96 values that int64 cannot hold"),
    "two outputs": ({"model": Scores(2)}, ModelError, "2 outputs for 1 label_cols"),
    "output of another shape": ({"model": linear(2)}, ModelError, "target size|size of tensor"),
    "two losses for one label": ({"loss": [nn.MSELoss(), nn.MSELoss()]}, ValueError, "2 entries for 1 label_cols"),
    "loss of rows": (
        {"loss": nn.MSELoss(reduction="none")},
        ModelError,
        r"the loss of a batch is float32 \[32, 1\]: expected a single number",
    ),
    "two outputs in evaluation": (
        {"model": Otherwise(lambda output: [output, output])},
        ModelError,
        "transform would fail.*the model returns 2 outputs, expected one for each of 'value__output'",
    ),
    "one row in evaluation": (
        {"model": Otherwise(lambda output: output.mean(0, keepdim=True))},
        ModelError,
        r"transform would fail.*output 0 of the model has the shape \(1, 1\) for 32 rows",
    ),
    "one row alone": (
        {"model": Squeezed(3, 1)},
        ModelError,
        r"transform would fail, tried on a batch of 1 row.* has the shape \(\) for 1 row: .* as in squeeze\(-1\)",
    ),
    "frozen model": (
        {"model": linear().requires_grad_(False)},
        ModelError,
        "does not depend on any trained parameter",
    ),
    "optimizer that fails at a step": (
        {"optimizer": lambda params: Noting(params, error=RuntimeError("no step"))},
        ModelError,
        r"optimizer.step\(\) failed .*RuntimeError: no step",
    ),
    "state that no checkpoint can hold": (
        {"optimizer": lambda params: Noting(params)},
        ModelError,
        r"a checkpoint failed .*optimizer\['state'\]\[0\]\['norm'\] is a numpy.float64",
    ),
    "other parameters": (
        {"optimizer": torch.optim.SGD(linear().parameters(), lr=0.1)},
        ValueError,
        "2 of its parameters are not parameters of model",
    ),
    "metric": ({"metrics": [functional.cross_entropy, "no"]}, TypeError, "expected a function"),
    "metrics groups": ({"metrics": [[], []]}, ValueError, "2 groups for 1 label_cols"),
    "weights of losses": ({"loss_weights": [1.0, 2.0]}, ValueError, "expected 1 numbers, one for each of label_cols"),
    "loss without reduction": (
        {"loss": lambda output, label: (output - label).mean(), "sample_weight_col": "weight"},
        ModelError,
        "reduction",
    ),
}


@pytest.mark.parametrize("case", FIT)
def test_at_fit(df: DataFrame, case: str) -> None:
    given, kind, message = FIT[case]
    with pytest.raises(kind, match=f"(?s){message}"):
        estimator(**given).fit(df)


class Wraps(Estimator[TorchModel], HasLabelCol, HasFeaturesCol, HasPredictionCol):
    """A classifier as OneVsRest needs it."""

    def _fit(self, dataset: DataFrame) -> TorchModel:
        return estimator(run_id="one").fit(dataset)


@pytest.mark.parametrize("given", [{"run_id": "one"}, {}])
def test_fits_for_several_maps_are_not_one_run(df: DataFrame, given: dict[str, Any]) -> None:
    made = estimator(**given)
    with pytest.raises(ValueError, match="run_id='one' in one of several fits"):
        made.fit(df, [{made.batch_size: size, **({} if given else {made.run_id: "one"})} for size in (8, 16)])
    if not given:  # but one map is one run
        (fitted,) = made.fit(df, [{made.epochs: 1, made.run_id: "alone"}])
        assert len(fitted.getHistory()) == 1
    else:  # within a Pipeline, too, which Spark ML's tuning fits
        tuned = CrossValidator(
            estimator=Pipeline(stages=[made]),
            estimatorParamMaps=[{}],
            evaluator=RegressionEvaluator(labelCol="value"),
            numFolds=2,
        )
        with pytest.raises(ValueError, match="run_id='one' in one of several fits"):
            tuned.fit(df)
        with pytest.raises(ValueError, match="run_id='one' in one of several fits"):
            OneVsRest(classifier=Wraps(), labelCol="late").fit(df)


def test_fits_of_one_estimator_are_told_apart() -> None:
    made, other = estimator(), estimator()
    assert label_of(made.uid, {"batch_size": 8, "epochs": 2, "model": made}) == ""
    assert label_of(made.uid, {"batch_size": 16, "epochs": 2, "model": other}) == "fit 2, batch_size=16"
    assert label_of(made.copy().uid, {"batch_size": 16, "epochs": 2}) == "fit 3"
    assert label_of(other.uid, {"batch_size": 8, "epochs": 2}) == ""


def test_a_model_that_is_trained_for_another_use_may_fail_to_transform(caplog: pytest.LogCaptureFixture) -> None:
    model = TorchModel(model=Otherwise(lambda output: None), feature_columns=["x"], label_columns=["y"])
    try_transform(model, [torch.zeros(2, 3)], needed=False)
    assert "transform would fail" in caplog.text
    assert "the model returned NoneType" in caplog.text


def test_a_model_that_transforms_batches_transforms_single_rows() -> None:
    model = TorchModel(model=Squeezed(3, 2), feature_columns=["x"], label_columns=["y"])
    with pytest.raises(ModelError, match=r"has the shape \(2,\) for 1 row: its first number must be the number of"):
        try_transform(model, [torch.zeros(2, 3)], needed=False)


def test_strings_are_refused_with_the_remedy(df: DataFrame) -> None:
    with pytest.raises(DataError, match=r"'value' has the type string.*StringIndexer"):
        estimator().fit(df.withColumn("value", F.col("value").cast("string")))


def test_a_frame_of_another_library(df: DataFrame) -> None:
    frame = df.limit(3).toPandas()
    with pytest.raises(
        TypeError, match=r"fit got a pandas\.core\.frame\.DataFrame: .* spark\.createDataFrame\(frame\)"
    ):
        estimator().fit(frame)


def test_a_store_by_its_url() -> None:
    assert estimator(store="memory://somewhere").getStore().url == Store.create("memory://somewhere").url


def test_an_empty_frame(df: DataFrame) -> None:
    with pytest.raises(DataError, match="no rows"):
        estimator().fit(df.where("false"))


def test_fewer_rows_than_ranks(df: DataFrame) -> None:
    with pytest.raises(DataError, match="1 row for training and num_proc=2: expected at least one row for each rank"):
        estimator().fit(df.limit(1))


@pytest.mark.parametrize(("column", "made"), [("features", estimator), ("value", ordered)])
def test_nulls_are_counted(df: DataFrame, column: str, made: Callable[[], TorchEstimator]) -> None:
    holes = df.withColumn(column, F.when(F.col("row") % 100 != 99, F.col(column)))
    with pytest.raises(DataError, match=rf"column '{column}' has 2 null\(s\) in 240 rows.*na\.drop"):
        made().fit(holes)


NEGATIVE = (
    "if(row < 200, 1.0, -0.25)",
    "has 40 of 240 rows whose weight is negative, NaN or infinite, such as -0.25",
)
ZERO = ("0", "all weights of the rows for training are 0")


@pytest.mark.parametrize(
    ("weight", "message", "made"),
    [
        (*NEGATIVE, estimator),
        (*ZERO, ordered),
        pytest.param(*NEGATIVE, ordered, marks=pytest.mark.slow),
        pytest.param(*ZERO, estimator, marks=pytest.mark.slow),
    ],
)
def test_weights_that_are_none(df: DataFrame, weight: str, message: str, made: Callable[..., TorchEstimator]) -> None:
    with pytest.raises(DataError, match=f"sample_weight_col='weight'.*{message}"):
        made(sample_weight_col="weight").fit(df.withColumn("weight", F.expr(weight)))


NAN = "float('nan')"


def test_nan_in_lists_is_told_with_a_remedy_that_works(df: DataFrame) -> None:
    """The driver reports the first 32 rows, and the rank that has the row reports others: in the same words."""
    for row, error, where in ((7, DataError, "7"), (99, NotFiniteLossError, r"\d+")):
        odd = df.withColumn("features", F.expr(f"if(row = {row}, array({NAN}, 1f, 2f), features)"))
        told = f"column 'features' has 1 value NaN or infinite, the first, nan, in row {where} of the batch"
        with pytest.raises(error, match=f"the loss is nan.* {told}.*into arrays: .*df.where.*F.forall.'features'"):
            estimator().fit(odd)
    assert estimator(epochs=1).fit(odd.where(F.forall("features", lambda value: F.abs(value) < float("inf"))))


def test_nan_in_vectors_is_told_before_ranks_start(df: DataFrame) -> None:
    vectors = df.select(
        array_to_vector(F.expr(f"array(float(row), if(row = 7, {NAN}, 1f), 2f)")).alias("features"), "value"
    )
    text = "before ranks were started: column 'features' has 1 value .*Imputer, .*VectorAssembler.handleInvalid='skip'"
    with pytest.raises(DataError, match=text):
        estimator().fit(vectors)


@pytest.mark.parametrize("made", [estimator, ordered])
def test_arrays_of_two_lengths(df: DataFrame, made: Callable[[], TorchEstimator]) -> None:
    ragged = df.withColumn("features", F.when(F.col("row") == 200, F.array(F.lit(1.0))).otherwise(F.col("features")))
    with pytest.raises(DataError, match=r"'features'.*(3.*1|1.*3)"):
        made().fit(ragged)


@pytest.mark.slow
def test_one_huge_partition_is_shared_by_all_ranks(spark: SparkSession) -> None:
    fitted = estimator(batch_size=1000, epochs=1, num_proc=2).fit(frame(spark, 3001))
    assert len(fitted.getHistory()) == 1
    assert fitted.getHistory()[0]["rows_per_second"] > 0
