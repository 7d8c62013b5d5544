"""A LightningEstimator resumes within an epoch, like an undisturbed fit, and with other ranks (Lightning#19764)."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import lightning as L  # noqa: N812 - the usual name
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd.checkpoint import background
from spark_hvd.data.registry import register
from spark_hvd.estimators import LightningEstimator, LightningModel, LocalBackend
from tests.contract.test_shard import source_in
from tests.ranks import RankError
from tests.spark.lightning.support import Net, column, logs, mine_store, weights

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Stepping(Net):
    """With running statistics and a rate that changes in each step; validates twice per epoch."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.layers.insert(1, nn.BatchNorm1d(8))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("most", batch["y"].max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("sum", batch["y"].sum(), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        if batch_idx == 0:
            self.log("first", batch["y"].mean(), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        (optimizer,), _ = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Cut(L.Callback):
    """Records the batches of the first rank; all ranks fail before a batch of the second epoch ends."""

    def __init__(self, notes: Path, batch: int | None = None) -> None:
        self.notes, self.batch = notes, batch

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, self.batch):
            background.ended()  # the last checkpoint is written
            raise RuntimeError("a power cut")
        if trainer.global_rank == 0:
            with open(self.notes, "a") as file:
                file.write(f"{trainer.current_epoch}/{batch_idx} ")


@pytest.mark.parametrize("most", [{}, pytest.param({"max_steps": 999}, marks=pytest.mark.night)], ids=str)
def test_resumed_equals_unbroken(
    df: DataFrame, estimator: Callable[..., LightningEstimator], tmp_path: Path, most: dict[str, int]
) -> None:
    def fit(run_id: str, notes: Path, batch: int | None = None) -> LightningModel:
        torch.manual_seed(0)
        every_two = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1, filename="{step}")
        return estimator(
            model=Stepping(),
            run_id=run_id,
            batch_size=20,
            validation=0.2,
            checkpoint_every=2,
            trainer_args={"accumulate_grad_batches": 2, "val_check_interval": 4, **most},
            callbacks=[Cut(notes, batch), EarlyStopping("val_loss", patience=99), every_two],
        ).fit(df)

    with pytest.raises(RankError, match="a power cut"):
        fit(f"cut {most}", tmp_path / "before", 5)
    resumed, unbroken = fit(f"cut {most}", tmp_path / "after"), fit(f"never cut {most}", tmp_path / "all")
    every = (tmp_path / "all").read_text().split()
    begun = every.index("1/4")
    assert (tmp_path / "after").read_text().split() == every[begun:]
    assert (tmp_path / "before").read_text().split() == every[: begun + 1]
    for name, value in weights(unbroken).items():
        assert torch.equal(weights(resumed)[name], value), name
    for key in ("epoch", "loss", "train_loss", "most", "sum", "val_loss", "lr"):
        assert column(resumed, key) == column(unbroken, key), key
    assert [row.get("first") for row in (resumed.getHistory()[0], resumed.getHistory()[2])] == [
        row["first"] for row in (unbroken.getHistory()[0], unbroken.getHistory()[2])
    ], "what was logged before the cut alone is in no later epoch"
    assert logs(mine_store(estimator), resumed) == logs(mine_store(estimator), unbroken)


