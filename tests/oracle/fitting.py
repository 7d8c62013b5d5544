"""A fit on ranks that record their rows, and one process that takes the same rows step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.spark.estimator_support import linear

FEATURES = 3


@dataclass(frozen=True)
class FitCase:
    """A training.

    Attributes:
        rows: Number of rows.
        partitions: Partitions of the DataFrame.
        batch_size: Rows in a rank's batch.
        epochs: Number of epochs.
        stored: Whether the rows are written to a store.
        shuffle: Whether each epoch has a new order.
        drop_last: Whether an incomplete last batch is dropped.
        weights: Whether rows have weights, of which some are 0.
        loss: Name of a loss in torch.nn, or "function".
        reduction: Reduction of the loss.
        passes: Batches per step.
        momentum: Momentum of SGD.
    """

    rows: int
    partitions: int
    batch_size: int
    epochs: int
    stored: bool
    shuffle: bool
    drop_last: bool
    weights: bool
    loss: str
    reduction: str
    passes: int
    momentum: float


fit_cases = st.builds(
    FitCase,
    rows=st.sampled_from((3, 9, 50, 121)),
    partitions=st.integers(1, 4),
    batch_size=st.sampled_from((2, 7, 16, 200)),
    epochs=st.integers(1, 2),
    stored=st.booleans(),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    weights=st.booleans(),
    loss=st.sampled_from(("MSELoss", "SmoothL1Loss", "BCEWithLogitsLoss", "function")),
    reduction=st.sampled_from(("mean", "mean", "sum")),
    passes=st.sampled_from((1, 1, 2)),
    momentum=st.sampled_from((0.0, 0.9)),
)


def numbers(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return features, the first of which is the row's number, labels between 0 and 1, and weights."""
    draw = np.random.default_rng(rows)
    features = draw.normal(size=(rows, FEATURES)).astype("float32")
    numbered = np.concatenate([np.arange(rows, dtype="float32")[:, None], features], 1)
    label = 1 / (1 + np.exp(-features.sum(1)))
    return torch.from_numpy(numbered), torch.from_numpy(label.astype("float32")), torch.arange(rows) % 3


def loss_of(case: FitCase) -> Any:
    """Return the loss to pass to an estimator."""
    if case.loss == "function":
        return functional.mse_loss
    return getattr(nn, case.loss)(reduction=case.reduction)


class Seen(nn.Module):
    """A linear model that records the rows on which it is trained: a line per batch, a file per rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.net = str(folder), linear()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Score rows (rows, 1 + features), the first of which numbers them."""
        import spark_hvd.torch as hvd

        if self.training and hvd.is_initialized():
            with open(Path(self.folder) / str(hvd.rank()), "a") as file:
                file.write(" ".join(str(int(row)) for row in rows[:, 0]) + "\n")
        return self.net(rows[:, 1:])  # type: ignore[no-any-return]


def steps_seen(folder: Path, case: FitCase, ranks: int) -> list[list[list[int]]]:
    """Return all ranks' rows in each step of each epoch; each row once per epoch, in shards that differ by a row."""
    files = [[[*map(int, line.split())] for line in (folder / str(rank)).read_text().splitlines()]
             for rank in range(ranks)]  # fmt: skip
    each = case.rows // ranks
    steps = max(1, each // case.batch_size) if case.drop_last else -(-each // case.batch_size)
    assert [len(batches) for batches in files] == [steps * case.epochs] * ranks
    epochs = []
    for start in range(0, steps * case.epochs, steps):
        shards = [batches[start : start + steps] for batches in files]
        seen = [row for shard in shards for batch in shard for row in batch]
        assert len(seen) == len(set(seen))
        assert case.drop_last or sorted(seen) == list(range(case.rows))
        counts = [sum(map(len, shard)) for shard in shards]
        assert max(counts) - min(counts) <= 1
        epochs.append([list(itertools.chain(*step)) for step in zip(*shards, strict=True)])
    return epochs


def alone(case: FitCase, epochs: Sequence[Sequence[list[int]]]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return one process's results on the same rows: weights, and the mean loss of each epoch."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=case.momentum)
    features, label, weight = numbers(case.rows)
    losses = []
    for steps in epochs:
        found = []
        for number, rows in enumerate(steps):
            value = _loss(case, model(features[rows, 1:])[:, 0], label[rows], weight[rows])
            (value / min(case.passes, len(steps) - number // case.passes * case.passes)).backward()
            found.append(value.item())
            if (number + 1) % case.passes == 0 or number + 1 == len(steps):
                optimizer.step()
                optimizer.zero_grad()
        counts = [len(rows) for rows in steps]
        losses.append(sum(loss * rows for loss, rows in zip(found, counts, strict=True)) / sum(counts))
    return model.state_dict(), losses


def _loss(case: FitCase, output: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    each: Callable[..., torch.Tensor] = (
        functional.mse_loss if case.loss == "function" else getattr(nn, case.loss)(reduction="none")
    )
    values = each(output, label, reduction="none") if case.loss == "function" else each(output, label)
    if case.weights:
        values = values * weight
    return values.sum() if case.reduction == "sum" and case.loss != "function" else values.mean()
