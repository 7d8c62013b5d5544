"""What a LightningEstimator passes to the Trainer: callbacks, loggers, metrics, arguments; and what it refuses."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import lightning as L  # noqa: N812 - the usual name
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger
from pyspark.sql import functions as F  # noqa: N812
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd.estimators import LightningEstimator, ModelError
from spark_hvd.runner import RankFailedError, run_local
from tests.spark.lightning.support import Net, logs, mine_store, net

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.night
@pytest.mark.timeout(300)
def test_callbacks_and_loggers(df: DataFrame, estimator: Callable[..., LightningEstimator], tmp_path: Path) -> None:
    tracking = f"file:{tmp_path / 'mlruns'}"
    model = estimator(
        model=net(),
        epochs=30,
        validation=0.2,
        callbacks=[
            EarlyStopping("val_loss", patience=1, min_delta=1e6),
            ModelCheckpoint(monitor="val_loss", filename="best"),
            LearningRateMonitor(),
        ],
        logger=[CSVLogger("csv", name="run"), TensorBoardLogger("tb", name="run"), MLFlowLogger("e", "r", tracking)],
        log_every_n_steps=2,
    ).fit(df)
    assert len(model.getHistory()) == 2  # nothing improves by a million: stopped after the second
    store = mine_store(estimator)
    files = logs(store, model)
    assert {"csv/run/version_0/metrics.csv", "checkpoints/best.ckpt"} <= files
    assert any(file.startswith("tb/run/version_0/events") for file in files)
    assert len(list((tmp_path / "mlruns").rglob("val_loss"))) == 1
    text = (Path(store.logs_path(model.getRunId())) / "csv/run/version_0/metrics.csv").read_text()
    assert "lr-SGD" in text
    assert "val_loss" in text
    best = Net.load_from_checkpoint(f"{store.logs_path(model.getRunId())}/checkpoints/best.ckpt", map_location="cpu")
    assert best.factor == 0.5


class Ranked(Net):
    """Logs values that differ between ranks."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("rank", float(self.global_rank), on_epoch=True)
        self.log("total", float(self.global_rank + 1), on_epoch=True, sync_dist=True, reduce_fx="sum")
        if self.global_rank == 0:
            self.log("mine", 7.0, rank_zero_only=True)
        self.log("rows", float(len(batch["y"])), on_epoch=True, reduce_fx="max")
        self.log("one", 1.0, on_epoch=True, sync_dist=True)
        return self.loss(batch)


