"""A ``tf.GradientTape`` whose gradients are those of all ranks."""

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
    """What the class of a tape becomes."""

    _reduction: GradientReduction

    @unconverted
    def gradient(self, target: Any, sources: Any, *rest: Any, **options: Any) -> Any:
        """The gradients as of ``tf.GradientTape.gradient``, reduced over all ranks; None stays None."""
        gradients = super().gradient(target, sources, *rest, **options)
        flat = tf.nest.flatten(gradients, expand_composites=False)
        reduced = self._reduction.apply(flat, tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(gradients, reduced, expand_composites=False)

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable to this rank."""
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
    """Make the gradients of a tape those of all ranks; those of variables are reduced together.

    Args:
        gradtape: The tape. It is changed, and returned.
        device_dense: Horovod's; means nothing here.
        device_sparse: Horovod's; means nothing here.
        compression: Compression.none, .fp16, .bf16, or anything with their two methods, which are given torch tensors:
            one-dimensional buckets of gradients.
        sparse_as_dense: Reduce IndexedSlices as dense tensors, instead of gathering the rows of all ranks.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: With Average: divides before the sum; size / this divides after it.
        num_groups: Horovod's; means nothing here, as all gradients are one group.
        groups: Horovod's; means nothing here.
        process_set: The ranks that take part.
        scale_local_gradients: With Average: divide the gradients of local sources by the number of ranks, so that they
            weigh as much as averages do.

    Returns:
        The tape, which has ``register_local_source(variable)`` besides: such a gradient stays with its rank.

    Raises:
        TypeError: `gradtape` is no tape.
        ValueError: `gradient_predivide_factor` is given with another op than Average.
        PlanMismatchError: From ``gradient()``: ranks have gradients of other variables. Raised on every rank.
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
    """A :func:`DistributedGradientTape` that leaves the gradients of some layers to their rank.

    Args:
        gradtape: The tape. It is changed, and returned.
        *args: Those of DistributedGradientTape.
        local_layers: A Keras layer, or several.
        **options: As *args*.
    """
    tape = DistributedGradientTape(gradtape, *args, **options)
    layers = local_layers if isinstance(local_layers, Iterable) else [] if local_layers is None else [local_layers]
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
