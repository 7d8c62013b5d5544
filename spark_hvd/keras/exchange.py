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

    def ready(self) -> Any:
        """Make what is needed in this world; the first call in a world is collective."""
        ...

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks; None for what no rank has one of."""
        ...

    def stepped(self) -> None:
        """The optimizer has used the gradients."""
        ...

    def close(self) -> None:
        """The world is over."""
        ...


@dataclass(eq=False)
class GradientExchange:
    """What one optimizer has its gradients reduced by, in one world after the other."""

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
        """Have a reducer.

        Args:
            variables: All that the optimizer trains.
            overlapping: Whether each backward is to be reduced, and may be while it goes on.
        """
        if self.reducer is None:
            shared = [variable for variable in variables if self._is_shared(variable)]
            if isinstance(shared[0].value, torch.Tensor):
                self.reducer = TorchReducer(self, shared, overlapping=overlapping)
            else:
                self.reducer = TensorFlowReducer(self, shared)
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
        """The world is over."""
        if self.reducer is not None:
            self.reducer.close()


def overwritten(variable: Any) -> bool:
    """Whether its gradient is its next value, and nothing to be averaged: a scale of numbers of eight bits."""
    return getattr(variable, "overwrite_with_gradient", False)


class TorchReducer:
    """The gradient reducer of the PyTorch face, on the parameters that are Keras' variables there.

    Where not each backward is a step of its own, it works on stand-ins that have no memory and take no part in any.
    """

    def __init__(self, exchange: GradientExchange, variables: Sequence[Any], *, overlapping: bool) -> None:
        values = [variable.value for variable in variables]
        params = values if overlapping else [stand_in(value.shape, value.dtype, value.device) for value in values]
        self._open(exchange, variables, params)

    def _open(self, exchange: GradientExchange, variables: Sequence[Any], params: Sequence[torch.nn.Parameter]) -> None:
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
        self._recipe, self._params = recipe, params
        self._reducer: GradientReducer | None = None
        self._closed = True

    def ready(self) -> GradientReducer | None:
        """See KerasReducer; None where this rank is alone."""
        if self._closed:
            self._reducer = self._recipe.open(self._params)
            self._closed = False
        return self._reducer

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """See KerasReducer."""
        reducer = self.ready()
        if reducer is None:
            return list(gradients)
        params = [self._param_of[id(variable)] for variable in variables]
        for param, gradient in zip(params, gradients, strict=True):
            if param.grad is not gradient and gradient is not None:
                param.grad = gradient.detach()
        reducer.synchronize()
        return [param.grad for param in params]

    def stepped(self) -> None:
        """See KerasReducer."""
        if self._reducer is not None:
            self._reducer.stepped()

    def close(self) -> None:
        """See KerasReducer."""
        if self._reducer is not None:
            self._reducer.close()
        self._reducer, self._closed = None, True


class TensorFlowReducer(TorchReducer):
    """The same in one operation of a TensorFlow graph, or eagerly: gradients go in and come out by DLPack."""

    def __init__(self, exchange: GradientExchange, variables: Sequence[Any]) -> None:
        params = [stand_in(each.shape, getattr(torch, each.dtype), torch.device("cpu")) for each in variables]
        self._open(exchange, variables, params)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """See KerasReducer. What has no gradient here when the graph is made has none."""
        import tensorflow as tf

        from spark_hvd.tensorflow.tensors import through

        there = [place for place, gradient in enumerate(gradients) if gradient is not None]
        given = [tf.convert_to_tensor(gradients[place]) for place in there]  # dense, also those of embeddings
        params = [self._param_of[id(variables[place])] for place in there]

        def exchanged(*values: torch.Tensor) -> list[torch.Tensor]:
            reducer = self.ready()  # the graph goes from world to world
            if reducer is None:
                return list(values)
            for param, value in zip(params, values, strict=True):
                param.grad = value
            reducer.synchronize()
            reduced = [param.grad for param in params if param.grad is not None]
            reducer.stepped()
            return reduced

        found: list[Any] = [None] * len(gradients)
        results = through(exchanged, given, [each.dtype for each in given])
        for place, before, after in zip(there, given, results, strict=True):
            after.set_shape(before.shape)
            found[place] = after
        return found

    def stepped(self) -> None:
        """The graph says so itself."""


def stand_in(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    """A parameter that has no memory, for gradients that come by hand."""
    return torch.nn.Parameter(torch.zeros(1, dtype=dtype, device=device).expand(tuple(shape)))


_open: weakref.WeakSet[GradientExchange] = weakref.WeakSet()


def _release() -> None:
    for exchange in list(_open):
        exchange.close()


register_world_hook(WorldHook(lambda: None, _release))
