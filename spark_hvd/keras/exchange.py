"""Reduces the gradients of a Keras optimizer over all ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import torch

from spark_hvd.collectives.compression import GradientCompressor
from spark_hvd.collectives.process_set import ProcessSet
from spark_hvd.keras.backend import name_of
from spark_hvd.keras.backward import FollowedBackward
from spark_hvd.torch.optimizer.arguments import chosen_groups, group_indices
from spark_hvd.torch.optimizer.recipe import ExternalGradients, Recipe, placeholder
from spark_hvd.transport.communicator import ReduceOp


@dataclass(eq=False)
class GradientExchange:
    """The settings by which one optimizer's gradients are reduced, and the reducer in the present world."""

    op: ReduceOp
    compression: GradientCompressor
    sparse_as_dense: bool
    gradient_predivide_factor: float
    groups: int | Sequence[Sequence[Any]] | None
    process_set: ProcessSet
    factor: float
    """Factor for reduced gradients."""
    scale_local_gradients: bool
    local: set[int] = field(default_factory=set)
    """Ids of variables whose gradients stay with their rank."""
    half: set[int] = field(default_factory=set)
    """Ids of variables whose gradients overflow as float16 does."""
    given: Sequence[Any] = ()
    """The variables of the next gradients; not in the optimizer's own attributes, which it would save as its state."""
    reducer: KerasReducer | None = None
    weight: Any = None
    """A variable that multiplies losses; None if there is none."""

    def open(self, variables: Sequence[Any]) -> KerasReducer:
        """Return the reducer; create it if necessary."""
        if self.reducer is None:
            shared = [variable for variable in variables if self._is_shared(variable)]
            self.reducer = KerasReducer(self, shared)
        return self.reducer

    def reduce(self, reducer: KerasReducer, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients to train with.

        ``gradients`` are this rank's, None for those that it lacks; ``variables`` are the variables they belong to, and
        ``reducer`` comes from :meth:`open`.
        """
        shared = [place for place, variable in enumerate(variables) if self._is_shared(variable)]
        results = list(gradients)
        reduced = reducer.reduce([gradients[place] for place in shared], [variables[place] for place in shared])
        for place, gradient in zip(shared, reduced, strict=True):
            results[place] = gradient if gradient is None or self.factor == 1.0 else gradient * self.factor
            if gradient is not None and id(variables[place]) in self.half and (self.process_set.size() or 1) > 1:
                results[place] = _overflowing(results[place])
        if self.scale_local_gradients and self.op is ReduceOp.AVERAGE and self.local:
            size = self.process_set.size()
            for place, variable in enumerate(variables):
                if id(variable) in self.local and results[place] is not None:
                    results[place] = results[place] / size
        return results

    def _is_shared(self, variable: Any) -> bool:
        return id(variable) not in self.local and not overwritten(variable)


def _overflowing(gradient: Any) -> Any:
    fits = keras.ops.isfinite(keras.ops.cast(gradient, "float16"))
    return keras.ops.where(fits, gradient, float("inf"))


def overwritten(variable: Any) -> bool:
    """Return whether a gradient is the variable's next value, as for scales of 8-bit numbers, and is not averaged."""
    return getattr(variable, "overwrite_with_gradient", False)


class KerasReducer:
    """Uses the gradient reducer of spark_hvd.torch, on placeholders for Keras variables.

    It does not use the variables themselves, because ``apply`` is Keras' step: a backward pass may belong to another
    optimizer, or be one of two. Only the backward pass of Keras' own step on torch certainly belongs to this optimizer,
    and is followed: see :class:`spark_hvd.keras.backward.FollowedBackward`. With TensorFlow, the exchange is one
    operation of a graph, or is called eagerly. Gradients are passed in and out by DLPack.
    """

    def __init__(self, exchange: GradientExchange, variables: Sequence[Any]) -> None:
        self._on_torch = isinstance(variables[0].value, torch.Tensor)
        cpu = torch.device("cpu")
        params = [
            placeholder(each.shape, getattr(torch, each.dtype), each.value.device if self._on_torch else cpu)
            for each in variables
        ]
        self._gradients = _external_gradients(exchange, variables, params)
        self.followed = FollowedBackward(self._gradients, variables, params) if self._on_torch else None
        """Passes on the gradients of a backward pass that certainly belongs to this optimizer."""
        self._place_of = {id(variable): place for place, variable in enumerate(variables)}

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks; None if no rank has one or, in a graph, if this rank has none."""
        if self.followed is not None:
            self.followed.end()
        places = [self._place_of[id(variable)] for variable in variables]
        if self._on_torch:
            return self._gradients.reduce(places, gradients)
        from spark_hvd.tensorflow.bucketed import reduced

        _check_not_compiled()
        return reduced(self._gradients, places, gradients, for_the_step=True)

    def stepped(self) -> None:
        """Record that the optimizer has used the gradients. A TensorFlow graph counts its steps itself."""
        if self._on_torch:
            self._gradients.forget()


def _check_not_compiled() -> None:
    """Detect that XLA is compiling a step of a model: XLA would refuse the exchange with an obscure error.

    Raises:
        ValueError: A step is being compiled.
    """
    import tensorflow as tf

    frame = None if tf.executing_eagerly() else sys._getframe(1)
    while frame is not None:
        model = frame.f_locals.get("self")
        if isinstance(model, keras.Model) and model.jit_compile:
            raise ValueError(
                f"model {model.name!r} has jit_compile=True, but the exchange between ranks cannot be compiled: call "
                "compile() with jit_compile=False. In fit, BroadcastGlobalVariablesCallback switches it off"
            )
        frame = frame.f_back


def _external_gradients(
    exchange: GradientExchange, variables: Sequence[Any], params: Sequence[torch.nn.Parameter]
) -> ExternalGradients:
    groups = exchange.groups
    if groups is not None and not isinstance(groups, int):
        param_of = {id(variable): param for variable, param in zip(variables, params, strict=True)}
        groups = [[param_of[id(variable)] for variable in group] for group in groups]
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
    return ExternalGradients(recipe, params)
