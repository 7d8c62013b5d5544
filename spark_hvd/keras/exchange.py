"""The gradients of a Keras optimizer between ranks: made when a world is there, let go of when it is over."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from spark_hvd.collectives.process_set import ProcessSet
from spark_hvd.elastic.run import WorldHook, register_world_hook
from spark_hvd.keras.backend import name_of
from spark_hvd.torch.optimizer.arguments import chosen_groups, group_indices
from spark_hvd.torch.optimizer.flat import GradientCompressor
from spark_hvd.torch.optimizer.recipe import Recipe
from spark_hvd.torch.optimizer.reducer import GradientReducer
from spark_hvd.transport.communicator import ReduceOp


class KerasReducer(Protocol):
    """Reduces the gradients of a fixed set of variables, in the way of one backend."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks; None for what no rank has one of."""
        ...

    def stepped(self) -> None:
        """The optimizer has used the gradients."""
        ...

    def close(self) -> None:
        """Nothing will be reduced any more."""
        ...


@dataclass(eq=False)
class GradientExchange:
    """What one optimizer has its gradients reduced by, from its first step in a world to the end of that."""

    op: ReduceOp
    compression: GradientCompressor
    sparse_as_dense: bool
    gradient_predivide_factor: float
    groups: int | Sequence[Sequence[Any]] | None
    process_set: ProcessSet
    factor: float
    """Multiplies reduced gradients."""
    scale_local_gradients: bool
    local: set[int] = field(default_factory=set)
    """Variables, by id, whose gradients stay with their rank."""
    given: Sequence[Any] = ()
    """What the gradients that come next are of; not the optimizer's own, which would save it as its state."""
    reducer: KerasReducer | None = None

    def open(self, variables: Sequence[Any], *, overlapping: bool) -> KerasReducer:
        """Have a reducer; the first call in a world is collective.

        Args:
            variables: All that the optimizer trains.
            overlapping: Whether each backward is to be reduced, and may be while it goes on.
        """
        if self.reducer is None:
            shared = [variable for variable in variables if self._is_shared(variable)]
            self.reducer = TorchReducer(self, shared, overlapping=overlapping)
            _open.add(self)
        return self.reducer

    def reduce(self, reducer: KerasReducer, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients to train with.

        Args:
            reducer: Of :meth:`open`.
            gradients: This rank's; None for those that it lacks.
            variables: What they are of.
        """
        shared = [place for place, variable in enumerate(variables) if self._is_shared(variable)]
        found = list(gradients)
        reduced = reducer.reduce([gradients[place] for place in shared], [variables[place] for place in shared])
        for place, gradient in zip(shared, reduced, strict=True):
            found[place] = gradient if gradient is None or self.factor == 1.0 else gradient * self.factor
        if self.scale_local_gradients and self.op is ReduceOp.AVERAGE and self.local:
            size = self.process_set.size()
            for place, variable in enumerate(variables):
                if id(variable) in self.local and found[place] is not None:
                    found[place] = found[place] / size
        return found

    def _is_shared(self, variable: Any) -> bool:
        return id(variable) not in self.local and not overwritten(variable)

    def close(self) -> None:
        """The world is over, or the variables are others."""
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None


def overwritten(variable: Any) -> bool:
    """Whether its gradient is its next value, and nothing to be averaged: a scale of numbers of eight bits."""
    return getattr(variable, "overwrite_with_gradient", False)


class TorchReducer:
    """The gradient reducer of the PyTorch face, on the parameters that are Keras' variables there.

    Where not each backward is a step of its own, it works on stand-ins that have no memory and take no part in any.
    """

    def __init__(self, exchange: GradientExchange, variables: Sequence[Any], *, overlapping: bool) -> None:
        values = [variable.value for variable in variables]
        params = values if overlapping else [stand_in(value) for value in values]
        self._param_of = {id(variable): param for variable, param in zip(variables, params, strict=True)}
        groups = exchange.groups
        if groups is not None and not isinstance(groups, int):
            groups = [[self._param_of[id(variable)] for variable in group] for group in groups]
        recipe = Recipe(
            [name_of(place, variable) for place, variable in enumerate(variables)],
            group_indices(chosen_groups(groups, 0), params),
            exchange.op,
            exchange.compression,
            passes=1,
            gradient_predivide_factor=exchange.gradient_predivide_factor,
            sparse_as_dense=exchange.sparse_as_dense,
            process_set=exchange.process_set,
            bucket_cap_mb=None,
            shared_memory=True,
        )
        self._reducer: GradientReducer | None = recipe.open(params)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """See KerasReducer."""
        if self._reducer is None:
            return list(gradients)
        params = [self._param_of[id(variable)] for variable in variables]
        for param, gradient in zip(params, gradients, strict=True):
            if param.grad is not gradient and gradient is not None:
                param.grad = gradient.detach()
        self._reducer.synchronize()
        return [param.grad for param in params]

    def stepped(self) -> None:
        """See KerasReducer."""
        if self._reducer is not None:
            self._reducer.stepped()

    def close(self) -> None:
        """See KerasReducer."""
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None


def stand_in(value: torch.Tensor) -> torch.nn.Parameter:
    """A parameter of the same shape and kind that has no memory, for gradients that come by hand."""
    return torch.nn.Parameter(torch.zeros(1, dtype=value.dtype, device=value.device).expand(value.shape))


_open: weakref.WeakSet[GradientExchange] = weakref.WeakSet()


def _release() -> None:
    for exchange in list(_open):
        exchange.close()
    _open.clear()


register_world_hook(WorldHook(lambda: None, _release))
