"""Validation in parallel with training, on local[4]: its results are those of the ranks, and it never delays them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd.checkpoint import background
from spark_hvd.estimators import Callback, CSVLogger, EarlyStopping, LocalBackend, Store, TrainState
from spark_hvd.estimators.training.background_validation import ValidationFolder, ValidationRequest
from spark_hvd.estimators.training.checkpoint import Checkpoints
from spark_hvd.runner.stopping import stopped_by
from tests.conftest import start_session, wait_until
from tests.spark.estimator_support import estimator, frame, means, same

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_leaks")]


@pytest.fixture(scope="module")
def four() -> SparkSession:
    return start_session("local[4]")


@pytest.fixture(scope="module")
def df(four: SparkSession) -> DataFrame:
    return frame(four, 202).cache()


class Waits(Callback):
    """Begins an epoch when the one so many before it, or a later one, has been validated."""

    def __init__(self, behind: int) -> None:
        self.behind = behind

    def on_epoch_begin(self, state: TrainState) -> None:
        if state.rank == 0 and state.validation_in_background and state.epoch >= self.behind:
            folder = ValidationFolder(state.store, state.run_id)
            wait_until(lambda: max(folder.results().epochs, default=0) > state.epoch - self.behind, 300)


class Held:
    """A mean square metric; a validation in parallel with a training of two waits in it until a file exists."""

    __name__ = "held"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if is_validating():
            (self.folder / "held").touch()
            wait_until(lambda: (self.folder / "go").exists(), 300)
        return (output - label).square().mean()


def is_validating() -> bool:
    """Return whether this rank validates while two others train."""
    return hvd.is_initialized() and hvd.size() == 1


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def test_a_history_is_as_if_ranks_had_validated(df: DataFrame, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        # Ranks have different shares of the classes, so their losses' weights depend on all of them.
        "loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0])),
        "label_cols": ["late"],
        "metrics": [lambda output, label: (output.argmax(1) == label).double().mean()],
        "validation": "held",
        "val_batch_size": 7,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
        "epochs": 5,
        "restore_best_weights": True,
    }
    settings["metrics"][0].__name__ = "accuracy"
    ordinary = estimator(network(), **settings, store=Store.create(tmp_path / "one")).fit(df)
    store = Store.create(tmp_path / "two")
    settings |= {"callbacks": [Waits(1), CSVLogger()], "store": store}
    fitted = estimator(network(), **settings, validation_in_background=True).fit(df)
    pairs = list(zip(fitted.getHistory(), ordinary.getHistory(), strict=True))
    assert len({row["val_loss"] for row, _ in pairs}) == 5
    for row, wanted in pairs:
        assert means(row) == pytest.approx(means(wanted), rel=1e-9)
    same(fitted.getModel(), dict(ordinary.getModel().state_dict()), 1e-30)
    run = Path(store.run_path(fitted.value_of("run_id")))
    assert {path.name for path in run.iterdir()} <= {"last.ckpt", "best.ckpt", "logs", "owner"}
    header, *lines = (run / "logs" / "history.csv").read_text().splitlines()
    assert [line.split(",")[header.split(",").index("val_loss")] for line in lines] == [
        str(row["val_loss"]) for row, _ in pairs
    ]


class Lets(Callback):
    """Lets a validation continue when the last epoch begins; records before what else waits to be validated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_epoch_begin(self, state: TrainState) -> None:
        if state.rank == 0 and state.epoch == 1:
            wait_until(lambda: (self.folder / "held").exists(), 120)
        if state.rank == 0 and state.epoch == state.epochs - 1:
            background.ended()
            waiting = ValidationFolder(state.store, state.run_id).waiting()
            (self.folder / "waiting").write_text(" ".join(request.name for request in waiting))
            (self.folder / "go").touch()


def test_a_training_does_not_wait_for_a_validation_that_is_slower(
    df: DataFrame, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"metrics": [Held(tmp_path)], "callbacks": [Lets(tmp_path)], "epochs": 6, "verbose": 1}
    settings["store"] = Store.create(tmp_path / "store")
    fitted = estimator(**settings, validation="held", progress="off", validation_in_background=True).fit(df)
    assert [row["epoch"] for row in fitted.getHistory() if "val_loss" in row] == [1, 6]
    assert (tmp_path / "waiting").read_text() == ValidationRequest(0, 5).name, "one, the newest"
    out = capfd.readouterr().out
    lines = [line for line in out.splitlines() if "val_held" in line]
    assert ["validated in the background" in line for line in lines] == [True, False], lines
    assert "[0] 4 of 6 epochs were not validated" in out


