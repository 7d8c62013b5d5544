"""Runs of TorchEstimator: checkpoints, resuming from them, callbacks, early stopping, logs."""

from __future__ import annotations

import csv
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch
from pyspark.sql import functions as F  # noqa: N812
from torch import nn

from spark_hvd.checkpoint import background
from spark_hvd.estimators import (
    Callback,
    CheckpointError,
    CSVLogger,
    DataError,
    EarlyStopping,
    LocalBackend,
    MLflow,
    NotFiniteLossError,
    SparkBackend,
    Store,
    TensorBoard,
    TorchEstimator,
    TrainState,
)
from spark_hvd.estimators.training.checkpoint import Checkpoints
from spark_hvd.runner import RankFailedError
from spark_hvd.store.errors import StoreError
from tests.spark.estimator_support import estimator, frame, linear, ordered, same

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return frame(spark).cache()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.create(tmp_path_factory.mktemp("store"))


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


def test_a_resumed_run_equals_an_unbroken_one(df: DataFrame, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    settings = {
        "optimizer": lambda params: torch.optim.Adam(params, lr=0.01),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
        "shuffle": True,
        "validation": 0.2,
        "store": store,
    }
    whole = estimator(network(), **settings, epochs=4, run_id="whole").fit(df)
    estimator(network(), **settings, epochs=2, run_id="broken").fit(df)
    resumed = estimator(network(), **settings, epochs=4, run_id="broken").fit(df)
    same(resumed.getModel(), dict(whole.getModel().state_dict()), 1e-12)
    plain = [{k: v for k, v in row.items() if k not in ("seconds", "rows_per_second")} for row in whole.getHistory()]
    again = [{k: v for k, v in row.items() if k not in ("seconds", "rows_per_second")} for row in resumed.getHistory()]
    assert plain == again
    done = estimator(network(), **settings, epochs=4, run_id="broken").fit(df)
    same(done.getModel(), dict(whole.getModel().state_dict()), 1e-12)
    assert "run_id='broken' has its 4 epochs: its model is returned, nothing is trained" in caplog.text


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks_at_the_scaled_rate(df: DataFrame, store: Store) -> None:
    estimator(store=store, epochs=1, run_id="grown", num_proc=1).fit(df)
    rates = [row["lr"] for row in estimator(store=store, epochs=2, run_id="grown").fit(df).getHistory()]
    assert rates == pytest.approx([0.05, 0.1])


def test_resuming_with_another_model_or_optimizer(df: DataFrame, store: Store) -> None:
    estimator(store=store, epochs=1, run_id="other").fit(df)
    owner = Checkpoints(store, "other", "another").owner()
    with pytest.raises(CheckpointError, match=r"run_id='other' has a checkpoint of another model.*'weight'.*\[1, 3\]"):
        estimator(linear(2), label_cols=["late"], loss=nn.CrossEntropyLoss(), store=store, run_id="other").fit(df)
    with pytest.raises(CheckpointError, match="the state of another optimizer: SGD then, Adam now"):
        estimator(store=store, epochs=2, run_id="other", optimizer=torch.optim.Adam).fit(df)
    assert Checkpoints(store, "other", "another").owner() == owner, "a refused fit ends no other one"


def test_a_checkpoint_that_is_half_written_or_of_a_newer_version_is_refused(df: DataFrame, store: Store) -> None:
    estimator(store=store, epochs=1, run_id="cut").fit(df)
    path = store.checkpoint_path("cut")
    state, data = torch.load(path, weights_only=True), store.read_bytes(path)
    store.write_bytes(path, data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"last\.ckpt .* is damaged.*another run_id"):
        estimator(store=store, epochs=2, run_id="cut").fit(df)
    torch.save({**state, "format": 99}, path)
    with pytest.raises(CheckpointError, match="format 99, written by a newer spark_hvd"):
        estimator(store=store, epochs=2, run_id="cut").fit(df)


class Breaks(Callback):
    def on_epoch_end(self, state: TrainState) -> None:
        if state.epoch == 1 and state.rank == 1:
            raise RuntimeError("broken on purpose")


@pytest.mark.slow
def test_after_a_failure_the_run_goes_on_from_the_last_whole_epoch(df: DataFrame, store: Store) -> None:
    settings = {"store": store, "epochs": 3, "validation": "held"}
    whole = estimator(**settings).fit(df)
    with pytest.raises(RankFailedError, match="broken on purpose"):
        estimator(**settings, run_id="failed", callbacks=[Breaks()]).fit(df)
    assert len(torch.load(store.checkpoint_path("failed"), weights_only=True)["history"]) in (1, 2)
    same(estimator(**settings, run_id="failed").fit(df).getModel(), dict(whole.getModel().state_dict()), 1e-12)


class AnotherBegins(Callback):
    """Does what another program's fit of the same run does first."""

    def on_epoch_begin(self, state: TrainState) -> None:
        if state.rank == 0 and state.epoch == 2:
            background.ended()
            Checkpoints(state.store, state.run_id, "another").claim()


class AnotherHasSaved(LocalBackend):
    """Starts the ranks when another program's fit of the same run has written its first checkpoint."""

    def __init__(self, path: str) -> None:
        super().__init__(2)
        self._path = path
        os.rename(path, f"{path}.hidden")

    def run(self, *job: Any) -> list[Any]:
        os.rename(f"{self._path}.hidden", self._path)
        return super().run(*job)


@pytest.mark.slow
def test_a_fit_of_the_same_run_in_another_program(df: DataFrame, store: Store) -> None:
    """It ends this one, which then leaves its files alone. A fit that waits for slots goes on from the other's."""
    settings = {"store": store, "run_id": "two", "epochs": 5}
    with pytest.raises(StoreError, match="run_id='two': another fit has begun to train this run"):
        estimator(**settings, callbacks=[AnotherBegins(), CSVLogger()]).fit(df)
    path = store.checkpoint_path("two")
    assert len(torch.load(path, weights_only=True)["history"]) == 2
    assert store.read_bytes(f"{store.logs_path('two')}/history.csv").count(b"\n") == 1 + 2
    history = estimator(**settings).fit(df).getHistory()
    assert len(history) == 5
    waits = estimator(**settings, backend=AnotherHasSaved(path), num_proc=None).fit(df)
    assert waits.getHistory() == history  # also its seconds: nothing was trained again


class LosesTheStore(Callback):
    """Replaces the run's folder by a file when the first epoch's checkpoint has been saved."""

    def on_epoch_begin(self, state: TrainState) -> None:
        if state.rank == 0 and state.epoch == 1:
            background.ended()
            folder = state.store.run_path(state.run_id)
            shutil.rmtree(folder)
            with open(folder, "w"):
                pass


@pytest.mark.slow
def test_a_store_that_goes_away_while_training_fails_the_fit(df: DataFrame, tmp_path: Path) -> None:
    made = estimator(store=Store.create(tmp_path), run_id="lost", callbacks=[LosesTheStore()])
    with pytest.raises(StoreError, match=r"saving .*lost/last.ckpt in the background failed: cannot write .*lost/"):
        made.fit(df)


class WorseAfterTwo(Callback):
    """Breaks the weights in the third epoch, equally on all ranks."""

    def on_epoch_begin(self, state: TrainState) -> None:
        if state.epoch == 2:
            with torch.no_grad():
                for param in state.model.parameters():
                    param += 5.0


def test_best_weights_and_early_stopping(df: DataFrame, store: Store) -> None:
    settings = {"validation": "held", "store": store, "optimizer": lambda params: torch.optim.SGD(params, lr=0.001)}
    good = estimator(**settings, epochs=2).fit(df)
    fitted = estimator(
        **settings,
        epochs=20,
        callbacks=[WorseAfterTwo(), EarlyStopping(patience=2)],
        restore_best_weights=True,
        run_id="best",
    ).fit(df)
    assert len(fitted.getHistory()) == 4  # two good epochs, two worse ones
    same(fitted.getModel(), dict(good.getModel().state_dict()), 1e-12)
    assert fitted.getHistory().best("val_loss")["epoch"] == 2


class StopsOnOneRank(Callback):
    def on_batch_end(self, state: TrainState) -> None:
        if state.rank == 1 and state.global_step == 3:
            state.stop = True


@pytest.mark.slow
def test_one_rank_can_stop_all(df: DataFrame) -> None:
    assert len(estimator(epochs=5, callbacks=[StopsOnOneRank()]).fit(df).getHistory()) == 1


class Records(Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.seen: list[str] = []

    def on_train_begin(self, state: TrainState) -> None:
        self.seen.append(f"train {state.epochs} x {state.steps}")

    def on_epoch_begin(self, state: TrainState) -> None:
        self.seen.append(f"epoch {state.epoch}")

    def on_batch_end(self, state: TrainState) -> None:
        assert state.loss is not None
        self.seen.append(f"batch {state.step} {state.global_step}")

    def on_epoch_end(self, state: TrainState) -> None:
        self.seen.append(f"end {state.history[-1]['epoch']}")

    def on_train_end(self, state: TrainState) -> None:
        with open(f"{self.folder}/{state.rank}", "w") as file:
            file.write("\n".join([*self.seen, "done"]))


@pytest.mark.slow
def test_callbacks_see_every_moment_on_every_rank(df: DataFrame, tmp_path: Path) -> None:
    estimator(callbacks=[Records(str(tmp_path))], batch_size=60).fit(df)
    expected = ["train 2 x 2", "epoch 0", "batch 1 1", "batch 2 2", "end 1"]
    expected += ["epoch 1", "batch 1 3", "batch 2 4", "end 2", "done"]
    assert (tmp_path / "0").read_text().split("\n") == expected
    assert (tmp_path / "1").read_text().split("\n") == expected


@pytest.mark.slow
def test_loggers(df: DataFrame, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = {"MLFLOW_ALLOW_FILE_STORE": "true"}  # databases need more than the client's package
    monkeypatch.setenv(*next(iter(files.items())))
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlflow")
    fitted = estimator(
        num_proc=None,
        backend=SparkBackend(2, env=files),
        validation="held",
        store=store,
        run_id="logged",
        callbacks=[CSVLogger(), TensorBoard(), MLflow("flights")],
    ).fit(df)
    history = fitted.getHistory()
    with open(f"{store.logs_path('logged')}/history.csv") as file:
        assert [float(row["val_loss"]) for row in csv.DictReader(file)] == [row["val_loss"] for row in history]
    events = EventAccumulator(store.logs_path("logged"))
    events.Reload()
    assert [event.value for event in events.Scalars("validation/loss")] == pytest.approx(
        [row["val_loss"] for row in history]
    )
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert run.info.run_name == "flights"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"num_proc": "2"}
    assert run.data.metrics["loss"] == pytest.approx(history[-1]["loss"])


def test_a_loss_that_is_not_finite_names_rank_epoch_and_batch(df: DataFrame) -> None:
    diverging = {"optimizer": lambda params: torch.optim.SGD(params, lr=1e18), "epochs": 3}
    with pytest.raises(NotFiniteLossError, match=r"the loss is (inf|nan) on rank \d in epoch 1, batch \d of 8"):
        estimator(**diverging).fit(df)


class NanOnce(nn.Module):
    """The mean square, but not finite for the rows with a label near the first one's."""

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = (output - label).square().mean()
        return loss * float("nan") if torch.is_grad_enabled() and (label > 4.0).any() else loss


def test_nan_in_the_data_is_named_by_its_column(df: DataFrame) -> None:
    frame = df.withColumn("value", F.expr("if(row = 40, double('nan'), value)"))
    with pytest.raises(
        NotFiniteLossError, match=r"batch \d of 8, whose column 'value' has 1 value NaN .*subset=\['value'\]"
    ):
        estimator().fit(frame)


@pytest.mark.slow
def test_steps_that_are_not_finite_can_be_left_out(df: DataFrame) -> None:
    fitted = estimator(loss=NanOnce(), terminate_on_nan=False, validation="held").fit(df)
    history = fitted.getHistory()
    assert all(row["skipped_steps"] >= 1 for row in history)
    assert all(torch.isfinite(param).all() for param in fitted.getModel().parameters())
    assert history[1]["val_loss"] < history[0]["val_loss"]


@pytest.mark.slow
def test_without_a_tracker_no_optimizer_is_made_to_be_told_of(df: DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchEstimator, "_optimizer_facts", lambda *_: pytest.fail("nobody asks for them"))
    assert len(estimator(epochs=1).fit(df).getHistory()) == 1


def test_an_unwritable_store_fails_before_ranks_start(df: DataFrame, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Exception, match=r"file.*(Not a directory|not a directory)"):
        estimator(store=Store.create(tmp_path / "file" / "store")).fit(df)


def test_the_memory_store_is_refused(df: DataFrame) -> None:
    with pytest.raises(Exception, match="ranks are other processes and cannot see it"):
        estimator(store=Store.create("memory://data")).fit(df)


@pytest.mark.slow
def test_a_store_that_vanishes_is_written_anew(df: DataFrame, tmp_path: Path) -> None:
    made = estimator(store=Store.create(tmp_path), epochs=1)
    first = made.fit(df)
    shutil.rmtree(tmp_path / "intermediate_data")
    same(made.fit(df).getModel(), dict(first.getModel().state_dict()), 1e-12)


@pytest.mark.slow
def test_rows_that_leave_no_validation(spark: SparkSession) -> None:
    for made in (estimator, ordered):
        with pytest.raises(DataError, match="no rows for validation"):
            made(validation="held").fit(frame(spark).where("not held"))
