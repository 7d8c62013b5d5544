"""The meaning of a model's outputs, scores of classes or values, derived from its loss."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Head:
    """How an output becomes Spark ML's columns.

    Attributes:
        kind: "multiclass" (a score for each class), "binary" (one score per row), "regression" (a value), or "other".
        scores: Kind of the scores: "logits", "log_probabilities" or "probabilities"; for a regression "logarithm" if
            the value is the exponential of the output; "" if there are none.
    """

    kind: str
    scores: str = ""


_REGRESSION = "MSELoss L1Loss SmoothL1Loss HuberLoss mse_loss l1_loss smooth_l1_loss huber_loss"
_HEADS = {
    **dict.fromkeys(("CrossEntropyLoss", "cross_entropy"), Head("multiclass", "logits")),
    **dict.fromkeys(("NLLLoss", "nll_loss"), Head("multiclass", "log_probabilities")),
    **dict.fromkeys(("BCEWithLogitsLoss", "binary_cross_entropy_with_logits"), Head("binary", "logits")),
    **dict.fromkeys(("BCELoss", "binary_cross_entropy"), Head("binary", "probabilities")),
    **dict.fromkeys(_REGRESSION.split(), Head("regression")),
    **dict.fromkeys(("PoissonNLLLoss", "poisson_nll_loss"), Head("regression", "logarithm")),
}
KNOWN = frozenset(_HEADS)
"""Losses of torch whose labels' dtype is known: modules and functions."""
INTEGER_LABELS = frozenset({"CrossEntropyLoss", "cross_entropy", "NLLLoss", "nll_loss", "MultiMarginLoss"})
"""Losses whose labels are class numbers: int64 whatever the column's type."""


def loss_name(loss: Any) -> str:
    """Return the name of a loss function or of a loss module's class."""
    return getattr(loss, "__name__", None) or type(loss).__name__


def known_as(loss: Any) -> str:
    """Return the name of the torch loss that a loss is, derives from, or calls; otherwise its own name."""
    if isinstance(loss, functools.partial):
        return known_as(loss.func)
    known = (kind.__name__ for kind in type(loss).__mro__)
    return next((name for name in known if name in _HEADS or name in INTEGER_LABELS), loss_name(loss))


def heads_of(losses: Sequence[Any], outputs: int) -> tuple[Head, ...]:
    """Return the head of each output, by its loss or the common loss; "other" if it is unknown."""
    heads = [_head_by(loss) for loss in losses]
    if len(heads) == 1:
        return (heads[0],) * outputs
    return tuple(heads) if len(heads) == outputs else (Head("other"),) * outputs


def _head_by(loss: Any) -> Head:
    head = _HEADS.get(known_as(loss), Head("other"))
    options = loss.keywords if isinstance(loss, functools.partial) else vars(loss) if hasattr(loss, "__dict__") else {}
    return Head(head.kind) if head.scores == "logarithm" and not options.get("log_input", True) else head


def head_of(losses: Sequence[Any]) -> Head:
    """Return the head that follows from the losses; "other" if there is not exactly one loss, or it is unknown."""
    return heads_of(losses, 1)[0]


def threshold_of(head: Head) -> float:
    """Return the threshold above which an output's number makes a boolean label true."""
    return 0.0 if head == Head("binary", "logits") else 0.5
