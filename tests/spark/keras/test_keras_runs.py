"""Fits of KerasEstimator that are interrupted and resumed; models saved, loaded elsewhere, or from a script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel

from spark_hvd.estimators import CheckpointError, KerasEstimator, KerasModel, LocalBackend, Store
from spark_hvd.estimators.keras.loop import _KerasFit
from spark_hvd.runner import RankFailedError
from tests.spark.estimator_support import means, numbers
from tests.spark.keras.support import estimator, keras, net, predicted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.slow


@pytest.mark.night
def test_a_run_goes_on_to_the_same_end(df: DataFrame, tmp_path: Path) -> None:
    """Even if epochs end with averages in place of the weights, with which the training does not go on."""

    def fails(now: bool) -> None:
        import spark_hvd.torch as hvd

        if now and hvd.rank() == 0:  # which has written the checkpoint
            raise ZeroDivisionError

    def fit(folder: str, epochs: int, optimizer: str = "adam", averages: bool = True, end: int = 9) -> KerasModel:
        params = {"optimizer": optimizer, "shuffle": True, "store": Store.create(str(tmp_path / folder)), "run_id": "r"}
        if optimizer == "adam":
            params["optimizer"] = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5)
        callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if averages else []
        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: fails(epoch == end)))
        return estimator(net(dropout=0.3), epochs=epochs, callbacks=callbacks, **params).fit(df)

    whole = fit("whole", 3)
    with pytest.raises(RankFailedError, match="ZeroDivisionError"):
        fit("parts", 3, end=1)
    with pytest.raises(CheckpointError, match="in place of the weights"):
        fit("parts", 3, averages=False)
    parts = fit("parts", 3)
    for one, two in zip(whole.getModel().get_weights(), parts.getModel().get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    assert [row["loss"] for row in whole.getHistory()] == [row["loss"] for row in parts.getHistory()]
    with pytest.raises(CheckpointError, match="another optimizer: Adam then, AdamW now"):  # of the same variables
        fit("parts", 4, "adamw")
    with pytest.raises(CheckpointError, match="keeps the averages only"):
        fit("parts", 4)


def killed_in_the_second_epoch() -> Any:
    """A callback that kills rank 1 after five of its batches, unless ranks were restarted."""
    import spark_hvd.torch as hvd

    class Killed(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (hvd.rank(), self.epoch, batch, hvd.generation()) == (1, 1, 4, 0):
                os.kill(os.getpid(), signal.SIGKILL)

    return Killed()


def test_an_epoch_that_was_cut_off_goes_on_to_the_same_end(df: DataFrame) -> None:
    def fit(backend: LocalBackend, *callbacks: Any) -> KerasModel:
        layers = [keras.layers.BatchNormalization(), *net(dropout=0.3).layers]
        model = keras.Sequential([keras.layers.Input((3,)), *layers])
        params = {"optimizer": "adam", "metrics": ["mae"], "shuffle": True, "validation": 0.2, "epochs": 3}
        return estimator(
            model, **params, batch_size=12, checkpoint_every=3, backend=backend, callbacks=list(callbacks)
        ).fit(df)

    whole, again = fit(LocalBackend(2)), fit(LocalBackend(2, max_restarts=1), killed_in_the_second_epoch())
    for one, two in zip(whole.getModel().get_weights(), again.getModel().get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    assert [row.get("restarts", 0) for row in again.getHistory()] == [0, 1, 1]
    assert list(map(means, whole.getHistory())) == list(map(means, again.getHistory()))


@pytest.mark.night
def test_an_epoch_that_was_cut_off_goes_on_with_fewer_ranks(df: DataFrame, tmp_path: Path) -> None:
    """The model does not change, so the epoch's means are those of all rows if each was used once."""
    df.repartition(4).write.parquet(str(tmp_path / "data"))
    settings: dict[str, Any] = {
        "optimizer": keras.optimizers.SGD(0.0),
        "metrics": ["mae"],
        "batch_size": 16,
        "checkpoint_every": 3,
        "store": Store.create(str(tmp_path / "store")),
        "run_id": "shrunk",
    }
    with pytest.raises(RankFailedError, match="SIGKILL"):
        estimator(net(), **settings, callbacks=[killed_in_the_second_epoch()]).fit_on_parquet(str(tmp_path / "data"))
    fitted = estimator(net(), **settings, backend=LocalBackend(1)).fit_on_parquet(str(tmp_path / "data"))
    features, value, _ = numbers()
    errors = fitted.getModel().predict(features, verbose=0)[:, 0] - value
    for row in fitted.getHistory():
        np.testing.assert_allclose([row["loss"], row["mae"]], [np.mean(errors**2), np.mean(np.abs(errors))], 1e-4)


@pytest.mark.night
def test_callbacks_and_the_best_model(df: DataFrame) -> None:
    import spark_hvd.keras.callbacks as call

    class Watch(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        """Loads other weights on one rank, and stops when it gets a loss for the second time."""

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def on_train_begin(self, logs: Any = None) -> None:
            import spark_hvd.torch as hvd

            if hvd.rank() == 1:
                self.model.set_weights([each + 1.0 for each in self.model.get_weights()])

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seen.append(logs["loss"])
            import spark_hvd.torch as hvd

            assert len(set(hvd.allgather_object(repr(self.model.get_weights())))) == 1
            if hvd.rank() == 1 and len(self.seen) == 2:
                self.model.stop_training = True

    best = call.BestModelCheckpoint("loss")
    rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch == 0 else 50.0)
    params = {"terminate_on_nan": False, "callbacks": [rates, Watch()], "checkpoint_callback": best}
    fitted = estimator(net(), epochs=5, **params).fit(df)
    rows = fitted.getHistory()
    assert len(rows) == 2
    features, value, _ = numbers()
    loss = np.mean((fitted.getModel().predict(features, verbose=0)[:, 0] - value) ** 2)
    assert loss < 10 < rows[1]["loss"]


