"""Losses whose rows are weighed: the same reduction as without weights, and the same number where all weights are 1."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from spark_hvd.estimators.training.head import loss_name

_CLASSES = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)


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
        self._loss, self._checked = loss, False
        self._elements: Callable[..., Any]
        if isinstance(loss, torch.nn.Module):
            if not hasattr(loss, "reduction"):
                raise ValueError(
                    f"sample_weight_col needs losses of single rows, and {loss_name(loss)} has no attribute "
                    "`reduction`: give it one that 'none' turns the mean off with, as torch's losses have"
                )
            self._reduction = str(loss.reduction)
            elements = copy.copy(loss)
            elements.reduction = "none"  # type: ignore[assignment]
            self._elements = elements
            self._classes = isinstance(loss, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss)
            self._options = {name: getattr(loss, name, None) for name in ("weight", "ignore_index")}
            return
        try:
            parameters = dict(inspect.signature(loss).parameters)
        except ValueError:  # of C
            parameters = {}
        keywords = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        if "reduction" not in parameters and not keywords:
            raise ValueError(
                f"sample_weight_col needs losses of single rows, and {_name(loss)} has no argument `reduction`: give "
                "it one that 'none' turns the mean off with, as torch's functions have"
            )
        default = parameters["reduction"].default if "reduction" in parameters else "mean"
        self._reduction = default if isinstance(default, str) else "mean"
        self._elements = functools.partial(loss, reduction="none")
        self._classes = _function_of(loss) in _CLASSES
        defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
        self._options = {name: defaults.get(name) for name in ("weight", "ignore_index")}

    def __call__(self, output: torch.Tensor, label: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The loss, of shape ().

        Args:
            output: Of (rows, ...).
            label: Likewise.
            weights: Of (rows,).

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
        if self._reduction == "sum":
            return elements.sum()
        if self._reduction == "batchmean":
            return elements.sum() / len(elements)
        if not self._classes or label.is_floating_point():
            return elements.mean()
        counted, weight = label, self._options["weight"]
        if (ignored := self._options["ignore_index"]) is not None:
            counted = label[label != ignored]
        divisor = counted.numel() if weight is None else weight.to(counted.device)[counted].sum()
        return elements.sum() / divisor

    def _check(self, elements: torch.Tensor, output: torch.Tensor, label: torch.Tensor) -> None:
        """Compare with the loss as it is without weights."""
        with torch.no_grad():
            plain, weighted = self._loss(output, label), self._reduced(elements, label)
        if not plain.dim() and not torch.allclose(plain, weighted.to(plain.dtype), 1e-3, 1e-5, equal_nan=True):
            raise ValueError(
                f"sample_weight_col: {_name(self._loss)} is {float(plain):.6g} for a batch, and "
                f"{float(weighted):.6g} from the losses of its rows with weights of 1, by reduction="
                f"{self._reduction!r}. Expected the same: let its rows' losses (reduction='none') be such that their "
                "mean or sum is the loss, or leave sample_weight_col out"
            )


def _function_of(loss: Any) -> Any:
    return _function_of(loss.func) if isinstance(loss, functools.partial) else loss


def _name(loss: Any) -> str:
    return loss_name(_function_of(loss))