def test_metrics_of_ranks(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    row = estimator(model=Ranked(), epochs=1, batch_size=20).fit(df).getHistory()[0]
    assert row["rank"] == pytest.approx(200 / 401)  # ranks are weighted by their rows, 201 and 200
    assert row["mine"] == 7.0
    assert row["total"] == 3.0 * 10  # the sum over ranks and batches
    assert row["one"] == 1.0
    assert row["rows"] == 21.0  # the last batch of the first rank has the odd row


class Apart(Net):
    """Logs, without sync_dist, a value that falls on one rank and rises faster on the other; schedules use it."""

    def __init__(self, monitor: str = "apart") -> None:
        super().__init__()
        self.monitor = monitor

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        options: dict[str, Any] = {"on_step": False, "on_epoch": True}
        self.log("value", batch["y"].mean(), **options)  # not a validation value
        self.log("least", batch["y"].min(), reduce_fx="min", **options)
        self.log("sum", batch["y"].sum(), reduce_fx="sum", **options)
        above = batch["y"][batch["y"] > 0]
        self.log("above", above.sum() / max(1, len(above)), batch_size=len(above), **options)
        self.log("train_apart", self.apart(), **options)
        return self.loss(batch)

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("apart", self.apart())
        self.log("held_out", batch["y"].mean())
        if self.global_rank == (self.current_epoch == 0):
            self.log("of_one", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.log("ended", self.apart(), reduce_fx="sum")

    def apart(self) -> float:
        return float((5.0 if self.global_rank else -1.0) * self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self.monitor}}


class OfOne(L.Callback):
    """Compares what only one rank has logged, on all ranks: for callbacks and schedulers, and for loggers."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for metrics in (trainer.callback_metrics, trainer.logged_metrics):
            seen = hvd.allgather_object(float(metrics.get("of_one", -1.0)), name="of_one")
            if seen != [float(trainer.current_epoch)] * 2:
                raise ValueError(f"ranks see {seen} in epoch {trainer.current_epoch}")


@pytest.mark.parametrize("monitor", ["apart", pytest.param("train_apart", marks=pytest.mark.night)])
def test_what_ranks_log_for_themselves_is_of_all_rows(
    df: DataFrame, estimator: Callable[..., LightningEstimator], monitor: str
) -> None:
    rows = df.withColumn("held", F.col("y") > 2)
    callbacks = [EarlyStopping(monitor, patience=2), OfOne()]
    model = estimator(model=Apart(monitor), epochs=9, batch_size=20, callbacks=callbacks, validation="held").fit(rows)
    history = model.getHistory()
    assert [row["lr"] for row in history] == [0.05, 0.05, 0.025]  # and it has stopped
    y = [row["y"] for row in rows.filter("not held").collect()]
    for row in history:
        assert row["of_one"] == row["epoch"] - 1
        assert row["ended"] == 4 * (row["epoch"] - 1)
        assert row["apart"] == pytest.approx(2 * row["epoch"] - 2, abs=0.2)  # the first has a row more
        assert row["value"] == pytest.approx(sum(y) / len(y), abs=1e-5)
        assert row["least"] == pytest.approx(min(y))
        assert row["sum"] == pytest.approx(sum(y), abs=1e-3)
        assert row["above"] == pytest.approx(
            sum(each for each in y if each > 0) / sum(each > 0 for each in y), abs=1e-5
        )
    held = [row["y"] for row in rows.filter("held").collect()]
    assert history[0]["held_out"] == pytest.approx(sum(held) / len(held), abs=1e-5)


class ByStep(Apart):
    """Has a schedule after each step, by a value of each rank."""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["lr_scheduler"]["interval"] = "step"
        return made

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("own", self.apart())
        self.log("everybody's", self.apart(), sync_dist=True)
        return self.loss(batch)


class Told(L.Callback):
    """Writes what the fit logs to a file, on rank 0."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_rank == 0:
            self.handler = logging.FileHandler(self.file)
            logging.getLogger("spark_hvd").addHandler(self.handler)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_rank == 0:
            logging.getLogger("spark_hvd").removeHandler(self.handler)
            self.handler.close()


@pytest.mark.parametrize(("monitor", "warnings"), [("own", 1), ("everybody's", 0)])
def test_a_schedule_by_the_steps_of_one_rank_is_told(
    df: DataFrame, estimator: Callable[..., LightningEstimator], tmp_path: Path, monitor: str, warnings: int
) -> None:
    estimator(model=ByStep(monitor), epochs=2, callbacks=[Told(tmp_path / "told")]).fit(df)
    assert (tmp_path / "told").read_text().count(f"interval 'step' monitors {monitor!r}") == warnings


class Counting(Net):
    """Logs how often its optimizer stepped, the norm of its gradients at that time, and what is autocast."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("before", nn.utils.get_total_norm([p.grad for p in self.parameters()]), on_epoch=True, reduce_fx="max")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        self.log("after", nn.utils.get_total_norm([p.grad for p in self.parameters()]), on_epoch=True, reduce_fx="max")

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("half", float(self(batch["features"]).dtype == torch.bfloat16))
        self.log("batches", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.log("steps", float(self.global_step))


def test_profiler_and_other_files(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    model = estimator(model=net(), epochs=1, profiler="simple", logger=None, random_seed=2**40).fit(df)
    store = mine_store(estimator)
    assert logs(store, model) == {
        "fit-profile-0.txt",
        "fit-profile-1.txt",
        "version_0/hparams.yaml",
        "version_0/metrics.csv",
    }
    assert "run_training_batch" in (Path(store.logs_path(model.getRunId())) / "fit-profile-0.txt").read_text()


def test_trainer_args(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    arguments = {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.125,
        "precision": "bf16-mixed",
        "limit_train_batches": 5,
    }
    torch.manual_seed(0)
    rows = estimator(model=Counting(), trainer_args=arguments, epochs=2).fit(df).getHistory()
    assert [row["batches"] for row in rows] == [10.0, 10.0]  # of both ranks
    assert [row["steps"] for row in rows] == [3.0, 6.0]  # 2 + 2 + the odd one
    assert [row["half"] for row in rows] == [1.0, 1.0]
    assert rows[0]["before"] > 0.125
    assert [row["after"] for row in rows] == pytest.approx([0.125, 0.125], rel=1e-3)
    # Lightning halves what training_step returns for the two batches of a step; the history does not show that.
    assert rows[0]["loss"] == pytest.approx(14.0, rel=0.5)


class Summing(Net):
    """Logs the rows that it got, in training and in validation, and the number of batches before either."""

    checked = 0

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("checked", float(self.checked))
        self.log("sum", batch["y"].sum(), on_epoch=True, sync_dist=True, reduce_fx="sum")
        return self.loss(batch)

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.checked += self.trainer.sanity_checking
        self.log("val_sum", batch["y"].sum(), sync_dist=True, reduce_fx="sum")


def test_a_sanity_check_uses_no_rows_up(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    """And transformation_fn changes the rows of both."""
    held = df.withColumn("held", df.positive > 0)
    rows = [(row.y, row.held) for row in held.select("y", "held").collect()]
    fitted = estimator(
        model=Summing(),
        epochs=2,
        validation="held",
        trainer_args={"num_sanity_val_steps": 2},
        transformation_fn=lambda rows: rows.assign(y=rows["y"] + 1),
    ).fit(held)
    for row in fitted.getHistory():
        assert row["checked"] == 2.0
        for key, wanted in (("sum", False), ("val_sum", True)):
            assert row[key] == pytest.approx(sum(y + 1 for y, of in rows if of == wanted), rel=1e-4)


class Odd(Net):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layers(batch["features"][:, :3]).mean()


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Linear(2, 2)


class Unvalidated(L.LightningModule):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None: ...


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"loss": nn.MSELoss()}, TypeError, "'loss': a LightningModule has its own, in training_step"),
        ({"optimizer": torch.optim.SGD}, TypeError, "'optimizer': a LightningModule has its own, in configure_opt"),
        ({"model": nn.Linear(1, 1)}, TypeError, "Linear, not a LightningModule: pass it to TorchEstimator"),
        ({"model": Net}, TypeError, "expected a LightningModule"),
        ({"profiler": "simpel"}, ValueError, "Did you mean 'simple'"),
        ({"task": "multi"}, ValueError, "'multiclass', 'binary' or 'regression'"),
        ({"callbacks": [object()]}, TypeError, r"is not a lightning.pytorch.Callback"),
        ({"logger": "csv"}, TypeError, "expected a logger of Lightning"),
        ({"trainer_args": {"devices": 2}}, ValueError, "num_proc is the number of ranks"),
        ({"trainer_args": {"max_epochs": 2}}, ValueError, "pass epochs= to the estimator"),
        ({"trainer_args": {"gradient_clip": 2}}, TypeError, "Did you mean 'gradient_clip_val'"),
        ({"trainer_args": {"gradient_clip_algorithm": "mean"}}, ValueError, "the Trainer does not accept them"),
        ({"model": Unvalidated(), "validation": 0.1}, ValueError, "Unvalidated has no validation_step"),
        ({"stack_features": True, "label_cols": ["features"]}, ValueError, "which is also the name of a label"),
        ({"stack_features": True, "sample_weight_col": "features"}, ValueError, "or of sample_weight_col. Rename"),
        (
            {"label_cols": ["features"], "label_shapes": [[-1, 2, 2]]},
            ModelError,
            r"'features' is used twice, as float32 \[32, 4\] and as float32 \[32, 2, 2\]",
        ),
        ({"model": Odd()}, ModelError, r"Odd.training_step failed(.|\n)*features: float32 \[32, 4\]"),
        ({"model": Net().float(), "input_shapes": [[-1, 3]]}, ModelError, "Change input_shapes"),
        ({"model": Unused()}, ModelError, "2 trainable parameters.* 'forgotten.weight', .*find_unused_parameters=True"),
    ],
)
def test_errors(
    df: DataFrame, estimator: Callable[..., LightningEstimator], options: dict[str, Any], error: type, text: str
) -> None:
    with pytest.raises(error, match=text):
        estimator(**{"model": net(), **options}).fit(df)


@pytest.mark.timeout(300)
def test_a_trainer_of_a_program_s_own(tmp_path: Path) -> None:
    """Ranks are devices of their host, or each a separate host; for other numbers the error names these two."""

    def weights(**places: int) -> list[torch.Tensor]:
        rows = [{"features": torch.full((4,), float(row)), "y": torch.tensor(1.0)} for row in range(8)]
        torch.manual_seed(3)
        net = Net()
        trainer = L.Trainer(
            accelerator="cpu", strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, **places,
        )  # fmt: skip
        trainer.fit(net, torch.utils.data.DataLoader(rows, batch_size=2))
        assert trainer.world_size == 2
        return [each.detach() for each in net.parameters()]

    def fn() -> None:
        both = weights(devices=hvd.local_size(), num_nodes=hvd.cross_size())
        os.environ["LOCAL_RANK"] = "0"
        for one, other in zip(both, weights(devices=1, num_nodes=hvd.size()), strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, hvd.broadcast(one, root_rank=0))
        os.environ["LOCAL_RANK"] = str(hvd.local_rank())
        weights(devices=1, num_nodes=hvd.size())

    with pytest.raises(RankFailedError, match=r"IndexError(.|\n)*devices=hvd.local_size(.|\n)*LOCAL_RANK"):
        run_local(fn, num_proc=2, verbose=0)
