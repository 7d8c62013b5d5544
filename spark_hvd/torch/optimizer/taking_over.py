"""An optimizer becomes a distributed one by a swap of its class; a copy of it has the class that it had."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch

from spark_hvd.context.standing import in_world
from spark_hvd.context.who import size

_HANDLE = "_spark_hvd_copied"
_COPIED = (
    "this optimizer is a copy of a distributed one, and no rank knows of it: it would make steps of this rank alone. "
    "Step with the original, copy its state_dict() instead, or make the copy distributed as the original was: "
    "hvd.DistributedOptimizer(copy)."
)


class TakenOver(torch.optim.Optimizer):
    """A base of the classes that optimizers get."""

    made_by = "DistributedOptimizer"
    _base: type[torch.optim.Optimizer]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copy, or what is loaded from a pickle, is a plain optimizer."""
        return _copy, (self._base, cast(Any, self).__getstate__())


Taken = TypeVar("Taken", bound=TakenOver)


def take_over(optimizer: torch.optim.Optimizer, added: type[Taken]) -> Taken:
    """Give an optimizer another class: its own, with the methods of `added` besides.

    A class swap instead of a wrapper or a copy: state, schedulers and references made before stay valid. A scheduler
    has bound the old class's step to the instance, so that what is to be done around it needs hooks.
    """
    if _HANDLE in optimizer.__dict__:
        optimizer.__dict__.pop(_HANDLE).remove()
    base = type(optimizer)
    namespace = {"__doc__": base.__doc__, "__module__": base.__module__, "__qualname__": base.__qualname__}
    optimizer.__class__ = type(base.__name__, (added, base), {**namespace, "_base": base})
    return cast(Taken, optimizer)


def _copy(base: type[torch.optim.Optimizer], state: Any) -> torch.optim.Optimizer:
    optimizer = base.__new__(base)
    cast(Any, optimizer).__setstate__(state)
    setattr(optimizer, _HANDLE, optimizer.register_step_pre_hook(_refuse))
    return optimizer


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if in_world() and size() > 1:
        raise RuntimeError(_COPIED)
