"""Ranks whose batches differ in rows, or in a loss's divisor, together make the step of the whole batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest
import torch
from pyspark.sql import functions as F  # noqa: N812
from torch import nn
from torch.nn import functional

import spark_hvd.torch as hvd
from spark_hvd import DataError
from spark_hvd.estimators import TorchEstimator
from spark_hvd.estimators.torch.weighted import Shares
from tests.spark.estimator_support import estimator, frame, linear, numbers, ordered, reference, same

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def nine(spark: SparkSession) -> DataFrame:
    return frame(spark, 9).cache()


def whole(rows: int, loss: Any, label: torch.Tensor, outputs: int = 1, rate: float = 0.1) -> tuple[Any, list[float]]:
    """Return one process's weights and losses if it takes all rows in one step, twice."""
    model, losses = linear(outputs), []
    features = torch.from_numpy(numbers(rows)[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(2):
        optimizer.zero_grad()
        output = model(features)
        value = loss(output[:, 0] if outputs == 1 else output, label)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return model.state_dict(), losses


def mse(model: nn.Module, rows: slice) -> torch.Tensor:
    features, value, _ = map(torch.from_numpy, numbers(12))
    return nn.functional.mse_loss(model(features[rows])[:, 0], value[rows])


def test_the_last_step_of_an_epoch_is_divided_by_the_batches_it_has(spark: SparkSession) -> None:
    fitted = ordered(batch_size=2, backward_passes_per_step=2).fit(frame(spark, 12))
    same(fitted.getModel(), reference(mse, batch=2, rows=12, passes=2), 1e-6)


@pytest.mark.parametrize("rows", [9, pytest.param(442, marks=pytest.mark.slow), 3])
def test_a_step_is_that_of_all_rows(spark: SparkSession, nine: DataFrame, rows: int) -> None:
    df = nine if rows == 9 else frame(spark, rows)
    weights, losses = whole(rows, nn.MSELoss(), torch.from_numpy(numbers(rows)[1]))
    fitted = estimator(batch_size=221).fit(df)
    same(fitted.getModel(), weights, 1e-6)
    assert [row["loss"] for row in fitted.getHistory()] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(nn.CrossEntropyLoss(weight=torch.tensor([0.1, 3.0])), id="classes weigh"),
        pytest.param(partial(functional.cross_entropy, ignore_index=1), id="left out by one"),
        pytest.param(
            lambda output, label: functional.cross_entropy(output, label.long(), reduction="sum"),
            id="a sum that does not tell",
        ),
        *(  # by day: unit/test_weighted_losses.py, and the ones above
            pytest.param(loss, id=name, marks=pytest.mark.slow)
            for name, loss in {
                "labels are left out": nn.CrossEntropyLoss(ignore_index=1),
                "a sum": nn.CrossEntropyLoss(reduction="sum"),
                "classes of a function": partial(functional.cross_entropy, weight=torch.tensor([0.1, 3.0])),
                "a sum of one": partial(partial(functional.cross_entropy, reduction="sum"), label_smoothing=0.1),
            }.items()
        ),
    ],
)
def test_a_loss_divides_by_what_all_ranks_have(nine: DataFrame, loss: Loss) -> None:
    label = torch.from_numpy(numbers(9)[2]).long()
    weights, losses = whole(9, loss, label, outputs=2)
    fitted = estimator(linear(2), loss=loss, label_cols=["late"], batch_size=5).fit(nine)
    same(fitted.getModel(), weights, 1e-5)
    assert [row["loss"] for row in fitted.getHistory()] == pytest.approx(losses, rel=1e-5)


def test_a_validation_divides_by_what_all_batches_have(spark: SparkSession) -> None:
    """The loss is that of all rows of the validation, whatever its batches."""
    features, _, late = map(torch.from_numpy, numbers(16))
    model, loss = linear(2), nn.CrossEntropyLoss(weight=torch.tensor([0.1, 3.0]))
    df = frame(spark, 16).withColumn("held", F.expr("int(row > 8)"))
    settings: dict[str, Any] = {"val_batch_size": 2, "validation": "held", "epochs": 1}
    fitted = estimator(model, loss=loss, label_cols=["late"], batch_size=5, **settings).fit(df)
    with torch.no_grad():
        wanted = loss(fitted.getModel()(features[9:]), late[9:].long())
    assert fitted.getHistory()[0]["val_loss"] == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "made"),
    [
        (nn.CrossEntropyLoss(), estimator),
        (functional.cross_entropy, ordered),
        pytest.param(nn.CrossEntropyLoss(), ordered, marks=pytest.mark.slow),
        pytest.param(functional.cross_entropy, estimator, marks=pytest.mark.slow),
    ],
)
def test_labels_of_minus_100_are_left_out_on_whatever_rank_they_are(
    nine: DataFrame, loss: Loss, made: Callable[..., TorchEstimator]
) -> None:
    df = nine.withColumn("late", F.expr("if(row % 2 = 0 or row > 5, late, -100)"))
    label = torch.tensor([row["late"] for row in df.orderBy("row").collect()])
    weights, losses = whole(9, loss, label, outputs=2)
    fitted = made(linear(2), loss=loss, label_cols=["late"], batch_size=5).fit(df)
    same(fitted.getModel(), weights, 1e-5)
    assert [row["loss"] for row in fitted.getHistory()] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "lowest", "asked"),
    [
        (nn.CrossEntropyLoss(), 0.0, 0),
        (nn.CrossEntropyLoss(), -1.0, 0),
        (nn.CrossEntropyLoss(), -100.0, 1),
        (nn.CrossEntropyLoss(), None, 1),
        (nn.CrossEntropyLoss(ignore_index=0), 0.0, 1),
        (functional.nll_loss, 0.0, 0),
        (nn.MSELoss(), None, 0),
    ],
)
def test_ranks_ask_each_other_only_where_labels_may_be_left_out(
    monkeypatch: pytest.MonkeyPatch, loss: Loss, lowest: float | None, asked: int
) -> None:
    calls: list[torch.Tensor] = []
    monkeypatch.setattr(hvd, "size", lambda: 2)
    monkeypatch.setattr(hvd, "allreduce", lambda mine, **_: calls.append(mine) or 2 * mine)
    assert Shares([loss], [lowest]).of([torch.tensor([1, 0, 1])], 3, 0.75) == [1.0 if asked else 0.75]
    assert len(calls) == asked


