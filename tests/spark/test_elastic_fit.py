"""Elastic fits whose ranks are killed: the others continue in memory, with each row used once per epoch."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import lightning as L  # noqa: N812 - the usual name
import pytest
import torch
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd.estimators import (
    Callback,
    DataError,
    KerasEstimator,
    LightningEstimator,
    LocalBackend,
    Store,
    TrainState,
)
from spark_hvd.runner import RankFailedError, StateLostError
from tests.elastic_jobs import note
from tests.spark.estimator_support import ROWS, estimator, frame, means, same
from tests.spark.test_fit_restarts import network, plain, straight_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return frame(spark).cache()


class Counts(nn.Module):
    """Its weights count how often each row was trained on, whatever happens to ranks, at a learning rate of 1.

    The loss is the sum over a batch's rows on all ranks: its gradient is 1 for each of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(ROWS))

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return -self.rows[row]


class Total(nn.Module):
    reduction = "sum"  # declares that ranks' losses add up

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return output.sum()


COUNTING: dict[str, Any] = {
    "optimizer": lambda params: torch.optim.SGD(params, lr=1.0),
    "loss": Total(),
    "scale_lr": False,
    "feature_cols": ["row"],
    "batch_size": 8,
    "shuffle": True,
    "commit_every": 2,
    "num_proc": None,
}


def each_row_once_an_epoch(fitted: Any) -> None:
    epochs = len(fitted.getHistory())
    assert (fitted.getModel().rows - epochs).abs().max() < 0.01, (epochs, fitted.getModel().rows)


class Dies(Callback):
    """Kills ranks: maps (generation, rank) to the batch, counted over all epochs, after which to kill it."""

    def __init__(self, deaths: dict[tuple[int, int], int]) -> None:
        self.deaths = deaths

    def on_batch_end(self, state: TrainState) -> None:
        if state.global_step == self.deaths.get((hvd.generation(), state.rank)):
            os.kill(os.getpid(), signal.SIGKILL)


class AllDie(Callback):
    """Kills the ranks of the first generation together, after their 20th batch."""

    def on_batch_end(self, state: TrainState) -> None:
        if (hvd.generation(), state.global_step) == (0, 20):
            first, *others = hvd.allgather_object(os.getpid())
            if state.rank == 0:
                self.strike()
                for each in (*others, first):
                    os.kill(each, signal.SIGKILL)
            time.sleep(60)

    def strike(self) -> None:
        """Wait until all ranks have reached this point, then kill them."""


class AllDieOnce(AllDie):
    """Does that only in the first start of the ranks."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_batch_end(self, state: TrainState) -> None:
        if not self.mark.exists():
            super().on_batch_end(state)

    def strike(self) -> None:
        self.mark.touch()  # only now, because a rank that saw it earlier would leave the others waiting


class DiesSometime(Callback):
    """Kills a rank of generations 1 to 3 at different moments, and stops once they have continued in the fifth.

    In each of them, the arrival time of a newcomer decides whether it forms another generation.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.deaths = {(number, draw.randrange(2)): draw.uniform(0.1, 0.6) for number in (1, 2, 3)}

    def on_train_begin(self, state: TrainState) -> None:
        seconds = self.deaths.get((hvd.generation(), state.rank))
        if seconds is not None:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def on_batch_end(self, state: TrainState) -> None:
        time.sleep(0.01)

    def on_epoch_end(self, state: TrainState) -> None:
        state.stop = hvd.generation() >= 4


class Notes(Callback):
    """Reports each step to a script, and trains until the script has ended."""

    def __init__(self, log: Path, until: Path) -> None:
        self.log, self.until = log, until

    def on_batch_end(self, state: TrainState) -> None:
        time.sleep(0.02)
        note(str(self.log), state.global_step)

    def on_epoch_end(self, state: TrainState) -> None:
        state.stop = self.until.exists()


SETTINGS: dict[str, Any] = {
    "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
    "lr_scheduler_interval": "step",
    "shuffle": True,
    "validation": 0.2,
    "epochs": 3,
    "commit_every": 2,
    "num_proc": None,
}


@pytest.mark.night
def test_killed_ranks_that_are_replaced_cost_nothing_but_time(df: DataFrame, tmp_path: Path) -> None:
    draw = random.Random(20)
    deaths = {(number, draw.randrange(2)): draw.randrange(6 * number + 1, 6 * number + 7) for number in range(3)}
    settings = {**SETTINGS, "backend": LocalBackend(2, max_num_proc=2, verbose=0), "store": Store.create(tmp_path)}
    whole = estimator(network(), **settings).fit(df)
    again = estimator(network(), **settings, callbacks=[Dies(deaths)]).fit(df)
    same(again.getModel(), dict(whole.getModel().state_dict()), 1e-30)
    assert plain(again.getHistory()) == plain(whole.getHistory())


@pytest.mark.night
def test_ranks_come_and_go_at_any_moment(df: DataFrame, tmp_path: Path) -> None:
    backend = LocalBackend(2, min_num_proc=1, max_num_proc=3, host_failure_limit=9, verbose=0)
    settings = {**COUNTING, "backend": backend, "store": Store.create(tmp_path)}
    fitted = estimator(Counts(), **settings, epochs=5000, callbacks=[DiesSometime(1)]).fit(df)
    each_row_once_an_epoch(fitted)
    assert fitted.getHistory().restarts >= 4


