"""KerasEstimator's validation in parallel: it reports what ranks would have reported; callbacks get it later."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

import spark_hvd.torch as hvd
from spark_hvd.estimators import LocalBackend, Store
from spark_hvd.estimators.training.background_validation import ValidationFolder
from tests.conftest import wait_until
from tests.spark.estimator_support import means
from tests.spark.keras.support import estimator, keras, net

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_leaks")]


def hearing(folder: ValidationFolder, path: Path) -> Any:
    """A callback that begins an epoch when the one before has been validated, and writes down what it hears of them.

    It loads other weights on one rank before the training, and looks whether ranks have the same after each epoch.
    """

    class Hears(keras.callbacks.Callback):  # type: ignore[misc, name-defined] # Any
        def on_train_begin(self, logs: Any = None) -> None:
            self.heard: list[Any] = []
            if hvd.rank() == 1:
                self.model.set_weights([each + 1.0 for each in self.model.get_weights()])

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if hvd.rank() == 0:
                wait_until(lambda: max(folder.results().epochs, default=0) >= epoch, 300)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.heard.append(logs.get("val_loss"))
            assert len(set(hvd.allgather_object(repr(self.model.get_weights())))) == 1
            if hvd.rank() == 0:
                path.write_text(json.dumps(self.heard))

    return Hears()


@pytest.mark.night  # by day: the next test, and the same of TorchEstimator
def test_a_history_is_as_if_ranks_had_validated(df: DataFrame, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"validation": "held", "val_batch_size": 7, "epochs": 3, "restore_best_weights": True}
    settings["metrics"] = ["mae", keras.metrics.RootMeanSquaredError(name="rmse")]
    ordinary = estimator(net(), **settings, store=Store.create(tmp_path / "one")).fit(df)
    store, path = Store.create(tmp_path / "two"), tmp_path / "heard.json"
    settings |= {"store": store, "run_id": "late", "validation_in_background": True}
    late = estimator(net(), **settings, callbacks=[hearing(ValidationFolder(store, "late"), path)]).fit(df)
    history = late.getHistory()
    for row, wanted in zip(history, ordinary.getHistory(), strict=True):
        assert means(row) == pytest.approx(means(wanted), rel=1e-6)
    told = [row["val_loss"] for row in history]
    assert json.loads(path.read_text()) == [None, told[0], told[2]], "late, but for the last, which ranks validate"
    for one, two in zip(late.getModel().get_weights(), ordinary.getModel().get_weights(), strict=True):
        assert one == pytest.approx(two, rel=1e-5)
    assert {each.name for each in Path(store.run_path("late")).glob("*.ckpt")} <= {"last.ckpt", "best.ckpt"}


def test_early_stopping_hears_of_an_earlier_epoch(
    df: DataFrame, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store, path = Store.create(tmp_path), tmp_path / "heard.json"
    folder = ValidationFolder(store, "worse")
    settings: dict[str, Any] = {"validation": "held", "validation_in_background": True, "epochs": 9, "store": store}
    settings |= {"optimizer": keras.optimizers.SGD(0.0), "run_id": "worse", "backend": LocalBackend(2)}  # no better
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=1)
    history = estimator(net(), **settings, callbacks=[hearing(folder, path), stopping]).fit(df).getHistory()
    assert len(history) == 3
    assert all("val_loss" in row for row in history), "ranks have validated the last one"
    assert json.loads(path.read_text()) == [None, history[0]["val_loss"], history[1]["val_loss"]]
    assert "conditioned on metric" not in capfd.readouterr().err
    keeping = keras.callbacks.EarlyStopping("val_loss", restore_best_weights=True)
    with pytest.raises(ValueError, match=r"EarlyStopping\(restore_best_weights=True\) with validation_in_background"):
        estimator(net(), **settings, callbacks=[keeping]).fit(df)
