"""An estimator returns the model as callbacks and the framework leave it, as in one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.estimators import Callback, KerasEstimator, LocalBackend, Store, TrainState
from tests.later import Later
from tests.spark.estimator_support import estimator, frame, numbers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])

keras: Any = Later("keras")


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return frame(spark).cache()


class SetsTwo(Callback):
    def on_train_end(self, state: TrainState) -> None:
        with torch.no_grad():
            for param in state.model.parameters():
                param.fill_(2.0)


def test_weights_set_at_the_end_of_a_torch_fit(df: DataFrame, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    settings: dict[str, Any] = {"run_id": "one", "backend": LocalBackend(2), "num_proc": None, "store": store}
    fitted = estimator(callbacks=[SetsTwo()], epochs=1, **settings).fit(df)
    assert all(bool((param == 2.0).all()) for param in fitted.getModel().parameters())
    # Nothing is left to train: the run still has the callback's result.
    again = estimator(epochs=1, **settings).fit(df)
    assert all(bool((param == 2.0).all()) for param in again.getModel().parameters())
    longer = estimator(epochs=2, **settings).fit(df)
    assert not any(bool((param == 2.0).any()) for param in longer.getModel().parameters())


class Codebook(torch.nn.Module):
    """A buffer that each rank's rows change, and that later rows use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = 0.5 * self.seen + 0.5 * features.mean(0)
        out: torch.Tensor = self.linear(features + self.seen)
        return out


class SameBuffers(Callback):
    def on_epoch_end(self, state: TrainState) -> None:
        mine, *others = hvd.allgather_object(state.model.seen, name="seen")
        assert mine.abs().sum() > 0
        assert all(torch.equal(mine, other) for other in others)


@pytest.mark.parametrize(
    "params",
    [
        {},
        pytest.param({"validation": 0.3}, marks=pytest.mark.slow),
        {"validation": 0.3, "validation_in_background": True},
    ],
)
def test_ranks_begin_an_epoch_with_the_same_buffers(df: DataFrame, tmp_path: Path, params: dict[str, Any]) -> None:
    backend = LocalBackend(2)
    settings: dict[str, Any] = {"backend": backend, "num_proc": None, "store": Store.create(str(tmp_path)), **params}
    estimator(model=Codebook(), callbacks=[SameBuffers()], epochs=2, **settings).fit(df)


def keras_fit(df: DataFrame, **params: Any) -> Any:
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    settings: dict[str, Any] = {
        "loss": "mse",
        "feature_cols": ["features"],
        "label_cols": ["value"],
        "backend": LocalBackend(2),
        "batch_size": 30,
        "verbose": 0,
        "random_seed": 1,
        "shuffle": False,
        "scale_lr": False,
    }
    return KerasEstimator(model=model, **{**settings, **params}).fit(df)


def mse(fitted: Any) -> float:
    features, value, _ = numbers()
    return float(np.mean((fitted.getModel().predict(features, verbose=0)[:, 0] - value) ** 2))


@pytest.mark.slow
def test_keras_restores_the_best_weights(df: DataFrame) -> None:
    rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 if epoch < 2 else 5.0)
    best = keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
    fitted = keras_fit(df, epochs=6, optimizer=keras.optimizers.SGD(0.05), callbacks=[rates, best])
    assert mse(fitted) < 1 < fitted.getHistory()[-1]["loss"]


class StopsInTheSecondBatch:
    """Becomes a Keras callback if Keras is installed."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        import spark_hvd.torch as hvd

        self.batches = getattr(self, "batches", 0) + 1
        if hvd.rank() == 1 and batch == 1:
            self.model.stop_training = True  # type: ignore[attr-defined]


class Tests:
    """Becomes one, too."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["tests"] = 1.0

    def on_test_begin(self, logs: Any = None) -> None:
        self.kept = self.model.get_weights()  # type: ignore[attr-defined]
        self.model.set_weights([np.zeros_like(each) for each in self.kept])  # type: ignore[attr-defined]

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        assert logs["loss"] > 0

    def on_test_end(self, logs: Any = None) -> None:
        self.model.set_weights(self.kept)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_keras_finalizes_averages_of_a_fit_that_was_stopped_within_an_epoch(df: DataFrame) -> None:
    """Keras does so at the end of each fit, and not before an epoch is validated."""
    stops = type("Stops", (StopsInTheSecondBatch, keras.callbacks.Callback), {})()
    tests = type("Tested", (Tests, keras.callbacks.Callback), {})()
    optimizer = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9)
    fitted = keras_fit(df, epochs=3, optimizer=optimizer, callbacks=[stops, tests], validation="held")
    features, value, _ = numbers()
    held = np.arange(len(value)) % 4 == 0
    (row,) = fitted.getHistory()
    assert row["epoch"] == 1
    # The test callback made the model return zero while it was validated.
    np.testing.assert_allclose(row["val_loss"], np.mean(value[held] ** 2), rtol=1e-4)
    trained = [features[~held], value[~held, None]]
    weights, bias = np.zeros((3, 1)), np.zeros(1)
    average = None
    for step in range(2):
        rows = slice(step * 60, step * 60 + 60)  # of both ranks
        error = trained[0][rows] @ weights + bias - trained[1][rows]
        weights = weights - 0.05 * 2 * trained[0][rows].T @ error / 60
        bias = bias - 0.05 * 2 * error.mean(0)
        average = weights if average is None else 0.9 * average + 0.1 * weights
    np.testing.assert_allclose(fitted.getModel().get_weights()[0], average, rtol=1e-4)
