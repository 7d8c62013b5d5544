"""Gradients of TensorFlow's variables in the buckets of a gradient reducer: one operation, and no negotiation."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf
import torch

from spark_hvd.tensorflow.tensors import through
from spark_hvd.torch.optimizer.recipe import HandedGradients, Recipe, placeholder


def reduced(
    handed: HandedGradients, places: Sequence[int], gradients: Sequence[Any], *, for_the_step: bool
) -> list[Any]:
    """The gradients of all ranks, as one operation of a graph or eagerly; None for what has none here.

    ``gradients`` are this rank's, None where it has none; IndexedSlices are made dense. ``places`` tells which
    parameters of ``handed`` they are of. Those ``for_the_step`` are used up before the next ones come, and need no
    memory of their own.
    """
    there = [place for place, gradient in enumerate(gradients) if gradient is not None]
    given = [tf.convert_to_tensor(gradients[place]) for place in there]
    taken = [places[place] for place in there]

    def exchanged(*values: torch.Tensor) -> list[torch.Tensor]:
        if handed.ready() is None:  # the graph goes from world to world
            return list(values)
        found = [each for each in handed.reduce(taken, values) if each is not None]
        results = found if for_the_step else [each.clone() for each in found]
        handed.forget()
        return results

    found: list[Any] = [None] * len(gradients)
    results = through(exchanged, given, [each.dtype for each in given])
    for place, before, after in zip(there, given, results, strict=True):
        after.set_shape(before.shape)
        found[place] = after
    return found


def variable_of(source: Any) -> Any:
    """The variable of TensorFlow's that a source of a tape is, or that one of Keras stands for; None if it is none."""
    inner = source if isinstance(source, tf.Variable) else getattr(source, "value", None)
    return inner if isinstance(inner, tf.Variable) else None


def fits(gradient: Any, variable: Any) -> bool:
    """Whether a gradient can have its place in a bucket: as dense as its variable, whose shape is known."""
    return (
        isinstance(gradient, tf.Tensor)
        and variable is not None
        and variable.shape.is_fully_defined()
        and gradient.dtype == variable.dtype
        and gradient.dtype.is_floating
    )


_handed: dict[Hashable, HandedGradients] = {}


def handed_of(variables: Sequence[Any], recipe: Recipe) -> HandedGradients:
    """The gradients of these variables, reduced in this way; the same ones each time, for as long as they are there.

    A tape is there for one step, and a function is traced more than once, on some ranks more often than on others.
    """
    key = (
        tuple(map(id, variables)),
        recipe.op,
        id(recipe.compression),
        recipe.gradient_predivide_factor,
        id(recipe.process_set),
    )
    if key not in _handed:
        params = [placeholder(each.shape, getattr(torch, each.dtype.name), torch.device("cpu")) for each in variables]
        _handed[key] = HandedGradients(recipe, params)
        for each in variables:  # another variable may have the id of one that is gone
            weakref.finalize(each, _handed.pop, key, None)
    return _handed[key]
