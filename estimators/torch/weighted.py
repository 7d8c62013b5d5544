"""What a loss counts for: rows that are weighed, and ranks that have more of them than others."""

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
    """How a loss makes one number of those of its elements.

    Attributes:
        kind: "mean", "sum" and the like; None where the loss does not tell.
        is_torchs: Whether it tells, and is a loss of torch: then it is so.
        by_class: Whether labels are numbers of classes.
        weight: Of each class; None for 1.
        ignored: The label that counts for nothing.
    """

    kind: str | None
    is_torchs: bool = False
    by_class: bool = False
    weight: torch.Tensor | None = None
    ignored: int | None = None

    @classmethod
    def of(cls, loss: Callable[..., Any]) -> LossReduction:
        """That of a module with an attribute ``reduction``, or of a function with an argument of that name."""
        if isinstance(loss, torch.nn.Module):
            options: dict[str, Any] = {name: getattr(loss, name, None) for name in ("weight", "ignore_index")}
            kind = getattr(loss, "reduction", None)
            told = kind is not None
            by_class = isinstance(loss, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss)
        else:
            try:
                parameters = inspect.signature(loss).parameters.values()
            except ValueError:  # of C
                return cls(None)
            options = {each.name: each.default for each in parameters if each.default is not each.empty}
            told = any(each.name == "reduction" for each in parameters)
            keywords = told or any(each.kind is each.VAR_KEYWORD for each in parameters)
            kind = options.get("reduction", "mean") if keywords else None
            if options.get("size_average") is False:  # an older way to say so
                kind = "sum"
            by_class = _function_of(loss) in _CLASSES
        is_torchs = told and str(_function_of(loss).__module__).startswith("torch.")
        if not by_class:
            return cls(kind, is_torchs)
        return cls(kind, is_torchs, True, options.get("weight"), options.get("ignore_index"))

    def divisor(self, label: torch.Tensor) -> float:
        """What the mean of a loss of classes divides by: the labels that count, each by the weight of its class."""
        counted = label if self.ignored is None else label[label != self.ignored]
        return float(counted.numel() if self.weight is None else self.weight.to(counted.device)[counted.long()].sum())


def reduction_seen(loss: Callable[..., Any], output: torch.Tensor, label: torch.Tensor) -> str | None:
    """What the loss of a batch is of those of two parts: their mean by rows ("mean"), their "sum", or None of both.

    Output and label are (rows, ...), with one row at least.
    """
    if len(output) == 1:
        output, label = torch.cat([output, output]), torch.cat([label, label])
    rows = len(output)
    cut = (rows + 2) // 3  # parts of two lengths, which tell a mean over rows from one of means
    try:
        whole, first, last = (
            torch.as_tensor(loss(output[part], label[part])).detach().double()
            for part in (slice(None), slice(cut), slice(cut, None))
        )
    except Exception:  # whatever the user's function raises where it wants whole batches
        return None
    mean = torch.allclose(whole, (first * cut + last * (rows - cut)) / rows, 1e-4, 1e-12)
    total = torch.allclose(whole, first + last, 1e-4, 1e-12)
    return None if mean == total else "mean" if mean else "sum"


