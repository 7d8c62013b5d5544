"""Batch normalisation for Keras with the statistics of all ranks' batches together."""

from __future__ import annotations

from typing import Any

import keras

from spark_hvd.context.global_state import in_world
from spark_hvd.transport.communicator import ReduceOp


@keras.saving.register_keras_serializable("spark_hvd")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc] # Keras has no types here
    """``keras.layers.BatchNormalization`` over the joined batch of all ranks, with the same arguments.

    In training mode, every rank must call it equally often and in the same order. Forward and backward each cost one
    small all-reduce. Batches may differ in size. Outside training and before init(), nothing is sent, nor by a graph of
    TensorFlow that was traced before init(). The gradients are those of the sum of all ranks' losses, as for
    :class:`spark_hvd.torch.SyncBatchNorm`.

    Args:
        fused: Accepted for Horovod's sake; must be False.
        **options: Arguments of ``keras.layers.BatchNormalization``.

    Raises:
        ValueError: ``fused`` is True.
        CollectiveError: From calls in training mode and their backward: a peer or the network failed.
    """

    __module__ = "spark_hvd.keras"

    def __init__(self, fused: bool = False, **options: Any) -> None:
        if fused:
            raise ValueError("fused=True: a fused operation cannot include the statistics of other ranks; omit it")
        super().__init__(**options)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        # Keras provides this method for it (private, so a test compares with one rank on the joined batch).
        mean, variance = super()._moments(inputs, mask)
        if not in_world():
            return mean, variance
        if mask is not None:
            count = keras.ops.sum(keras.ops.cast(mask, mean.dtype))
        else:
            shape = keras.ops.shape(inputs)
            count = keras.ops.ones((), mean.dtype)
            for axis in self._reduction_axes:
                count = count * keras.ops.cast(shape[axis], mean.dtype)
        # Sums and not means, because ranks may have batches of different sizes.
        mine = keras.ops.concatenate(
            [mean * count, (variance + mean * mean) * count, keras.ops.reshape(count, (1,))], axis=0
        )
        every = sum_over_ranks(mine)
        channels = mean.shape[0]
        total = every[2 * channels]
        mean = every[:channels] / total
        return mean, keras.ops.maximum(every[channels : 2 * channels] / total - mean * mean, 0)


def sum_over_ranks(value: Any) -> Any:
    """Sum a value over all ranks; gradients flow through the sum."""
    if keras.config.backend() == "torch":
        from spark_hvd.torch.reduce import allreduce

        return allreduce(value, op=ReduceOp.SUM)
    from spark_hvd.tensorflow.collectives import allreduce as allreduce_in_tensorflow

    return allreduce_in_tensorflow(value, op=ReduceOp.SUM)
