"""The hooks that count gradients: what autograd runs after each of them, on the gradient reducer's behalf."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from spark_hvd.torch.optimizer.flat import FlatBucket


class Backward(Protocol):
    """What the hooks tell the reducer of a backward pass."""

    def begin_backward(self, index: int) -> None:
        """The first gradient of a pass is there: this parameter's."""
        ...

    def advance(self) -> None:
        """A bucket is complete."""
        ...

    def overrun(self, index: int) -> None:
        """A parameter has one gradient more than its step was to have."""
        ...


class Unplanned:
    """Stands where a parameter has no bucket; its count never comes to zero."""

    pending = -1


class GradientCounts:
    """What the hooks write. It knows no reducer: hooks live as long as the model, a reducer as its optimizer."""

    __slots__ = ("idle", "left", "order", "units")

    def __init__(self) -> None:
        self.idle = True  # no hook of the current backward has fired yet
        self.left: list[int] = []  # backward passes still to come, by parameter
        self.order: list[int] = []  # parameters in the order in which they became ready
        self.units: list[FlatBucket | Unplanned] = []  # each parameter's bucket


def make_hook(
    index: int, progress: GradientCounts, reducer_ref: weakref.ref[Backward]
) -> Callable[[torch.Tensor], None]:
    """The hook that runs after each gradient: for small models its few bytecodes are most of what a step costs."""
    left, order, units = progress.left, progress.order, progress.units

    def hook(_: torch.Tensor) -> None:
        if progress.idle:
            _alive(reducer_ref).begin_backward(index)
        count = left[index] = left[index] - 1
        if count == 0:
            order.append(index)
            unit = units[index]
            unit.pending -= 1
            if unit.pending == 0:
                _alive(reducer_ref).advance()
        elif count < 0:
            _alive(reducer_ref).overrun(index)

    return hook


def _alive(reducer_ref: weakref.ref[Backward]) -> Backward:
    reducer = reducer_ref()
    assert reducer is not None, "hooks are removed with their reducer"
    return reducer


def remove_all(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    """Take hooks away from their parameters, and empty the list."""
    while handles:
        handles.pop().remove()
