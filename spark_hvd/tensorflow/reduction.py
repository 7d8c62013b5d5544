"""Gradients of one step between ranks, for whatever has computed them: a tape, or an optimizer of plain graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from spark_hvd.collectives.process_set import ProcessSet
from spark_hvd.tensorflow.collectives import grouped_allreduce
from spark_hvd.tensorflow.standing import size_op
from spark_hvd.transport.communicator import ReduceOp


@dataclass(eq=False)
class GradientReduction:
    """How gradients become those of all ranks.

    Raises:
        ValueError: ``predivide_factor`` is given with another op than Average.
    """

    op: ReduceOp
    compression: Any
    process_set: ProcessSet
    predivide_factor: float
    sparse_as_dense: bool
    scale_local: bool
    local: set[int] = field(default_factory=set)
    """Variables, by id, whose gradients stay with their rank."""

    def __post_init__(self) -> None:
        if self.predivide_factor != 1.0 and self.op is not ReduceOp.AVERAGE:
            raise ValueError(
                f"gradient_predivide_factor={self.predivide_factor} with op={self.op}: expected op=Average"
            )

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients reduced over all ranks, dense ones in one exchange; None stays None.

        Ranks outside the process set keep their own.
        """
        found = list(gradients)
        if self.process_set.included() is False:
            return found
        shared = [
            place
            for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if gradient is not None and id(variable) not in self.local
        ]
        given = [tf.convert_to_tensor(found[place]) if self.sparse_as_dense else found[place] for place in shared]
        reduced = grouped_allreduce(
            given,
            op=self.op,
            compression=self.compression,
            process_set=self.process_set,
            prescale_factor=1.0 / self.predivide_factor,
            postscale_factor=self.predivide_factor,
        )
        for place, gradient in zip(shared, reduced, strict=True):
            found[place] = gradient
        if self.scale_local and self.local and self.op is ReduceOp.AVERAGE:
            size = size_op(self.process_set)
            for place, variable in enumerate(variables):
                if id(variable) in self.local and found[place] is not None:
                    found[place] /= tf.cast(size, found[place].dtype)
        return found
