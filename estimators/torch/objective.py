"""The loss of a batch, a weighted sum with one term for each label, and its metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spark_hvd.estimators.torch.weighted import WeightedLoss
from spark_hvd.estimators.training.head import loss_name
from spark_hvd.estimators.training.history import NOT_MEANS

Loss = Callable[..., torch.Tensor]


def match(outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Reshape labels like their outputs if both have equally many elements: (n,) becomes (n, 1).

    Otherwise an output (n, 1) and labels (n,) would silently be compared by broadcasting, each with each.
    """
    return [
        label.reshape(output.shape) if label.shape != output.shape and label.numel() == output.numel() else label
        for output, label in zip(outputs, labels, strict=True)
    ]


class Objective:
    """``sum(weight[i] * loss[i](output[i], label[i]))``, a mean over the rows of a batch.

    ``losses`` has one loss for all labels, or one for each; ``labels`` is the number of labels. A weight is ``1 /
    labels`` by default. Labels get the shape of outputs unless the user has set shapes.

    Raises:
        ValueError: The numbers of losses, weights and labels do not match.
    """

    def __init__(
        self, losses: Sequence[Loss], weights: Sequence[float] | None, labels: int, reshape_labels: bool = True
    ) -> None:
        if len(losses) not in (1, labels):
            raise ValueError(f"loss has {len(losses)} entries for {labels} label_cols: expected one, or one for each")
        if weights is not None and len(weights) != labels:
            raise ValueError(f"loss_weights={list(weights)}: expected {labels} numbers, one for each of label_cols")
        self.losses = list(losses) * (labels if len(losses) == 1 else 1)
        self.weights = [1.0 / labels] * labels if weights is None else list(weights)
        self.reshape_labels = reshape_labels
        self.factors = [1.0] * labels
        """Factor of each loss, see :class:`~spark_hvd.estimators.torch.weighted.Shares`."""
        self._weighted: list[WeightedLoss] = []

    def transform_outputs(
        self, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return outputs and labels in the form that losses and metrics expect.

        Raises:
            ValueError: There are not as many outputs as labels.
        """
        if len(outputs) != len(labels):
            raise ValueError(
                f"the model returned {len(outputs)} outputs for {len(labels)} label_cols: expected one for each label"
            )
        return list(outputs), match(outputs, labels) if self.reshape_labels else list(labels)

    def __call__(
        self,
        outputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss, of shape (), for outputs and labels from :meth:`transform_outputs`.

        Outputs and labels are (rows, ...), one for each label; ``sample_weights`` are (rows,).
        """
        parts = self.parts(outputs, labels, sample_weights)
        # A loss with factor 0, all of whose labels are ignored, may be NaN.
        parts = [
            part if factor else (output * 0).sum()
            for part, output, factor in zip(parts, outputs, self.factors, strict=True)
        ]
        weights = [weight * factor for weight, factor in zip(self.weights, self.factors, strict=True)]
        total = parts[0] * weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            total = total + part * weight
        return total

    def parts(
        self, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], sample_weights: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Return each label's loss, for the arguments of a call."""
        if sample_weights is None:
            return [loss(output, label) for loss, output, label in zip(self.losses, outputs, labels, strict=True)]
        self._weighted = self._weighted or [WeightedLoss(loss) for loss in self.losses]
        return [
            loss(output, label, sample_weights)
            for loss, output, label in zip(self._weighted, outputs, labels, strict=True)
        ]


class Metrics:
    """Functions of (output, label) that return a number for a batch: one list for all labels, or one for each.

    Raises:
        ValueError: There is neither one group, nor one for each label; or a function has a name that the history uses
            for something else.
    """

    def __init__(self, groups: Sequence[Sequence[Callable[..., Any]]], labels: Sequence[str]) -> None:
        if len(groups) not in (0, 1, len(labels)):
            raise ValueError(
                f"metrics has {len(groups)} groups for {len(labels)} label_cols: expected one list of functions, "
                "or one for each label"
            )
        by_label = list(groups) * (len(labels) if len(groups) == 1 else 1)
        self.names: list[str] = []
        self._functions: list[tuple[int, Callable[..., Any]]] = []
        for number, group in enumerate(by_label):
            for function in group:
                name = loss_name(function)
                name = name if len(labels) == 1 else f"{labels[number]}_{name}"
                numbered = (f"{name}_{count}" for count in itertools.count(2))
                self.names.append(name if name not in self.names else next(n for n in numbered if n not in self.names))
                self._functions.append((number, function))
        taken = {"loss", *NOT_MEANS}
        taken |= {f"val_{name}" for name in ("loss", *self.names)}
        if odd := [name for name in self.names if name in taken]:
            raise ValueError(
                f"metrics has a function called {odd[0]!r}, a name that the history uses for something else: give it "
                "another name, by def or by its __name__"
            )

    def __call__(self, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return one number of shape () for each of :attr:`names`."""
        with torch.no_grad():
            return [
                torch.as_tensor(function(outputs[number], labels[number])).detach().double().mean()
                for number, function in self._functions
            ]


class Sums:
    """Sums over the rows of an epoch on this rank, kept on the device so that no batch waits for it."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = ["loss", *names]
        # Only MPS lacks float64.
        self.values = torch.zeros(len(self.names) + 1, dtype=torch.float64, device=device)

    def add(self, rows: int, loss: torch.Tensor, metrics: Sequence[torch.Tensor]) -> None:
        """Add a batch."""
        self.values[1:] += torch.stack([loss.detach().double(), *(m.to(loss.device) for m in metrics)]) * rows
        self.values[0] += rows

    @staticmethod
    def means(names: Sequence[str], values: Sequence[float], prefix: str = "") -> dict[str, float]:
        """Turn sums over all ranks into means by name."""
        rows = values[0]
        return {f"{prefix}{name}": value / rows for name, value in zip(names, values[1:], strict=True)}


class ValidationSums:
    """Sums over the rows of a validation on this rank: of metrics, and of each label's loss with its divisor.

    So the loss is that of all rows, however they are divided into batches. A mean over batches would not be that, if
    classes have weights or labels are ignored.

    Args:
        names: Names of the metrics.
        weights: The weight of each label's loss.
        device: The device of losses and metrics.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float], device: torch.device) -> None:
        self._names, self._weights = names, weights
        self._metrics = torch.zeros(len(names), dtype=torch.float64, device=device)
        self._losses = torch.zeros(len(weights), dtype=torch.float64, device=device)
        self._rows, self._divisors = 0, [0.0] * len(weights)

    @property
    def values(self) -> torch.Tensor:
        """All sums, of which those of the ranks are to be added up."""
        counts = self._losses.new_tensor([self._rows, *self._divisors])
        return torch.cat([counts, self._losses, self._metrics])

    def add(
        self, rows: int, losses: Sequence[torch.Tensor], divisors: Sequence[float], metrics: Sequence[torch.Tensor]
    ) -> None:
        """Add a batch: for each label a sum of losses and its divisor, and means of metrics."""
        self._rows += rows
        self._divisors = [before + more for before, more in zip(self._divisors, divisors, strict=True)]
        self._losses += torch.stack(list(losses))
        if metrics:
            self._metrics += torch.stack([metric.to(self._metrics.device) for metric in metrics]) * rows

    def means_of(self, total: Sequence[float]) -> dict[str, float]:
        """Turn the sum of all ranks' :attr:`values` into means, by name in the history."""
        number = len(self._weights)
        rows, divisors, losses = total[0], total[1 : 1 + number], total[1 + number : 1 + 2 * number]
        means = [loss / divisor if divisor else math.nan for loss, divisor in zip(losses, divisors, strict=True)]
        loss = sum(weight * mean for weight, mean in zip(self._weights, means, strict=True))
        metrics = zip(self._names, total[1 + 2 * number :], strict=True)
        return {"val_loss": loss} | {f"val_{name}": value / rows for name, value in metrics}
