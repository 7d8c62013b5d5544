"""Reduces gradients of TensorFlow variables in a gradient reducer's buckets: one operation, without negotiation."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf
import torch

from spark_hvd.tensorflow.tensors import through
from spark_hvd.torch.optimizer.recipe import ExternalGradients, Recipe, placeholder


def reduced(
    external: ExternalGradients, places: Sequence[int], gradients: Sequence[Any], *, for_the_step: bool
) -> list[Any]:
    """Return the gradients of all ranks, as one operation of a graph or eagerly; None for those missing on this rank.

    ``gradients`` are this rank's, None where it has none; IndexedSlices are made dense. ``places`` lists the parameters
    of ``external`` to which they belong. Gradients ``for_the_step`` are used before the next ones arrive, and need no
    memory of their own.
    """
    present = [place for place, gradient in enumerate(gradients) if gradient is not None]
    converted = [tf.convert_to_tensor(gradients[place]) for place in present]
    parameters = [places[place] for place in present]

    def exchanged(*values: torch.Tensor) -> list[torch.Tensor]:
        if external.ready() is None:  # the graph moves between worlds
            return list(values)
        found = [each for each in external.reduce(parameters, values) if each is not None]
        results = found if for_the_step else [each.clone() for each in found]
        external.forget()
        return results

    found: list[Any] = [None] * len(gradients)
    results = through(exchanged, converted, [each.dtype for each in converted])
    for place, before, after in zip(present, converted, results, strict=True):
        after.set_shape(before.shape)
        found[place] = after
    return found


def variable_of(source: Any) -> Any:
    """Return the TensorFlow variable behind a tape's source, which may be a Keras variable; None if there is none."""
    inner = source if isinstance(source, tf.Variable) else getattr(source, "value", None)
    return inner if isinstance(inner, tf.Variable) else None


def fits(gradient: Any, variable: Any) -> bool:
    """Return whether a gradient fits into a bucket: it is dense, like its variable, whose shape is known."""
    return (
        isinstance(gradient, tf.Tensor)
        and variable is not None
        and variable.shape.is_fully_defined()
        and gradient.dtype == variable.dtype
        and gradient.dtype.is_floating
    )


_external: dict[Hashable, ExternalGradients] = {}


def external_gradients_of(variables: Sequence[Any], recipe: Recipe) -> ExternalGradients:
    """Return the reduction of these variables' gradients by this recipe; the same object while the variables exist.

    A tape exists for one step, and a function is traced more than once, on some ranks more often than on others.
    """
    key = (
        tuple(map(id, variables)),
        recipe.op,
        id(recipe.compression),
        recipe.gradient_predivide_factor,
        id(recipe.process_set),
    )
    if key not in _external:
        params = [placeholder(each.shape, getattr(torch, each.dtype.name), torch.device("cpu")) for each in variables]
        _external[key] = ExternalGradients(recipe, params)
        for each in variables:  # another variable may get the id of one that is gone
            weakref.finalize(each, _external.pop, key, None)
    return _external[key]