def test_early_stopping_sees_them_late_and_says_so(
    df: DataFrame, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    worse = estimator(
        optimizer=lambda params: torch.optim.SGD(params, lr=2.0),  # each epoch is worse than the previous one
        scale_lr=False,
        validation="held",
        validation_in_background=2,
        epochs=9,
        callbacks=[Waits(2), EarlyStopping(patience=1)],
        restore_best_weights=True,
        run_id="worse",
        store=Store.create(tmp_path),
        verbose=1,
        progress="off",
    )
    trained = worse.fit(df)
    history = trained.getHistory()
    stopped = [line for line in capfd.readouterr().out.splitlines() if "stopped after" in line]
    last, by = len(history), max(row["epoch"] for row in history[:-1] if "val_loss" in row)
    assert stopped == [f"[0] stopped after epoch {last}, by the val_loss of epoch {by}"]
    assert by < last < 9
    validated = [row["epoch"] for row in history if "val_loss" in row]
    assert validated[-1] == last, "ranks have validated the last one"
    assert history.best("val_loss")["epoch"] == validated[0]
    best = Checkpoints(Store.create(tmp_path), "worse").trained(best=True)
    assert len(best["history"]) == validated[0]
    same(trained.getModel(), best["model"], 1e-30)


@pytest.mark.night
@pytest.mark.parametrize("slots", [4, None])
def test_without_a_free_slot_the_last_epoch_alone_is_validated(
    df: DataFrame, tmp_path: Path, slots: int | None
) -> None:
    settings: dict[str, Any] = {"validation": "held", "validation_in_background": True, "epochs": 3}
    settings["store"] = Store.create(tmp_path)
    fitted = estimator(**settings, num_proc=slots, callbacks=[Waits(1)] if slots is None else []).fit(df)
    validated = [row["epoch"] for row in fitted.getHistory() if "val_loss" in row]
    assert validated == ([3] if slots else [1, 2, 3]), "num_proc=None leaves a slot"


class Dies:
    """A metric that kills the rank that validates the second epoch in parallel with a training."""

    __name__ = "zero"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if is_validating():
            (self.folder / str(os.getpid())).touch()
            if len(list(self.folder.iterdir())) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(())


def test_a_validation_that_dies_is_told_and_no_more(
    df: DataFrame, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "seen").mkdir()
    settings: dict[str, Any] = {"metrics": [Dies(tmp_path / "seen")], "callbacks": [Waits(1)], "epochs": 4}
    settings["store"] = Store.create(tmp_path / "store")
    backend = LocalBackend(2, verbose=0)
    fitted = estimator(
        **settings, validation="held", validation_in_background=True, num_proc=None, backend=backend
    ).fit(df)
    assert [row["epoch"] for row in fitted.getHistory() if "val_loss" in row] == [1, 3, 4]
    (told,) = [record.getMessage() for record in caplog.records if "validating epoch" in record.getMessage()]
    assert "validating epoch 2 in the background failed" in told
    assert "SIGKILL" in told


class Killed(Callback):
    """Kills a rank in the third epoch, unless ranks were restarted."""

    def on_epoch_begin(self, state: TrainState) -> None:
        if (state.epoch, hvd.generation(), state.rank) == (2, 0, 1):
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.night
@pytest.mark.parametrize("options", [{"max_restarts": 1}, {"max_num_proc": 2}])
def test_ranks_that_are_started_again_have_what_was_told_before(
    df: DataFrame, tmp_path: Path, options: dict[str, int]
) -> None:
    settings: dict[str, Any] = {"validation": "held", "epochs": 4, "num_proc": None, "store": Store.create(tmp_path)}
    backend = LocalBackend(2, verbose=0, **options)
    ordinary = estimator(**settings, backend=backend).fit(df).getHistory()
    settings |= {"validation_in_background": True, "callbacks": [Waits(1), Killed()]}
    history = estimator(**settings, backend=backend).fit(df).getHistory()
    assert history.restarts == 1
    assert [means(row) for row in history] == [pytest.approx(means(row), rel=1e-9) for row in ordinary]


def test_a_driver_that_is_interrupted_leaves_nothing(df: DataFrame, tmp_path: Path) -> None:
    store, stop = Store.create(tmp_path / "store"), threading.Event()

    def interrupt() -> None:
        wait_until(lambda: (tmp_path / "held").exists(), 120)
        stop.set()

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    settings: dict[str, Any] = {"metrics": [Held(tmp_path)], "store": store, "run_id": "one", "epochs": 10**6}
    with pytest.raises(KeyboardInterrupt), stopped_by(stop):
        estimator(**settings, validation="held", validation_in_background=True).fit(df)
    interrupting.join()
    names = {path.name for path in Path(store.run_path("one")).iterdir()}
    assert "last.ckpt" in names
    assert not [name for name in names if name.startswith("validate-")]
