"""The distributed optimizers of this process: how they are made, bound to elastic worlds, copied and replaced."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.utils.hooks import RemovableHandle

from spark_hvd.collectives.objects import allgather_object
from spark_hvd.context.basics import size
from spark_hvd.context.global_state import in_world
from spark_hvd.context.local import is_local
from spark_hvd.elastic.run import WorldHook, register_world_hook
from spark_hvd.torch.optimizer.recipe import Recipe
from spark_hvd.torch.optimizer.reducer import GradientReducer
from spark_hvd.world.errors import MismatchError, NotInitializedError

NOT_YET = (
    "this DistributedOptimizer belongs to an elastic rank that is in no world at the moment, so there are no ranks to "
    "reduce gradients with: train inside the function that is decorated with hvd.elastic.run."
)
_OVER = (
    "this DistributedOptimizer was made inside an elastic function, in a world that is over. Make optimizers before "
    "the function that is decorated with hvd.elastic.run is called, or anew in each call of it."
)
_REPLACED = (
    "a DistributedOptimizer that was made later trains a parameter of this one, and it alone reduces the gradient. "
    "Step with the later one, or give each parameter to one DistributedOptimizer. To make a step of this one from "
    "gradients that the later one has reduced: later.synchronize(), then step() under this one's skip_synchronize()."
)
_COPIED = (
    "this optimizer is a copy of a distributed one, but other ranks do not know of it: it would make steps of this "
    "rank alone. Step with the original, copy its state_dict() instead, or make the copy distributed as well: "
    "hvd.DistributedOptimizer(copy)."
)


class _Swapped(torch.optim.Optimizer):
    """An optimizer whose class was swapped. A copy or an unpickled one is a :class:`_Copy`."""

    _base: type[torch.optim.Optimizer]
    """The class of the program's own optimizer."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """See object.__reduce_ex__."""
        return _copy, (self._base, cast(Any, self).__getstate__())


class DistributedOptimizerBase(_Swapped):
    """Base of the classes that distributed optimizers get."""

    made_by = "DistributedOptimizer"
    _known: dict[int, torch.nn.Parameter]
    """By id, the parameters that it was made with or got by ``add_param_group``."""


class _Copy(_Swapped):
    """Base of the classes that copies get, until they are made distributed themselves."""

    _refusal: RemovableHandle


DistributedT = TypeVar("DistributedT", bound=DistributedOptimizerBase)


def make_distributed(optimizer: torch.optim.Optimizer, added: type[DistributedT]) -> DistributedT:
    """Make an optimizer distributed: give it another class, its own with the methods of `added`.

    This swaps the class instead of wrapping or copying the object, so state, schedulers and references stay valid.
    A scheduler has bound the old class's step to the instance, so actions around a step need hooks.
    """
    base = type(optimizer)
    if isinstance(optimizer, _Copy):
        base = optimizer._base
        optimizer._refusal.remove()
    optimizer.__class__ = _class_of(base, added)
    distributed = cast(DistributedT, optimizer)
    distributed._known = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    return distributed


def _class_of(base: type[torch.optim.Optimizer], added: type[_Swapped]) -> type[_Swapped]:
    namespace = {"__doc__": base.__doc__, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (added, base), {**namespace, "_base": base})


def _copy(base: type[torch.optim.Optimizer], state: Any) -> torch.optim.Optimizer:
    kind = _class_of(base, _Copy)
    optimizer: Any = kind.__new__(kind)
    optimizer.__setstate__(state)
    optimizer._refusal = optimizer.register_step_pre_hook(_refuse)
    return cast(_Copy, optimizer)


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if in_world() and size() > 1:
        raise RuntimeError(_COPIED)


