"""Data and a reference for the tests of estimators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch
from torch import nn

from spark_hvd.estimators import LocalBackend, Store, TorchEstimator
from spark_hvd.scratch import Scratch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 240
_stores: list[Scratch] = []


class Watched(LocalBackend):
    """A backend that records the losses and metrics that observers of the last fit have received."""

    metrics: Mapping[str, float]

    def run(self, *job: Any) -> list[Any]:
        result: Any = super().run(*job)
        self.metrics = result.summary.metrics
        return result


def means(row: Mapping[str, float]) -> dict[str, float]:
    """Return the losses and metrics of a row of a history."""
    return {name: row[name] for name in row.keys() - {"epoch", "lr", "seconds", "rows_per_second", "restarts"}}


def numbers(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features (rows, 3), a value that depends on them, and whether it is above 0; all float32."""
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(rows, 3)).astype("float32")
    value = (features @ np.array([1.0, -2.0, 0.5], dtype="float32") + 0.1).astype("float32")
    return features, value, (value > 0).astype("float32")


def frame(spark: SparkSession, rows: int = ROWS, partitions: int = 1) -> DataFrame:
    """Return the same as a DataFrame: features array<float>, value double, late int, weight float, held boolean."""
    features, value, late = numbers(rows)
    data = [(features[i].tolist(), float(value[i]), int(late[i]), float(i % 3), i % 4 == 0, i) for i in range(rows)]
    schema = "features array<float>, value double, late int, weight float, held boolean, row int"
    df = spark.createDataFrame(data, schema)
    return df.coalesce(1) if partitions == 1 else df.repartition(partitions)


def linear(outputs: int = 1) -> nn.Module:
    """Return a linear model, always with the same weights."""
    torch.manual_seed(7)
    return nn.Linear(3, outputs)


def estimator(model: nn.Module | None = None, **changed: Any) -> TorchEstimator:
    """Return an estimator of `value` from `features`, two ranks, quiet, not shuffled."""
    model = linear() if model is None else model
    settings: dict[str, Any] = {
        "model": model,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05),
        "loss": nn.MSELoss(),
        "feature_cols": ["features"],
        "label_cols": ["value"],
        "batch_size": 16,
        "epochs": 2,
        "num_proc": 2,
        "random_seed": 3,
        "shuffle": False,
        "verbose": 0,
    }
    return TorchEstimator(**{**settings, **changed})


def ordered(model: nn.Module | None = None, **changed: Any) -> TorchEstimator:
    """Return the same with a store: files keep the order of the rows, on which the reference depends."""
    if not _stores:
        _stores.append(Scratch("fits"))
    return estimator(model, **{"store": Store.create(_stores[0].path), **changed})


def reference(
    loss_of: Callable[[nn.Module, slice], torch.Tensor],
    model: nn.Module | None = None,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.1),
    ranks: int = 2,
    batch: int = 16,
    epochs: int = 2,
    rows: int = ROWS,
    passes: int = 1,
    before_step: Callable[[nn.Module], None] = lambda model: None,
    after_step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
    after_epoch: Callable[[], None] = lambda: None,
) -> dict[str, torch.Tensor]:
    """Return weights trained like the ranks, in this process: the mean gradient of the ranks' batches, then a step."""
    model = linear() if model is None else model
    maker = optimizer(model.parameters())
    each = rows // ranks
    steps = -(-each // batch)
    for _ in range(epochs):
        maker.zero_grad()
        for step in range(steps):
            for rank in range(ranks):
                count = min(batch, each - step * batch)
                start = step * batch * ranks + rank * count
                rows_now = slice(start, start + count)
                summed = min(passes, steps - step // passes * passes)
                (loss_of(model, rows_now) / ranks / summed).backward()
            if (step + 1) % passes == 0 or step + 1 == steps:
                before_step(model)
                maker.step()
                after_step(maker)
                maker.zero_grad()
        after_epoch()
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model: nn.Module, weights: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Check that weights agree."""
    for name, value in model.state_dict().items():
        assert (value - weights[name]).abs().max() < tolerance, (name, value, weights[name])