class Seen(Net):
    """Records its rows, in a file per rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.trainer.world_size > 1:  # not in the trial on the driver
            with open(self.folder / str(self.global_rank), "a") as file:
                file.writelines(f"{self.current_epoch} {batch_idx} {int(row)}\n" for row in batch["row"])
        return self.loss(batch)


def seen(folder: Path) -> list[tuple[int, int, int]]:
    lines = [line.split() for file in folder.iterdir() for line in file.read_text().splitlines()]
    return [(int(epoch), int(batch), int(row)) for epoch, batch, row in lines]


@pytest.mark.night
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("rows", "left"), [(150, 54), (98, 2)], ids=["some are left", "fewer than ranks are left"])
def test_other_ranks_go_on_with_what_is_left(
    spark: SparkSession, estimator: Callable[..., LightningEstimator], tmp_path: Path, rows: int, left: int
) -> None:
    made = [([float(row % n) for n in (2, 3, 5, 7)], float(row % 3), row, row % 10 == 0) for row in range(rows)]
    schema = "features array<float>, y float, row long, held boolean"
    spark.createDataFrame(made, schema).repartition(4).write.parquet(str(tmp_path / "data"))

    def fit(folder: str, backend: Any, batch: int | None = None) -> LightningModel:
        (tmp_path / folder).mkdir()
        return estimator(
            model=Seen(tmp_path / folder),
            run_id=f"other ranks {rows}",
            backend=backend,
            batch_size=16,
            label_cols=["y", "row"],
            checkpoint_every=3,
            callbacks=[Cut(tmp_path / "notes", batch)],
        ).fit_on_parquet(str(tmp_path / "data"), str(tmp_path / "data"))

    with pytest.raises(RankError, match="a power cut"):
        fit("two", estimator.keywords["backend"], 3)  # type: ignore[attr-defined]
    history = fit("three", LocalBackend(3, verbose=0)).getHistory()
    two, three = seen(tmp_path / "two"), seen(tmp_path / "three")
    first = sorted(row for epoch, batch, row in two if epoch == 1 and batch < 3)
    rest = sorted(row for epoch, _, row in three if epoch == 1)
    assert len(first) == rows - left
    assert len(rest) == (left if left > 3 else 0)
    assert sorted(first + rest) == (list(range(rows)) if left > 3 else first)
    assert sorted(row for epoch, _, row in three if epoch == 2) == list(range(rows))
    assert [row["epoch"] for row in history] == [1, 2, 3]
    assert all("val_loss" in row for row in history)
    assert [row["lr"] for row in history] == [0.05, 0.025, 0.0125]


class Rows(L.Callback):
    """Has a checkpoint record the training's position in the data."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


class Own(L.LightningModule):
    """Records its rows."""

    def __init__(self, rows: list[tuple[int, int, int]], cut: tuple[int, int] | None) -> None:
        super().__init__()
        self.layer, self.rows, self.cut = nn.Linear(1, 1), rows, cut

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if (self.current_epoch, batch_idx) == self.cut:
            raise RuntimeError("a power cut")
        self.rows.extend((self.current_epoch, batch_idx, int(row)) for row in batch["row"])
        return self.layer(batch["half"].unsqueeze(1)).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-4)
        steps = self.trainer.estimated_stepping_batches  # makes Lightning set up its loaders before it restores them
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=int(steps))]


@pytest.mark.parametrize(("every", "cut"), [(2, (1, 0)), (2, (1, 6)), (11, (1, 3)), (None, (1, 3)), (None, (2, 0))])
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_trainer_of_ones_own_goes_on_where_its_checkpoint_is(
    tmp_path: Path, every: int | None, cut: tuple[int, int]
) -> None:
    """Within an epoch, after the last batch of one, and between two."""

    def train(cut: tuple[int, int] | None, last: Path | None, every: int | None) -> list[tuple[int, int, int]]:
        rows: list[tuple[int, int, int]] = []
        loader = hvd.get_dataset_shard("train").torch_batches(10, shuffle=True)
        folder = tmp_path / ("whole" if cut is last is None else "saved")
        saves = ModelCheckpoint(dirpath=folder, every_n_train_steps=every, save_last=True)
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_epochs=3, logger=False, callbacks=[saves, Rows(loader)],
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        if cut is None:
            trainer.fit(Own(rows, None), loader, ckpt_path=last)
        else:
            with pytest.raises(RuntimeError, match="a power cut"):
                trainer.fit(Own(rows, cut), loader)
        return rows

    hvd.init()
    register({"train": pickle.dumps(source_in(tmp_path))})
    try:
        unbroken = train(None, None, None)
        before = train(cut, None, every)
        last = tmp_path / "saved" / "last.ckpt"
        steps = cut[0] * 11 + cut[1]
        saved = steps - steps % (every or 11)
        after = train(None, last, every)
    finally:
        register({})
        hvd.shutdown()
    assert before == unbroken[: len(before)]
    assert [row for row in unbroken if row[0] * 11 + row[1] >= saved] == after
