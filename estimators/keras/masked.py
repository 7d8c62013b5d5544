"""Losses of Keras that leave out elements, by a mask or ``ignore_class``: ranks count by the elements that are left."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import keras

import spark_hvd.torch as hvd
from spark_hvd.keras.batch_norm import sum_over_ranks

_Function = keras.losses.MeanSquaredError.__base__
"""The class that Keras' compile makes of a function, which has no public name."""
_CHOSEN_LATE = ("crossentropy", "ce")
"""Names of losses that Keras chooses once it knows labels and outputs."""


class Sharing:
    """How losses of a batch become part of those of all ranks.

    Attributes:
        weight: The variable by which the optimizer multiplies this rank's losses in a step of training; None elsewhere.
    """

    weight: Any = None


def share_losses(model: Any) -> Sharing:
    """Make the losses of a compiled model, before its first batch, parts of those of all ranks in steps of training.

    Keras divides by the elements that are left. The mean of the ranks' losses is that of one process only if each
    counts by these elements, while the optimizer counts by rows. What the model is saved with does not change.
    """
    sharing, compiled = Sharing(), model._compile_loss
    compiled._user_loss = _shared(compiled._user_loss, sharing)
    return sharing


def _shared(loss: Any, sharing: Sharing) -> Any:
    if isinstance(loss, Mapping):
        return {name: _shared(each, sharing) for name, each in loss.items()}
    if isinstance(loss, list | tuple):
        return [_shared(each, sharing) for each in loss]
    if loss is None or str(loss).lower() in _CHOSEN_LATE:
        return loss
    found = keras.losses.get(loss)
    if not isinstance(found, keras.losses.Loss):
        found = _Function(found, name=loss if isinstance(loss, str) else getattr(found, "__name__", None))
    found, kind = copy.copy(found), type(found)
    found.__class__ = type(kind.__name__, (_Shared, kind), {"_sharing": sharing})
    return found


class _Shared(keras.losses.Loss):  # type: ignore[misc] # Any
    """Base of the classes that losses get."""

    _sharing: Sharing

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        loss = super().__call__(y_true, y_pred, sample_weight)
        weight = self._sharing.weight
        left = None if weight is None else self._left(y_true, y_pred)
        if left is None:
            return loss
        ops = keras.ops
        left = ops.reshape(ops.sum(ops.cast(left, "float32")), (1,))
        share = ops.divide_no_nan(left * hvd.size(), sum_over_ranks(left) * ops.convert_to_tensor(weight))
        return loss * ops.cast(share[0], loss.dtype)

    def _left(self, y_true: Any, y_pred: Any) -> Any:
        """Return which elements count, as booleans; None if all do."""
        mask, ignored = getattr(y_pred, "_keras_mask", None), getattr(self, "ignore_class", None)
        if ignored is None:
            return mask
        known = keras.ops.not_equal(y_true, keras.ops.cast(ignored, y_true.dtype))
        return known if mask is None else mask & keras.ops.reshape(known, keras.ops.shape(mask))
