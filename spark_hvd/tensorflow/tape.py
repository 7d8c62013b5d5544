"""A ``tf.GradientTape`` whose gradients are those of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.tensorflow.collectives import grouped_allreduce
from spark_hvd.tensorflow.standing import size_op
from spark_hvd.tensorflow.tensors import unconverted
from spark_hvd.transport.communicator import ReduceOp


class _ReducedTape(tf.GradientTape):  # type: ignore[misc] # TensorFlow has no types here
    """What the class of a tape becomes."""

    _reduction: dict[str, Any]
    _sparse_as_dense: bool
    _local: set[int]
    _scale_local: bool

    @unconverted
    def gradient(self, target: Any, sources: Any, *rest: Any, **options: Any) -> Any:
        """The gradients as of ``tf.GradientTape.gradient``, reduced over all ranks; None stays None."""
        gradients = super().gradient(target, sources, *rest, **options)
        flat, variables = tf.nest.flatten(gradients, expand_composites=False), tf.nest.flatten(sources)
        shared = [
            place
            for place, (gradient, variable) in enumerate(zip(flat, variables, strict=True))
            if gradient is not None and id(variable) not in self._local
        ]
        given = [tf.convert_to_tensor(flat[place]) if self._sparse_as_dense else flat[place] for place in shared]
        for place, reduced in zip(shared, grouped_allreduce(given, **self._reduction), strict=True):
            flat[place] = reduced
        if self._scale_local and self._local and self._reduction["op"] is ReduceOp.AVERAGE:
            size = size_op(self._reduction["process_set"])
            for place, variable in enumerate(variables):
                if id(variable) in self._local and flat[place] is not None:
                    flat[place] /= tf.cast(size, flat[place].dtype)
        return tf.nest.pack_sequence_as(gradients, flat, expand_composites=False)

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable to this rank."""
        self._local.add(id(source))


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
    """Make the gradients of a tape those of all ranks; dense ones are reduced in one exchange.

    Args:
        gradtape: The tape. It is changed, and returned.
        device_dense: Horovod's; means nothing here.
        device_sparse: Horovod's; means nothing here.
        compression: Compression.none, .fp16, .bf16, or anything with their two methods, which are given torch tensors.
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
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"gradtape={gradtape!r}: expected a tf.GradientTape")
    if gradient_predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} with op={op}: expected op=Average")
    kind = type(gradtape)
    gradtape.__class__ = type(kind.__name__, (_ReducedTape, kind), {"__module__": kind.__module__})
    gradtape._reduction = {
        "op": op,
        "compression": compression,
        "process_set": process_set,
        "prescale_factor": 1.0 / gradient_predivide_factor,
        "postscale_factor": gradient_predivide_factor,
    }
    gradtape._sparse_as_dense, gradtape._local, gradtape._scale_local = sparse_as_dense, set(), scale_local_gradients
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
