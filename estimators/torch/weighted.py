"""The weight of losses: weighted rows, and ranks that have more rows than others."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch

import spark_hvd.torch as hvd
from spark_hvd.estimators.training.head import loss_name

_CLASSES = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)


@dataclass(frozen=True)
class LossReduction:
    """How a loss reduces the losses of its elements to one number.

    Attributes:
        kind: "mean", "sum" and the like; None if the loss does not declare it.
        is_from_torch: Whether the loss declares it and is torch's, so that the declaration is true.
        by_class: Whether labels are numbers of classes.
        weight: Weight of each class; None for 1.
        ignored: The label that is ignored.
    """

    kind: str | None
    is_from_torch: bool = False
    by_class: bool = False
    weight: torch.Tensor | None = None
    ignored: int | None = None

    @classmethod
    def of(cls, loss: Callable[..., Any]) -> LossReduction:
        """Inspect a module with an attribute ``reduction``, or a function with an argument of that name."""
        if isinstance(loss, torch.nn.Module):
            options: dict[str, Any] = {name: getattr(loss, name, None) for name in ("weight", "ignore_index")}
            kind = getattr(loss, "reduction", None)
            declared = kind is not None
            by_class = isinstance(loss, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss)
        else:
            try:
                parameters = inspect.signature(loss).parameters.values()
            except ValueError:  # a function in C
                return cls(None)
            options = {each.name: each.default for each in parameters if each.default is not each.empty}
            declared = any(each.name == "reduction" for each in parameters)
            keywords = declared or any(each.kind is each.VAR_KEYWORD for each in parameters)
            kind = options.get("reduction", "mean") if keywords else None
            if options.get("size_average") is False:  # an older spelling
                kind = "sum"
            by_class = _function_of(loss) in _CLASSES
        is_from_torch = declared and str(_function_of(loss).__module__).startswith("torch.")
        if not by_class:
            return cls(kind, is_from_torch)
        return cls(kind, is_from_torch, True, options.get("weight"), options.get("ignore_index"))

    def divisor(self, label: torch.Tensor) -> float:
        """Return the divisor in the mean of a class loss: the labels that count, each with the weight of its class."""
        counted = label if self.ignored is None else label[label != self.ignored]
        return float(counted.numel() if self.weight is None else self.weight.to(counted.device)[counted.long()].sum())


def reduction_seen(loss: Callable[..., Any], output: torch.Tensor, label: torch.Tensor) -> str | None:
    """Compare the loss of a batch with those of two parts: it is their mean by rows ("mean"), their "sum", or neither.

    Output and label are (rows, ...), with at least one row.
    """
    if len(output) == 1:
        output, label = torch.cat([output, output]), torch.cat([label, label])
    rows = len(output)
    cut = (rows + 2) // 3  # parts of different lengths distinguish a mean over rows from a mean of means
    try:
        whole, first, last = (
            torch.as_tensor(loss(output[part], label[part])).detach().double()
            for part in (slice(None), slice(cut), slice(cut, None))
        )
    except Exception:  # any error of the user's function, which may require whole batches
        return None
    mean = torch.allclose(whole, (first * cut + last * (rows - cut)) / rows, 1e-4, 1e-12)
    total = torch.allclose(whole, first + last, 1e-4, 1e-12)
    return None if mean == total else "mean" if mean else "sum"


class WeightedLoss:
    """A loss of (output, label, row weights).

    With ``l`` the losses of single elements and ``w`` the weight of their row, the loss is

    - ``sum(w * l)`` for ``reduction="sum"``,
    - ``sum(w * l) / rows`` for ``"batchmean"``,
    - ``mean(w * l)`` for ``"mean"``; a class loss has the same divisor as without row weights: the elements that
      ``ignore_index`` leaves, each with the weight of its class.

    Args:
        loss: A module with an attribute ``reduction``, or a function with an argument of that name.

    Raises:
        ValueError: The loss is neither.
    """

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss, self._checked, self._reduction = loss, False, LossReduction.of(loss)
        if self._reduction.kind is None:
            what = "attribute" if isinstance(loss, torch.nn.Module) else "argument"
            raise ValueError(
                f"sample_weight_col needs losses of single rows, but {_name(loss)} has no {what} `reduction`: add "
                "one for which 'none' turns the mean off, as in torch's losses"
            )
        self._elements: Any = functools.partial(loss, reduction="none")
        if isinstance(loss, torch.nn.Module):
            self._elements = copy.copy(loss)
            self._elements.reduction = "none"

    def __call__(self, output: torch.Tensor, label: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the loss, of shape (). Output and label are (rows, ...), weights (rows,).

        Raises:
            ValueError: The loss does not return single rows, or differs from the unweighted loss if all weights are 1.
        """
        found: torch.Tensor = self._elements(output, label)
        if not found.dim() or len(found) != len(weights):
            raise ValueError(
                f"sample_weight_col needs losses of single rows, but {_name(self._loss)} returns the shape "
                f"{tuple(found.shape)} for {len(weights)} rows with reduction='none'"
            )
        if not self._checked:
            self._check(found, output, label)
            self._checked = True
        return self._reduced(found * weights.reshape(-1, *[1] * (found.dim() - 1)).to(found.dtype), label)

    def _reduced(self, elements: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if self._reduction.kind == "sum":
            return elements.sum()
        if self._reduction.kind == "batchmean":
            return elements.sum() / len(elements)
        if not self._reduction.by_class or label.is_floating_point():
            return elements.mean()
        return elements.sum() / self._reduction.divisor(label)

    def _check(self, elements: torch.Tensor, output: torch.Tensor, label: torch.Tensor) -> None:
        """Compare with the unweighted loss."""
        with torch.no_grad():
            plain, weighted = self._loss(output, label), self._reduced(elements, label)
        if not plain.dim() and not torch.allclose(plain, weighted.to(plain.dtype), 1e-3, 1e-5, equal_nan=True):
            raise ValueError(
                f"sample_weight_col: {_name(self._loss)} is {float(plain):.6g} for a batch, but "
                f"{float(weighted):.6g} from the losses of its rows with weights of 1, by reduction="
                f"{self._reduction.kind!r}. Expected the same: with reduction='none' it must return losses whose "
                "mean or sum is the loss; or omit sample_weight_col"
            )


def _function_of(loss: Any) -> Any:
    return _function_of(loss.func) if isinstance(loss, functools.partial) else loss


def _name(loss: Any) -> str:
    return loss_name(_function_of(loss))


class Shares:
    """Factors by which a rank's losses of a batch are multiplied before gradients are averaged over ranks.

    A loss that is a mean over rows is weighted by this rank's rows; all ranks know all ranks' rows in advance. A mean
    that ignores labels or weights classes is weighted by its divisor, which ranks sum in one small exchange. A sum is
    not weighted: the ranks' sums add up.

    Args:
        losses: One for each label.
        lowest: The lowest number of each label on any rank; None if unknown. If it is above the label that a loss
            ignores, as 0 is above -100, no label is ignored, and ranks need no exchange.
        seen: The reduction of each loss, if observed; it takes precedence over what the loss declares.
        counted: Whether a batch may have fewer rows than planned, because some cannot be read.

    Attributes:
        weight: Weight of a row of the last batch.
    """

    def __init__(
        self,
        losses: Sequence[Callable[..., Any]],
        lowest: Sequence[float | None],
        seen: Sequence[str | None] = (),
        counted: bool = False,
    ) -> None:
        reductions = [LossReduction.of(loss) for loss in losses]
        self._losses = [replace(one, kind=kind or one.kind) for one, kind in zip_longest(reductions, seen)]
        self._lowest = list(lowest)
        self._counted, self.weight = counted, 1.0

    def of(self, labels: Sequence[torch.Tensor], rows: int, weight: float) -> list[float]:
        """Return the factor of each loss. If ranks need the exchange, all of them must call this.

        Row weights have no influence: a weighted loss has the same divisor as without them. ``rows`` is the number of
        this rank's rows that arrived, ``weight`` the weight of a row, see :class:`~spark_hvd.data.readers.feed.Feed`.
        """
        size = hvd.size()
        if size == 1:
            return [1.0] * len(self._losses)
        self.weight, shares = weight, [weight] * len(self._losses)
        divisors = self._divisors(labels)
        if self._counted or divisors != [None] * len(divisors):
            # The planned rows do not suffice to weight a loss.
            counts = [float(rows), *(float(rows) if divisor is None else divisor for divisor in divisors)]
            mine = torch.tensor(counts, dtype=torch.float64, device="cpu")
            total = hvd.allreduce(mine, op=hvd.Sum, name="spark_hvd.share")
            self.weight, *shares = (
                own * size / every if every else 1.0 for own, every in zip(counts, total.tolist(), strict=True)
            )
        return [float(size) if loss.kind == "sum" else share for loss, share in zip(self._losses, shares, strict=True)]

    def in_validation(
        self, losses: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], rows: int, weight: float, size: int
    ) -> tuple[list[torch.Tensor], list[float]]:
        """Return each label's sum of losses in a batch, and its divisor in the mean over all batches and ranks.

        ``losses`` are those of the batch, with ``rows`` rows of this rank; sums are float64. A loss that is a sum is
        summed over the ``size`` ranks, and its mean over batches is weighted by rows.
        """
        divisors = [float(rows) if divisor is None else divisor for divisor in self._divisors(labels)]
        sums = [
            # All labels of the batch may be ignored: then the loss may be NaN.
            loss.detach().double() * (rows * size / weight if each.kind == "sum" else divisor) if divisor
            else loss.new_zeros((), dtype=torch.float64)
            for each, loss, divisor in zip(self._losses, losses, divisors, strict=True)
        ]  # fmt: skip
        return sums, divisors

    def _divisors(self, labels: Sequence[torch.Tensor]) -> list[float | None]:
        return [_divisor_of(*each) for each in zip(self._losses, self._lowest, labels, strict=True)]


def _has_divisor(reduction: LossReduction, lowest: float | None) -> bool:
    """Return whether a loss may differ from a mean over rows: it weights classes, or ignores labels."""
    leaves_out = reduction.ignored is not None and (lowest is None or lowest <= reduction.ignored)
    return reduction.by_class and reduction.kind == "mean" and (leaves_out or reduction.weight is not None)


def _divisor_of(reduction: LossReduction, lowest: float | None, label: torch.Tensor) -> float | None:
    """Return the divisor of a loss that is not a mean over rows; None for one that is."""
    if label.is_floating_point() or not _has_divisor(reduction, lowest):
        return None
    return reduction.divisor(label)