IN_ANOTHER_PROCESS = """
import sys
from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", False).getOrCreate()
model = PipelineModel.load(sys.argv[1])
df = spark.createDataFrame([([1.0, 2.0, 3.0],)], "features array<float>")
print(model.transform(df).head()["value__output"])
"""


# Only Spark's workers lack the class by day; test_model_persistence.py starts a program for other models.
@pytest.mark.parametrize("elsewhere", [False, pytest.param(True, marks=pytest.mark.night)])
def test_saved_and_loaded(df: DataFrame, tmp_path: Path, elsewhere: bool) -> None:
    @keras.saving.register_keras_serializable("tests")
    class Doubled(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def call(self, inputs: Any) -> Any:
            return 2 * inputs

    keras.saving.get_custom_objects().clear()
    model = keras.Sequential(
        [keras.layers.Input((3,)), Doubled(), keras.layers.Lambda(lambda x: x + 1), keras.layers.Dense(1)]
    )
    fitting = estimator(model, custom_objects={"tests>Doubled": Doubled}, loss=keras.losses.Huber(0.25), epochs=1)
    fitting.save(str(tmp_path / "estimator"))
    loaded = KerasEstimator.load(str(tmp_path / "estimator"))
    assert loaded.getOptimizer().momentum == 0.9
    assert float(loaded.getLoss()(np.array([[0.0]]), np.array([[4.0]]))) == pytest.approx(0.25 * (4 - 0.125))
    fitted = Pipeline(stages=[fitting]).fit(df)
    fitted.save(str(tmp_path / "model"))
    wanted = fitted.stages[0].getModel().predict(np.array([[1.0, 2.0, 3.0]], "float32"), verbose=0)
    keras.saving.get_custom_objects().clear()
    if elsewhere:
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path / "model")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        found = done.stdout.split()[-1]
    else:
        one = df.sparkSession.createDataFrame([([1.0, 2.0, 3.0],)], "features array<float>")
        found = PipelineModel.load(str(tmp_path / "model")).transform(one).head()["value__output"]
    np.testing.assert_allclose(float(found), wanted[0, 0], 1e-5)


OF_A_SCRIPT = """
import keras

@keras.saving.register_keras_serializable()
class OwnLayer(keras.layers.Layer):
    def call(self, inputs):
        return 2 * inputs

@keras.saving.register_keras_serializable()
def own_activation(x):
    return x + 1

@keras.saving.register_keras_serializable()
class OwnLoss(keras.losses.Loss):
    def call(self, label, output):
        return keras.ops.mean((output - label) ** 2, -1)

class OwnMetric(keras.metrics.Mean):
    def update_state(self, label, output, sample_weight=None):
        super().update_state(keras.ops.abs(output - label))

@keras.saving.register_keras_serializable()
def unused(x, lock=__import__("threading").Lock()):
    return x

class UnregisteredLayer(keras.layers.Layer):
    def call(self, inputs):
        return inputs / 2
"""


@pytest.mark.night
def test_what_is_of_a_script_travels_with_its_names(df: DataFrame) -> None:
    script = vars(sys.modules["__main__"])
    before = dict(script)
    exec(OF_A_SCRIPT, script)
    try:
        model = keras.Sequential([keras.layers.Input((3,)), script["OwnLayer"](), script["UnregisteredLayer"]()])
        model.add(keras.layers.Dense(1, script["own_activation"]))
        fitting = estimator(model, loss=script["OwnLoss"](), metrics=[script["OwnMetric"](name="own")], epochs=1)
        fitted = fitting.fit(df)
        (row,) = fitted.getHistory()
        assert {"loss", "own"} <= row.keys()
        features, *_ = numbers()
        np.testing.assert_allclose(
            predicted(fitted, df, "value__output"), fitted.getModel().predict(features, verbose=0)[:, 0], 1e-4
        )
    finally:
        keras.saving.get_custom_objects().clear()
        for name in script.keys() - before.keys():
            del script[name]


def test_ranks_are_forked_from_a_process_that_has_keras(df: DataFrame, tmp_path: Path) -> None:
    class Tells(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, logs: Any = None) -> None:
            import spark_hvd.estimators.keras.on_torch as imported

            Path(tmp_path, str(os.getpid())).write_text(str(imported.PID))

    estimator(net(), backend=None, num_proc=2, epochs=1, callbacks=[Tells()]).fit(df)
    servers = [file.read_text() for file in tmp_path.iterdir()]
    assert len(servers) == 2
    assert len(set(servers)) == 1


@pytest.mark.parametrize(
    ("epochs", "swaps", "expected"),
    [
        (None, True, False),
        (None, False, False),
        (4, True, True),
        (4, False, "averages in place of"),
        (2, True, "the end"),
    ],
)
def test_what_may_resume_from_averages(epochs: int | None, swaps: bool, expected: bool | str) -> None:
    """Two of four epochs are done; `epochs` of the run whose checkpoint has averages."""
    callback: Any = keras.callbacks.SwapEMAWeights(swap_on_epoch=swaps)
    job = SimpleNamespace(history=[{}, {}])
    fit: Any = SimpleNamespace(spec=SimpleNamespace(run_id="r", epochs=4), job=job, _averaging=lambda: [callback])
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            _KerasFit._resume_averages(fit, epochs)
    else:
        _KerasFit._resume_averages(fit, epochs)
        assert callback._ema_weights_in_model is expected
