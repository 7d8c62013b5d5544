"""Saves the content of tests/data/saved: `python -m tests.spark.saved_models`, run before files moved into folders."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import lightning as L  # noqa: N812 - the usual name
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import DataFrame, SparkSession
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd.estimators import EarlyStopping, LightningEstimator, LocalBackend, Store, TorchEstimator

SAVED = Path(__file__).parents[1] / "data" / "saved"


class Doubling(L.LightningModule):
    """Learns to double; pickled by reference, because a pickle of code fails on other versions of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)  # type: ignore[no-any-return]

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch["x"])[:, 0], batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(spark: SparkSession) -> DataFrame:
    return spark.range(8).selectExpr("array(cast(id / 8 as float)) x", "cast(id / 4 as float) y")


def _save(spark: SparkSession, folder: Path) -> None:
    store = Store.create(str(folder / "store"))
    common = {"feature_cols": ["x"], "label_cols": ["y"], "batch_size": 4, "epochs": 2, "random_seed": 1, "verbose": 0}
    common |= {"store": store, "backend": LocalBackend(1)}
    torch.manual_seed(1)
    with_torch = TorchEstimator(
        model=nn.Sequential(nn.Linear(1, 1)),
        gradient_compression=hvd.Compression.fp16,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        callbacks=[EarlyStopping(monitor="loss")],
        **common,
    )
    with_lightning = LightningEstimator(model=Doubling(), **common)
    df = numbers(spark)
    model, lightning = with_torch.fit(df), with_lightning.fit(df)
    model.setParams(model=nn.Sequential(hvd.SyncBatchNorm(1), *model.value_of("model")).eval())
    lightning.setParams(output_cols=["doubled"], prediction_col="", raw_prediction_col="", probability_col="")
    PipelineModel([model, lightning]).write().save(str(SAVED / "pipeline_model"))
    Pipeline(stages=[with_torch, with_lightning]).write().save(str(SAVED / "pipeline"))


if __name__ == "__main__":
    import tempfile

    from tests.spark import saved_models  # not "__main__": the class is pickled by this name

    shutil.rmtree(SAVED, ignore_errors=True)
    SAVED.mkdir(parents=True)
    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    with tempfile.TemporaryDirectory() as made:
        saved_models._save(session, Path(made))
    session.stop()
    for path in sorted(SAVED.rglob("*")):
        if path.name.endswith(".crc") or path.name == "_SUCCESS":
            path.unlink()