class WeightedLoss:
    """A loss of (output, label, weights of the rows).

    With ``l`` the losses of single elements and ``w`` the weight of their row, it is

    - ``sum(w * l)`` for ``reduction="sum"``,
    - ``sum(w * l) / rows`` for ``"batchmean"``,
    - ``mean(w * l)`` for ``"mean"``; losses of classes divide by what they divide by without weights of rows: the
      elements that ``ignore_index`` leaves, each counted by the weight of its class.

    Args:
        loss: A module with an attribute ``reduction``, or a function with an argument of that name.

    Raises:
        ValueError: it is neither.
    """

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss, self._checked, self._reduction = loss, False, LossReduction.of(loss)
        if self._reduction.kind is None:
            what = "attribute" if isinstance(loss, torch.nn.Module) else "argument"
            raise ValueError(
                f"sample_weight_col needs losses of single rows, and {_name(loss)} has no {what} `reduction`: give it "
                "one that 'none' turns the mean off with, as torch's losses have"
            )
        self._elements: Any = functools.partial(loss, reduction="none")
        if isinstance(loss, torch.nn.Module):
            self._elements = copy.copy(loss)
            self._elements.reduction = "none"

    def __call__(self, output: torch.Tensor, label: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The loss, of shape (). Output and label are (rows, ...), weights (rows,).

        Raises:
            ValueError: the loss does not give single rows, or another number where all weights are 1.
        """
        found: torch.Tensor = self._elements(output, label)
        if not found.dim() or len(found) != len(weights):
            raise ValueError(
                f"sample_weight_col needs losses of single rows, and {_name(self._loss)} gives the shape "
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
        """Compare with the loss as it is without weights."""
        with torch.no_grad():
            plain, weighted = self._loss(output, label), self._reduced(elements, label)
        if not plain.dim() and not torch.allclose(plain, weighted.to(plain.dtype), 1e-3, 1e-5, equal_nan=True):
            raise ValueError(
                f"sample_weight_col: {_name(self._loss)} is {float(plain):.6g} for a batch, and "
                f"{float(weighted):.6g} from the losses of its rows with weights of 1, by reduction="
                f"{self._reduction.kind!r}. Expected the same: let its rows' losses (reduction='none') be such that "
                "their mean or sum is the loss, or leave sample_weight_col out"
            )


def _function_of(loss: Any) -> Any:
    return _function_of(loss.func) if isinstance(loss, functools.partial) else loss


def _name(loss: Any) -> str:
    return loss_name(_function_of(loss))


class Shares:
    """By what a rank's losses of a batch are multiplied before gradients are averaged over ranks.

    A loss that is a mean over rows counts by this rank's rows, and all ranks know those of all beforehand. A mean that
    leaves labels out or weighs classes counts by what it divides by, which ranks add up in one small exchange. A sum
    is as it is on one rank: ranks' sums add up.

    Args:
        losses: One for each label.
        lowest: The lowest number of each label on any rank; None where that is not known. Where it is above the one
            that a loss ignores, as 0 is above -100, no label is left out, and ranks need not ask each other.
        seen: The reduction of each, if it was seen; that is believed more than what the loss says.
        counted: Whether a batch may have fewer rows than planned, because some cannot be read.

    Attributes:
        weight: That of a row of the last batch.
    """

    def __init__(
        self,
        losses: Sequence[Callable[..., Any]],
        lowest: Sequence[float | None],
        seen: Sequence[str | None] = (),
        counted: bool = False,
    ) -> None:
        told = [LossReduction.of(loss) for loss in losses]
        self._losses = [replace(one, kind=kind or one.kind) for one, kind in zip_longest(told, seen)]
        self._lowest = list(lowest)
        self._counted, self.weight = counted, 1.0

    @property
    def counts(self) -> bool:
        """Whether it may take more than the rows that are planned to know what a loss counts for."""
        return self._counted or any(map(_has_divisor, self._losses, self._lowest))

    def part(self, labels: Sequence[torch.Tensor], rows: int) -> torch.Tensor | None:
        """This rank's share of what each loss of all ranks divides by, after that of the rows; None where rows say it.

        ``rows`` is how many of this rank's rows came.
        """
        divisors = [_divisor_of(*each) for each in zip(self._losses, self._lowest, labels, strict=True)]
        if not self._counted and divisors == [None] * len(divisors):
            return None
        mine = [float(rows), *(float(rows) if divisor is None else divisor for divisor in divisors)]
        return torch.tensor(mine, dtype=torch.float64, device="cpu")

    def of(self, labels: Sequence[torch.Tensor], rows: int, weight: float) -> list[float]:
        """The factor of each loss. Where ranks have to ask each other, all are to call it.

        Weights of rows change nothing here: a weighted loss divides by what it divides by without them. ``weight`` is
        that of a row, see :class:`~spark_hvd.data.readers.feed.Feed`.
        """
        size = hvd.size()
        if size == 1:
            return [1.0] * len(self._losses)
        mine = self.part(labels, rows)
        total = None if mine is None else hvd.allreduce(mine, op=hvd.Sum, name="spark_hvd.share")
        return self.factors(mine, total, size, weight)

    def factors(self, mine: torch.Tensor | None, total: torch.Tensor | None, size: int, weight: float) -> list[float]:
        """The same, where it is known what the :meth:`part` of a rank is, and the sum of those of all ``size``."""
        self.weight, shares = weight, [weight] * len(self._losses)
        if mine is not None and total is not None:
            self.weight, *shares = (
                own * size / every if every else 1.0 for own, every in zip(mine.tolist(), total.tolist(), strict=True)
            )
        return [float(size) if loss.kind == "sum" else share for loss, share in zip(self._losses, shares, strict=True)]


def _has_divisor(reduction: LossReduction, lowest: float | None) -> bool:
    """Whether a loss may be no mean over rows: it weighs classes, or leaves labels out."""
    leaves_out = reduction.ignored is not None and (lowest is None or lowest <= reduction.ignored)
    return reduction.by_class and reduction.kind == "mean" and (leaves_out or reduction.weight is not None)


def _divisor_of(reduction: LossReduction, lowest: float | None, label: torch.Tensor) -> float | None:
    """What a loss that is no mean over rows divides by; None for one that is."""
    if label.is_floating_point() or not _has_divisor(reduction, lowest):
        return None
    return reduction.divisor(label)
