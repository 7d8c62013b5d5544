"""A ``tf.GradientTape`` whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.tensorflow.reduction import GradientReduction
from spark_hvd.tensorflow.tensors import unconverted
from spark_hvd.transport.communicator import ReduceOp


class _ReducedTape(tf.GradientTape):  # type: ignore[misc] # TensorFlow has no types here
    """The class that a tape gets."""

    _reduction: GradientReduction

    @unconverted
    def gradient(self, target: Any, sources: Any, *rest: Any, **options: Any) -> Any:
        """Compute gradients as ``tf.GradientTape.gradient``, reduced over all ranks; None stays None."""
        gradients = super().gradient(target, sources, *rest, **options)
        flat = tf.nest.flatten(gradients, expand_composites=False)
        reduced = self._reduction.apply(flat, tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(gradients, reduced, expand_composites=False)

    def register_local_source(self, source: Any) -> None:
        """Exclude a variable's gradient from reduction."""
        self._reduction.local.add(id(source))


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Any] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a tape reduce its gradients over all ranks; those of variables are reduced together.

    Args:
        gradtape: The tape. It is changed, and returned.
        device_dense: Accepted for Horovod's sake; has no effect.
        device_sparse: Accepted for Horovod's sake; has no effect.
        compression: Compression.none, .fp16, .bf16, or an object with their two methods, which get torch tensors:
            one-dimensional buckets of gradients.
        sparse_as_dense: Reduce IndexedSlices as dense tensors, instead of gathering the rows of all ranks.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: With Average, gradients are divided by it before the sum and by size / factor after.
        num_groups: Accepted for Horovod's sake; has no effect, as all gradients form one group.
        groups: Accepted for Horovod's sake; has no effect.
        process_set: The ranks that take part.
        scale_local_gradients: With Average: divide the gradients of local sources by the number of ranks, so that they
            weigh as much as averages do.

    Returns:
        The tape, with a further method ``register_local_source(variable)``: such a gradient stays with its rank.

    Raises:
        TypeError: `gradtape` is not a tape.
        ValueError: `gradient_predivide_factor` is given with another op than Average.
        PlanMismatchError: From ``gradient()``: ranks have gradients for different variables. Raised on every rank.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"gradtape={gradtape!r}: expected a tf.GradientTape")
    reduction = GradientReduction(
        op, compression, process_set, gradient_predivide_factor, sparse_as_dense, scale_local_gradients
    )
    kind = type(gradtape)
    gradtape.__class__ = type(kind.__name__, (_ReducedTape, kind), {"__module__": kind.__module__})
    gradtape._reduction = reduction
    return gradtape


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Make a :func:`DistributedGradientTape` that does not reduce the gradients of some layers.

    Args:
        gradtape: The tape. It is changed, and returned.
        *args: Arguments of DistributedGradientTape.
        local_layers: A Keras layer, or several.
        **options: Further arguments of DistributedGradientTape.
    """
    tape = DistributedGradientTape(gradtape, *args, **options)
    layers = local_layers if isinstance(local_layers, Iterable) else [] if local_layers is None else [local_layers]
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