def check_kind(optimizer: object) -> None:
    """Raise a TypeError for anything but an optimizer (a class, a name, a model); a ValueError if it is distributed."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer={optimizer!r}: expected a torch optimizer, such as torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    if isinstance(optimizer, DistributedOptimizerBase):
        raise ValueError(f"the optimizer is already an hvd.{optimizer.made_by}: pass a plain one, and wrap it once")


class SharedOptimizer(Protocol):
    """An optimizer whose parameters ranks share."""

    made_by: str
    param_groups: list[dict[str, Any]]
    _known: dict[int, torch.nn.Parameter]


class RegisteredOptimizer(SharedOptimizer, Protocol):
    """A distributed optimizer that is registered here."""

    _recipe: Recipe
    _reducer: GradientReducer | None
    _spans_worlds: bool
    _unbound: str | None


def require_known(optimizer: SharedOptimizer) -> None:
    """Raise unless ranks share all parameters of an optimizer, or have made them local.

    Raises:
        ValueError: The program has put a parameter into a group itself, so this rank alone would train it.
    """
    known = optimizer._known
    if known.keys() >= {id(param) for group in optimizer.param_groups for param in group["params"]}:
        return
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.requires_grad and id(param) not in known:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} was put into param_groups[{number}] after "
                    f"hvd.{optimizer.made_by} was called, so ranks would not share it. Make a new optimizer and pass "
                    "it to that function; or, with DistributedOptimizer, use add_param_group() on every rank"
                )


_registry: list[weakref.ref[RegisteredOptimizer]] = []
"""Optimizers in the order in which they were made, without those that were replaced."""


def register_optimizer(optimizer: RegisteredOptimizer) -> None:
    """Register a distributed optimizer of this process."""
    _registry.append(weakref.ref(optimizer))


def replace_owners(params: Sequence[torch.nn.Parameter], by: object = None) -> None:
    """Stop other optimizers from reducing gradients of these parameters, before an optimizer is made or gets them.

    Otherwise both would reduce a gradient in one backward, in the memory of one of them. An earlier optimizer that
    nobody holds may exist until garbage is collected, which happens at other times on other ranks; so it is not an
    error. ``by`` is the optimizer that gets the parameters, if it exists already.
    """
    trained = {id(param) for param in params if param.requires_grad and not is_local(param)}
    for other in _registered():
        if other is by:
            continue
        other._recipe.release(params)
        if any(id(param) in trained for param in _params_of(other) if param.requires_grad):
            if other._reducer is not None:
                other._reducer.close()
            other._reducer, other._unbound = None, _REPLACED
            # An optimizer that moves between worlds, replaced in one, is bound in the next, as on new ranks.
            other._spans_worlds = other._spans_worlds and in_world()
    _registry[:] = [
        ref
        for ref in _registry
        if (each := ref()) is not None and (each._spans_worlds or each._unbound is not _REPLACED)
    ]


def require_bound(optimizer: RegisteredOptimizer, *, synchronizes: bool = True) -> None:
    """Raise unless an optimizer can reduce gradients, or uses them as they are.

    Raises:
        NotInitializedError: This is an elastic rank outside the optimizer's worlds.
        RuntimeError: A later optimizer has replaced it.
    """
    if optimizer._unbound is _REPLACED:
        if synchronizes:
            raise RuntimeError(_REPLACED)
    elif optimizer._unbound is not None:
        raise NotInitializedError(optimizer._unbound)


def bind_optimizers() -> None:
    """Plan all optimizers that move between worlds anew, in the order in which they were made; collective.

    Those made inside an elastic function have ended with their world.

    Raises:
        MismatchError: Ranks have not made the same number of optimizers. Raised on every rank.
        PlanMismatchError: Their parameters or settings differ. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    waiting = [each for each in _registered() if each._unbound == NOT_YET]
    counts = allgather_object(len(waiting), name="spark_hvd.bind_optimizers")
    for rank, count in enumerate(counts):
        if count != counts[0]:
            raise MismatchError(
                f"before its elastic function, rank 0 made {counts[0]} DistributedOptimizers that still exist, but "
                f"rank {rank} made {count}; every rank must make the same ones in the same order, and keep them."
            )
    for optimizer in waiting:
        require_known(optimizer)
        optimizer._reducer = optimizer._recipe.open(_params_of(optimizer))
        optimizer._unbound = None


def release_optimizers() -> None:
    """Unbind the optimizers from a world that is over."""
    for optimizer in _registered():
        if optimizer._reducer is not None:
            optimizer._reducer.close()
            optimizer._reducer = None
        optimizer._unbound = NOT_YET if optimizer._spans_worlds else _OVER


def _params_of(optimizer: RegisteredOptimizer) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _registered() -> list[RegisteredOptimizer]:
    found = [(ref, optimizer) for ref in _registry if (optimizer := ref()) is not None]
    _registry[:] = [ref for ref, _ in found]
    return [optimizer for _, optimizer in found]


register_world_hook(WorldHook(bind_optimizers, release_optimizers))