def test_weights_of_rows_count_on_whatever_rank_they_are(nine: DataFrame) -> None:
    weight = torch.arange(9) % 3

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return ((output - label).square() * weight).mean()

    weights, losses = whole(9, loss, torch.from_numpy(numbers(9)[1]))
    fitted = estimator(batch_size=5, sample_weight_col="weight").fit(nine)
    same(fitted.getModel(), weights, 1e-6)
    assert [row["loss"] for row in fitted.getHistory()] == pytest.approx(losses, rel=1e-6)


@pytest.mark.slow
def test_keras_makes_the_step_of_all_rows(spark: SparkSession) -> None:
    keras = pytest.importorskip("keras")
    from spark_hvd.estimators import KerasEstimator, LocalBackend

    features, value, _ = numbers(5)
    weight = np.arange(5) % 3
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    alone = keras.models.clone_model(model)
    alone.set_weights(model.get_weights())
    alone.compile(keras.optimizers.SGD(0.1), "mse")
    history = alone.fit(features, value, batch_size=5, epochs=2, sample_weight=weight, shuffle=False, verbose=0)
    fitted = KerasEstimator(
        model=model,
        optimizer=keras.optimizers.SGD(0.1),
        loss="mse",
        feature_cols=["features"],
        label_cols=["value"],
        sample_weight_col="weight",
        scale_lr=False,
        backend=LocalBackend(2),
        batch_size=3,
        epochs=2,
        verbose=0,
    ).fit(frame(spark, 5))
    for mine, its in zip(fitted.getModel().get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)
    assert [row["loss"] for row in fitted.getHistory()] == pytest.approx(history.history["loss"], rel=1e-5)


@pytest.mark.night
def test_lightning_makes_the_step_of_all_rows(spark: SparkSession, nine: DataFrame) -> None:
    L = pytest.importorskip("lightning")  # noqa: N806 - the usual name
    from spark_hvd.estimators import LightningEstimator, LocalBackend

    class Net(L.LightningModule):  # type: ignore[misc] # Any
        def __init__(self) -> None:
            super().__init__()
            self.net = linear()

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(batch["features"])[:, 0], batch["value"])
            self.log("seen", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    weights, losses = whole(9, nn.MSELoss(), torch.from_numpy(numbers(9)[1]))
    settings: dict[str, Any] = {
        "model": Net(),
        "feature_cols": ["features"],
        "label_cols": ["value"],
        "backend": LocalBackend(2),
        "epochs": 2,
        "verbose": 0,
    }
    fitted = LightningEstimator(**settings, batch_size=5).fit(nine)
    same(fitted.getModel().net, weights, 1e-6)
    for name in ("loss", "seen"):
        assert [row[name] for row in fitted.getHistory()] == pytest.approx(losses, rel=1e-5)

    # Three batches: two form a step, and the last one another.
    twice = {"accumulate_grad_batches": 2}
    fitted = LightningEstimator(**settings, batch_size=2, shuffle=False, trainer_args=twice).fit(frame(spark, 12))
    same(fitted.getModel().net, reference(mse, batch=2, rows=12, passes=2), 1e-6)


def test_a_batch_of_one_row_is_told_of_before_training(spark: SparkSession) -> None:
    def normalising() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    df = frame(spark, 13)
    with pytest.raises(DataError, match=r"rank 1 of 2 would .*'1', a layer .* 13 rows, batch_size=5.* drop_last=True"):
        estimator(normalising(), batch_size=5, epochs=1).fit(df)  # of 13 rows, 5 and 2 on one rank, 5 and 1 on another
    assert len(estimator(normalising(), batch_size=5, epochs=1, drop_last=True).fit(df).getHistory()) == 1
    assert len(estimator(normalising(), batch_size=6, epochs=1).fit(df).getHistory()) == 1  # 7 and 6
