"""An estimator's fit equals that of one process on the same rows, step by step: weights and history.

Hypothesis generates the cases, the same in each run. `SPARK_HVD_NIGHT=5000` tries a fiftieth as many of each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from spark_hvd.estimators import LocalBackend, Store, TorchEstimator
from tests.oracle import fitting
from tests.oracle.fitting import FitCase, Seen, alone, fit_cases, loss_of, numbers, steps_seen
from tests.spark.estimator_support import linear, same
from tests.spark.lightning.support import Warm

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

for module in (sys.modules[__name__], fitting):
    cloudpickle.register_pickle_by_value(module)
NIGHT = int(os.environ.get("SPARK_HVD_NIGHT", "0"))


def some(cases: int) -> Callable[[Any], Any]:
    """Return settings for so many cases, the same in each run."""
    return settings(
        max_examples=-(-NIGHT // 50) or cases,
        derandomize=not NIGHT,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


pytestmark = [pytest.mark.slow, pytest.mark.timeout(36_000 if NIGHT else 300)]


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """Two long-lived ranks."""
    backend = Warm()
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(spark, tmp_path_factory)


class Made:
    """DataFrames and folders of cases."""

    def __init__(self, spark: SparkSession, folders: pytest.TempPathFactory) -> None:
        self._spark, self._folders = spark, folders
        self._store = folders.mktemp("store")

    def frame(self, case: FitCase) -> DataFrame:
        """Return a DataFrame with the rows of :func:`numbers`."""
        features, label, weight = (each.tolist() for each in numbers(case.rows))
        rows = list(zip(features, label, weight, strict=True))
        schema = "features array<float>, label float, weight float"
        frame = self._spark.createDataFrame([(x, y, float(w)) for x, y, w in rows], schema)
        return frame.repartition(case.partitions) if case.partitions > 1 else frame.coalesce(1)

    def folder(self) -> Path:
        """Return a new folder."""
        return self._folders.mktemp("seen")

    def settings(self, case: FitCase, warm: Warm) -> dict[str, Any]:
        """Return settings for an estimator of any framework."""
        where = {"store": Store.create(self._store), "backend": warm} if case.stored else {"num_proc": 2}
        return {
            **where,
            "feature_cols": ["features"],
            "label_cols": ["label"],
            "sample_weight_col": "weight" if case.weights else None,
            "batch_size": case.batch_size,
            "epochs": case.epochs,
            "shuffle": case.shuffle,
            "drop_last": case.drop_last,
            "random_seed": 5,
            "scale_lr": False,
            "verbose": 0,
        }


@some(4)
@given(case=fit_cases)
def test_torch(made: Made, warm: Warm, case: FitCase) -> None:
    folder = made.folder()
    fitted = TorchEstimator(
        model=Seen(folder),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=case.momentum),
        loss=loss_of(case),
        backward_passes_per_step=case.passes,
        **made.settings(case, warm),
    ).fit(made.frame(case))
    weights, losses = alone(case, steps_seen(folder, case, 2))
    same(fitted.getModel().net, weights, 1e-4 if case.reduction == "sum" else 1e-5)
    assert [row["loss"] for row in fitted.getHistory()] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("shuffle", [True, False])
def test_one_rank_takes_the_same_steps(made: Made, warm: Warm, shuffle: bool) -> None:
    case = FitCase(121, 4, 8, 2, True, shuffle, False, False, "MSELoss", "mean", 1, 0.0)
    frame, seen, models = made.frame(case), [], []
    for ranks in (2, 1):
        folder, one = made.folder(), replace(case, batch_size=16 // ranks)
        given = made.settings(one, warm) | ({"backend": LocalBackend(1)} if ranks == 1 else {})
        fitted = TorchEstimator(
            model=Seen(folder),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
            loss=loss_of(case),
            **given,
        ).fit(frame)
        seen.append([[sorted(step) for step in epoch] for epoch in steps_seen(folder, one, ranks)])
        models.append(fitted.getModel())
    assert seen[0] == seen[1]
    same(models[0], models[1].state_dict(), 1e-6)


@some(2)
@given(case=fit_cases)
def test_lightning(made: Made, warm: Warm, case: FitCase) -> None:
    L = pytest.importorskip("lightning")  # noqa: N806 - the usual name
    from spark_hvd.estimators import LightningEstimator

    case = replace(case, weights=False, loss="MSELoss", reduction="mean")

    class Module(L.LightningModule):  # type: ignore[misc] # Any
        def __init__(self, net: Seen) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(self.net(batch["features"])[:, 0], batch["label"])
            self.log("logged", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=case.momentum)

    folder = made.folder()
    fitted = LightningEstimator(
        model=Module(Seen(folder)),
        trainer_args={"accumulate_grad_batches": case.passes},
        **{
            name: each
            for name, each in made.settings(case, warm).items()
            if name not in ("sample_weight_col", "scale_lr")
        },
    ).fit(made.frame(case))
    weights, losses = alone(case, steps_seen(folder, case, 2))
    same(fitted.getModel().net.net, weights, 1e-5)
    for name in ("loss", "logged"):
        assert [row[name] for row in fitted.getHistory()] == pytest.approx(losses, rel=1e-4)


@pytest.mark.night  # by day: tests/spark/test_uneven_batches.py and tests/spark/keras/test_keras_training.py
@some(2)
@given(case=fit_cases)
def test_keras(made: Made, warm: Warm, case: FitCase) -> None:
    keras = pytest.importorskip("keras")
    from spark_hvd.estimators import KerasEstimator

    # Keras' layers are compiled, so none can record its rows: one step has all of them.
    case = replace(case, batch_size=200, drop_last=False, passes=1, loss="MSELoss", reduction="mean")
    start = linear()
    model = keras.Sequential([keras.layers.Input((1 + fitting.FEATURES,)), keras.layers.Dense(1)])
    first = np.concatenate([np.zeros((1, 1), "float32"), start.weight.detach().numpy().T])
    model.set_weights([first, start.bias.detach().numpy()])
    frame = made.frame(case)
    features, label, weight = (each.numpy() for each in numbers(case.rows))
    scaled = features.copy()
    scaled[:, 0] /= 1000  # row numbers are features here too
    alike = keras.models.clone_model(model)
    alike.set_weights(model.get_weights())
    alike.compile(keras.optimizers.SGD(0.05, momentum=case.momentum), "mse")
    history = alike.fit(
        scaled,
        label,
        batch_size=case.rows,
        epochs=case.epochs,
        sample_weight=weight if case.weights else None,
        verbose=0,
    )
    from pyspark.sql import functions as F  # noqa: N812

    smaller = F.transform("features", lambda x, at: F.when(at == 0, x / 1000).otherwise(x).cast("float"))
    fitted = KerasEstimator(
        model=model,
        optimizer=keras.optimizers.SGD(0.05, momentum=case.momentum),
        loss="mse",
        **made.settings(case, warm),
    ).fit(frame.withColumn("features", smaller))
    for mine, its in zip(fitted.getModel().get_weights(), alike.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)
    assert [row["loss"] for row in fitted.getHistory()] == pytest.approx(history.history["loss"], rel=1e-4)
