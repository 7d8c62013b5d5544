"""Losses of Keras that leave out elements, by a mask or ``ignore_class``: ranks count by the elements that are left."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import keras

import spark_hvd.torch as hvd
from spark_hvd.keras.batch_norm import sum_over_ranks


@dataclass
class Sharing:
    """How losses of a batch become part of those of all ranks.

    Attributes:
        divisor: The number by which the optimizer divides the sum of the ranks' gradients.
        weight: The variable by which the optimizer multiplies this rank's losses in a step of training; None elsewhere.
    """

    divisor: int
    weight: Any = None


def share_losses(model: Any, divisor: int) -> Sharing:
    """Make the losses of a compiled model, before its first batch, parts of those of all ranks in steps of training.

    Keras divides by the elements that are left. The mean of the ranks' losses is that of one process only if each
    counts by these elements, while the optimizer counts by rows. What the model is saved with does not change.
    """
    sharing, compiled = Sharing(divisor), model._compile_loss
    build = compiled.build

    def build_shared(*batch: Any) -> None:
        build(*batch)
        compiled._flat_losses = [each._replace(loss=_Shared(each.loss, sharing)) for each in compiled._flat_losses]

    compiled.build = build_shared
    return sharing


class _Shared:
    """A loss whose gradient is this rank's part of that of all ranks, and whose value is the mean of all ranks."""

    def __init__(self, loss: Any, sharing: Sharing) -> None:
        self._loss, self._sharing = loss, sharing

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        loss, masks = self._with_masks(y_true, y_pred, sample_weight)
        weight = self._sharing.weight
        if weight is None or not masks or hvd.size() == 1:
            return loss
        ops = keras.ops
        left = ops.sum(ops.cast(functools.reduce(operator.and_, masks), "float32"))
        # Only the rank with a loss that is not finite reports it, with its rows.
        finite = ops.nan_to_num(ops.cast(ops.stop_gradient(loss), "float32"), posinf=0.0, neginf=0.0)
        every = sum_over_ranks(ops.stack([left, left * finite]))
        share = ops.divide_no_nan(left * self._sharing.divisor, every[0] * ops.convert_to_tensor(weight))
        part, mean = loss * ops.cast(share, loss.dtype), ops.cast(ops.divide_no_nan(every[1], every[0]), loss.dtype)
        return part + ops.stop_gradient(mean - part)

    def _with_masks(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, list[Any]]:
        """Return the loss, and the masks that Keras applies: that of the outputs, and that of the elements' losses."""
        masks, call = [getattr(y_pred, "_keras_mask", None)], self._loss.call

        def recorded(*batch: Any) -> Any:
            losses = call(*batch)
            masks.append(getattr(losses, "_keras_mask", None))
            return losses

        self._loss.call = recorded  # on the object: Keras copies losses by saving them
        try:
            loss = self._loss(y_true, y_pred, sample_weight)
        finally:
            self._loss.call = call
        return loss, [each for each in masks if each is not None]
