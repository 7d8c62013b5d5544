"""An optimizer for plain graphs whose gradients are reduced over all ranks; Keras optimizers go to spark_hvd.keras."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.tensorflow.reduction import GradientReduction
from spark_hvd.tensorflow.tensors import unconverted
from spark_hvd.transport.communicator import ReduceOp


class _ReducedOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc] # TensorFlow has no types here
    """The class that an optimizer gets."""

    _reduction: GradientReduction

    @unconverted
    def compute_gradients(self, *args: Any, **options: Any) -> list[tuple[Any, Any]]:
        """Compute gradients as ``tf.compat.v1.train.Optimizer.compute_gradients``, reduced over all ranks."""
        pairs = super().compute_gradients(*args, **options)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        return list(zip(self._reduction.apply(gradients, variables), variables, strict=True))

    @property
    def _optimizer(self) -> Any:
        return self  # Horovod's wrapper stores the wrapped optimizer here

    def register_local_var(self, variable: Any) -> None:
        """Exclude a variable's gradient from reduction."""
        self._reduction.local.add(id(variable))


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Any] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer reduce its gradients over all ranks.

    Args:
        optimizer: One of ``tf.compat.v1.train``, which is changed and returned, or one of Keras, for which
            :func:`spark_hvd.keras.DistributedOptimizer` is called.
        name: Accepted for Horovod's sake; has no effect.
        use_locking: Accepted for Horovod's sake; has no effect.
        device_dense: Accepted for Horovod's sake; has no effect.
        device_sparse: Accepted for Horovod's sake; has no effect.
        compression: Compression.none, .fp16, .bf16, or an object with their two methods, which get torch tensors.
        sparse_as_dense: Reduce IndexedSlices as dense tensors, instead of gathering the rows of all ranks.
        backward_passes_per_step: For a Keras optimizer: batches whose gradients are summed before a step.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: With Average, gradients are divided by it before the sum and by size / factor after.
        average_aggregated_gradients: With `backward_passes_per_step`: divide their sum by it.
        num_groups: Accepted for Horovod's sake; has no effect, as all gradients form one group.
        groups: Accepted for Horovod's sake; has no effect.
        process_set: The ranks that take part.
        scale_local_gradients: With Average: divide the gradients of local variables by the number of ranks.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        ValueError: `gradient_predivide_factor` is given with another op than Average, or an optimizer of
            ``tf.compat.v1.train`` with more than one backward pass.
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if not hasattr(optimizer, "apply_gradients"):
            raise TypeError(f"optimizer={optimizer!r}: expected an optimizer of Keras or of tf.compat.v1.train")
        keras = importlib.import_module("spark_hvd.keras")  # imports point upward only at run time
        return keras.DistributedOptimizer(
            optimizer,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            average_aggregated_gradients=average_aggregated_gradients,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    if backward_passes_per_step != 1:
        raise ValueError(
            f"backward_passes_per_step={backward_passes_per_step}: an optimizer of tf.compat.v1.train supports only 1. "
            "Use an optimizer of Keras, or add gradients up yourself"
        )
    reduction = GradientReduction(
        op, compression, process_set, gradient_predivide_factor, sparse_as_dense, scale_local_gradients
    )
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_ReducedOptimizer, kind), {"__module__": kind.__module__})
    optimizer._reduction = reduction
    return optimizer
