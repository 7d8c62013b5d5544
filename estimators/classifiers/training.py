"""The training of classifiers: batches from raw rows, AdamW, and a learning rate that warms up and falls to zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import torch
from torch.optim.lr_scheduler import LambdaLR

from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.classifiers.labels import Labels


class Inputs(Protocol):
    """Makes a model's tensors from the values of a column, in ranks and in Spark's Python workers."""

    def __call__(self, values: list[Any], training: bool) -> dict[str, torch.Tensor]:
        """Return the tensors (rows, ...) by name, in the order of the model's arguments. The names are always the same.

        ``values`` are those of the column, without nulls. For ``training``, the tensors may be changed at random.
        """


@dataclass(frozen=True)
class Collate:
    """Makes a batch for training: the tensors of the features, and the label under the name of its column."""

    column: str
    inputs: Inputs
    labels: Labels

    def __call__(self, rows: pa.RecordBatch, training: bool) -> Batch:
        batch = self.inputs(rows.column(self.column).to_pylist(), training)
        if self.labels.column in batch:
            raise DataError(f"label_col={self.labels.column!r} is the name of one of the model's inputs: rename it")
        return {**batch, self.labels.column: self.labels.tensor(rows.column(self.labels.column))}


def adamw(model: torch.nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Return AdamW for the trainable parameters of a model, without weight decay for biases and scales of norms.

    Raises:
        ValueError: All parameters are frozen.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    if not trained:
        raise ValueError("model has no parameter to train: requires_grad is False for all. Set it for those to train")
    groups = [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": weight_decay},
        {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr)


def warmup_and_decay(optimizer: torch.optim.Optimizer, total_steps: int, warmup: float) -> LambdaLR:
    """Return a schedule whose rate rises for the share ``warmup`` of all steps, then falls linearly to zero."""
    rising = max(1, round(warmup * total_steps))

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        return max(0.0, (total_steps - step) / max(1, total_steps - rising))

    return LambdaLR(optimizer, factor)
