"""Fits whose ranks are killed: they continue from the last checkpoint, even within an epoch; each row counts once."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import lightning as L  # noqa: N812 - the usual name
import pytest
import torch
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd.checkpoint import background
from spark_hvd.context.global_state import current, is_initialized
from spark_hvd.estimators import Callback, CheckpointError, LightningEstimator, LocalBackend, Store, TrainState
from spark_hvd.runner import RankFailedError
from tests.spark.estimator_support import ROWS, Watched, estimator, frame, means, same

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return frame(spark).cache()


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


class Killed(Callback):
    """Kills rank 1 after a batch of the second epoch, unless ranks were restarted."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_batch_end(self, state: TrainState) -> None:
        if (state.epoch, state.step, hvd.generation()) == (1, self.step, 0):
            background.ended()  # rank 0 has written the last checkpoint
            hvd.barrier()
            if state.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


class Writes(nn.Module):
    """The mean square; records its rows, which are its labels, in files per start and rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if is_initialized():  # not in the trial on the driver
            world = current().world
            with open(self.folder / f"{world.generation}-{world.me.rank}-of-{world.me.size}", "a") as file:
                file.write(" ".join(str(int(row)) for row in label) + "\n")
        return (output / 100 - label / 100).square().mean()


def batches(folder: Path, start: str) -> list[list[list[int]]]:
    """Return the rows of each batch, for each rank of a start."""
    files = sorted(folder.glob(f"{start}-*"))
    return [[[int(row) for row in line.split()] for line in file.read_text().splitlines()] for file in files]


def plain(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in ("seconds", "rows_per_second", "restarts")} for row in history]


def test_a_killed_rank_costs_nothing_but_time(df: DataFrame) -> None:
    settings: dict[str, Any] = {
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        "lr_scheduler_interval": "step",
        "shuffle": True,
        "validation": 0.2,
        "epochs": 3,
        "batch_size": 15,  # a rank's last batch has more than the one row that BatchNorm1d refuses
        "checkpoint_every": 2,
    }
    whole = estimator(network(), **settings).fit(df)
    again = estimator(network(), **settings, max_restarts=1, callbacks=[Killed(5)]).fit(df)
    same(again.getModel(), dict(whole.getModel().state_dict()), 1e-30)
    assert plain(again.getHistory()) == plain(whole.getHistory())
    assert [row.get("restarts", 0) for row in again.getHistory()] == [0, 1, 1]
    assert (whole.getHistory().restarts, again.getHistory().restarts) == (0, 1)


@pytest.mark.night
def test_each_row_of_the_epoch_is_used_once(df: DataFrame, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"label_cols": ["row"], "loss": Writes(tmp_path), "shuffle": True, "epochs": 2}
    made = estimator(**settings, max_restarts=1, checkpoint_every=2, callbacks=[Killed(5)])
    made.fit(df)
    before, after = batches(tmp_path, "0"), batches(tmp_path, "1")
    epoch = 8
    assert [len(rank) for rank in after] == [epoch - 4] * 2, "from the checkpoint after the fourth batch"
    used = [rank[epoch : epoch + 4] for rank in before] + after
    assert sorted(row for rank in used for batch in rank for row in batch) == list(range(ROWS))
    assert len(before[1]) == epoch + 5


@pytest.mark.night
def test_an_epoch_that_was_cut_off_goes_on_with_fewer_ranks(df: DataFrame, tmp_path: Path) -> None:
    store, data, seen = Store.create(tmp_path / "store"), tmp_path / "data", tmp_path / "seen"
    seen.mkdir()
    df.repartition(4).write.parquet(str(data))
    settings: dict[str, Any] = {
        "label_cols": ["row"],
        "loss": Writes(seen),
        "shuffle": True,
        "epochs": 3,
        "checkpoint_every": 3,
        "store": store,
        "run_id": "shrunk",
    }
    with pytest.raises(RankFailedError, match="SIGKILL"):
        estimator(**settings, callbacks=[Killed(4)]).fit_on_parquet(str(data))
    first = batches(seen, "0")
    for file in seen.iterdir():
        file.unlink()
    fitted = estimator(**{**settings, "num_proc": 1}).fit_on_parquet(str(data))
    (alone,) = batches(seen, "0")
    rest = -(-(ROWS - 2 * 3 * 16) // 16)
    assert len(alone) == rest + 15
    used = [row for rank in first for batch in rank[8 : 8 + 3] for row in batch]
    used += [row for batch in alone[:rest] for row in batch]
    assert Counter(used) == Counter(range(ROWS)), "the epoch that was cut off"
    assert sorted(row for batch in alone[rest:] for row in batch) == list(range(ROWS)), "and the next"
    assert [row["lr"] for row in fitted.getHistory()] == pytest.approx([0.1, 0.05, 0.05]), "rates go with the ranks"


@pytest.mark.night
def test_what_changes_the_order_of_rows_is_refused_within_an_epoch(df: DataFrame, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"store": Store.create(tmp_path), "run_id": "cut", "epochs": 2, "checkpoint_every": 2}
    with pytest.raises(RankFailedError, match="SIGKILL"):
        estimator(**settings, callbacks=[Killed(5)]).fit(df)
    with pytest.raises(CheckpointError, match=r"interrupted within epoch 2.*batch_size changed, batch_size=16 then"):
        estimator(**settings, batch_size=8).fit(df)
    with pytest.raises(CheckpointError, match=r"random_seed changed, random_seed=3 then and 4 now"):
        estimator(**settings, random_seed=4).fit(df)
    assert len(estimator(**settings, random_seed=None).fit(df).getHistory()) == 2


@pytest.mark.night
def test_restarts_of_a_backend_of_its_own(df: DataFrame, tmp_path: Path) -> None:
    backend = LocalBackend(2, verbose=0, max_restarts=1)
    settings: dict[str, Any] = {"num_proc": None, "backend": backend, "store": Store.create(tmp_path)}
    history = estimator(**settings, callbacks=[Killed(3)]).fit(df).getHistory()
    assert [row.get("restarts", 0) for row in history] == [0, 1]
    with pytest.raises(ValueError, match=r"max_restarts=2, min_num_proc=None and backend .* SparkBackend\(max_rest"):
        estimator(**settings, max_restarts=2).fit(df)


def straight_line() -> L.LightningModule:
    class Line(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.layers(features)

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return nn.functional.mse_loss(self(batch["features"]).squeeze(1), batch["value"].float())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Line()


def killed_in_lightning() -> L.Callback:
    class Kills(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *others: Any) -> None:
            world = current().world
            if (world.me.rank, world.generation, trainer.current_epoch) == (1, 0, 2) and others[-1] == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    return Kills()


@pytest.mark.night
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("batches", "every"), [(None, None), (5, None), (5, 2)], ids=["whole passes", "left early", "within an epoch"]
)
def test_lightning_goes_on(df: DataFrame, tmp_path: Path, batches: int | None, every: int | None) -> None:
    settings: dict[str, Any] = {
        "backend": Watched(2, verbose=0, max_restarts=1),
        "store": Store.create(tmp_path),
        "feature_cols": ["features"],
        "label_cols": ["value"],
        "batch_size": 16,
        "epochs": 4,
        "random_seed": 3,
        "verbose": 0,
        "logger": False,
        "train_steps_per_epoch": None if batches is None else 7,
        "trainer_args": {} if batches is None else {"limit_train_batches": batches},
        "checkpoint_every": every,
    }
    whole = LightningEstimator(model=straight_line(), **settings).fit(df)
    settings["callbacks"] = [killed_in_lightning()]
    again = LightningEstimator(model=straight_line(), **settings).fit(df)
    same(again.getModel(), dict(whole.getModel().state_dict()), 1e-30)
    assert settings["backend"].metrics == means(again.getHistory()[-1])
    assert [row["loss"] for row in again.getHistory()] == [row["loss"] for row in whole.getHistory()]
    assert [row.get("restarts", 0) for row in again.getHistory()] == [0, 0, 1, 1]


def test_parameters(df: DataFrame) -> None:
    with pytest.raises(ValueError, match=r"checkpoint_every=3 with backward_passes_per_step=2: expected a multiple"):
        estimator(checkpoint_every=3, backward_passes_per_step=2).fit(df)
    with pytest.raises(ValueError, match=r"checkpoint_every=3 with trainer_args' accumulate_grad_batches=2: expected"):
        LightningEstimator(
            model=straight_line(),
            feature_cols=["features"],
            label_cols=["value"],
            checkpoint_every=3,
            trainer_args={"accumulate_grad_batches": 2},
        ).fit(df)
    with pytest.raises(ValueError, match=r"min_num_proc=1 with max_restarts=0"):
        estimator(min_num_proc=1).fit(df)