@pytest.mark.night
def test_all_ranks_are_lost_at_once(df: DataFrame, tmp_path: Path) -> None:
    settings = {**COUNTING, "store": Store.create(tmp_path), "run_id": "lost", "epochs": 3}
    backend = LocalBackend(2, max_num_proc=2, verbose=0)
    with pytest.raises(StateLostError, match="fit again with run_id='lost' to resume from it"):
        estimator(Counts(), **settings, backend=backend, callbacks=[AllDie()]).fit(df)
    fitted = estimator(Counts(), **settings, backend=backend).fit(df)
    each_row_once_an_epoch(fitted)
    assert len(fitted.getHistory()) == 3


def test_all_ranks_are_lost_at_once_after_a_checkpoint(df: DataFrame, tmp_path: Path) -> None:
    settings = {**COUNTING, "store": Store.create(tmp_path), "epochs": 3, "checkpoint_every": 2}
    callbacks = [AllDieOnce(tmp_path / "struck")]
    backend = LocalBackend(2, max_num_proc=2, verbose=0)
    fitted = estimator(Counts(), **settings, backend=backend, callbacks=callbacks).fit(df)
    assert callbacks[0].mark.exists()
    each_row_once_an_epoch(fitted)
    assert len(fitted.getHistory()) == 3


class Raises(Callback):
    """Raises on rank 1, in the second epoch, repeatedly."""

    def on_epoch_begin(self, state: TrainState) -> None:
        if (state.rank, state.epoch) == (1, 1):
            raise KeyError("no such thing")


@pytest.mark.night
def test_an_error_that_comes_again_ends_the_fit(df: DataFrame, tmp_path: Path) -> None:
    settings = {**COUNTING, "store": Store.create(tmp_path), "backend": LocalBackend(2, max_num_proc=2, verbose=0)}
    with pytest.raises(RankFailedError, match="no such thing"):
        estimator(Counts(), **settings, epochs=3, callbacks=[Raises()]).fit(df)


def test_parameters(df: DataFrame) -> None:
    for settings, text in (
        ({"max_num_proc": 1}, "num_proc=2, max_num_proc=1: expected 1 <= min_num_proc <= num_proc"),
        ({"max_num_proc": 2, "max_restarts": 1}, "max_restarts=1 with max_num_proc=2: an elastic fit continues with"),
        ({"commit_every": 2}, "commit_every=2 without max_num_proc"),
        ({"max_num_proc": 2, "commit_every": 3, "backward_passes_per_step": 2}, "commit_every=3 with backward_passes"),
        ({"num_proc": None, "max_num_proc": 2, "backend": LocalBackend(2)}, r"SparkBackend\(max_num_proc=...\)"),
    ):
        with pytest.raises(ValueError, match=text):
            estimator(**settings).fit(df)
    with pytest.raises(DataError, match=f"{ROWS} rows for training and num_proc=999: expected at least one"):
        estimator(max_num_proc=999).fit(df)


@pytest.mark.night
def test_keras_goes_on_within_an_epoch(df: DataFrame, tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")

    class Dies(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        """Kills a rank of each of the first two generations."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (hvd.generation(), hvd.rank(), self.epoch, batch) in ((0, 1, 0, 4), (1, 0, 1, 5)):
                os.kill(os.getpid(), signal.SIGKILL)

    def fit(*callbacks: Any) -> Any:
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(4, "tanh"), keras.layers.Dropout(0.3)]
        model = keras.Sequential([keras.layers.Input((3,)), *layers, keras.layers.Dense(1)])
        model.set_weights(weights or model.get_weights())
        weights[:] = model.get_weights()
        return KerasEstimator(
            model=model,
            optimizer="adam",
            loss="mse",
            metrics=["mae"],
            feature_cols=["features"],
            label_cols=["value"],
            validation=0.2,
            epochs=3,
            batch_size=12,
            random_seed=1,
            verbose=0,
            commit_every=3,
            backend=LocalBackend(2, max_num_proc=2, verbose=0),
            store=Store.create(tmp_path),
            callbacks=list(callbacks),
        ).fit(df)

    weights: list[Any] = []
    whole, again = fit(), fit(Dies())
    for one, two in zip(whole.getModel().get_weights(), again.getModel().get_weights(), strict=True):
        assert (one == two).all()
    assert [row.get("restarts", 0) for row in again.getHistory()] == [1, 2, 2]
    assert list(map(means, whole.getHistory())) == list(map(means, again.getHistory()))


class Ends(L.Callback):
    """Kills a rank of each of the first two generations."""

    def on_train_batch_end(self, trainer: L.Trainer, *others: Any) -> None:
        if (hvd.generation(), hvd.rank(), trainer.current_epoch, others[-1]) in ((0, 1, 1, 3), (1, 0, 2, 4)):
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.night
def test_lightning_goes_on_within_an_epoch(df: DataFrame, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "backend": LocalBackend(2, max_num_proc=2, verbose=0),
        "store": Store.create(tmp_path),
        "feature_cols": ["features"],
        "label_cols": ["value"],
        "batch_size": 16,
        "epochs": 4,
        "random_seed": 3,
        "verbose": 0,
        "commit_every": 2,
    }
    whole = LightningEstimator(model=straight_line(), **settings).fit(df)
    again = LightningEstimator(model=straight_line(), **settings, callbacks=[Ends()]).fit(df)
    same(again.getModel(), dict(whole.getModel().state_dict()), 1e-30)
    assert plain(again.getHistory()) == plain(whole.getHistory())
    assert [row.get("restarts", 0) for row in again.getHistory()] == [0, 1, 2, 2]
