"""The module that tests of LightningEstimator train, the ranks that train it, and what they record."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import lightning as L  # noqa: N812 - the usual name
import torch
from torch import nn

from spark_hvd.estimators import History, LightningModel, Store
from tests.ranks import LastingWorld

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Warm:
    """A backend whose two ranks live on: they import Lightning once, and not for each fit. A failure ends them."""

    def __init__(self) -> None:
        # A rank that imports trackers is late.
        self._world = LastingWorld(2, timeout=180.0, preload=("lightning",))

    def num_processes(self) -> int:
        return 2

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list:
        return self._world.run(fn, *args)

    def close(self) -> None:
        self._world.close()


class Net(L.LightningModule):
    """A regression with a dropout, so that random numbers matter, and a schedule that changes in each epoch."""

    def __init__(self, dropout: float = 0.0, factor: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.factor = factor

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch["features"]).squeeze(1), batch["y"])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, self.factor)]


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def weights(model: LightningModel) -> dict[str, torch.Tensor]:
    return dict(model.getModel().state_dict())


def column(model: Any, key: str) -> list[float]:
    history: History = model.getHistory()
    return [row[key] for row in history]


def mine_store(estimator: Any) -> Store:
    store: Store = estimator.keywords["store"]
    return store


def logs(store: Store, model: LightningModel) -> set[str]:
    root = Path(store.logs_path(model.getRunId()))
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
