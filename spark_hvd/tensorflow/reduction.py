"""Reduces the gradients of one step over all ranks, whether a tape or an optimizer of plain graphs computed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from spark_hvd.collectives.process_set import ProcessSet
from spark_hvd.tensorflow.bucketed import external_gradients_of, fits, reduced, variable_of
from spark_hvd.tensorflow.collectives import grouped_allreduce
from spark_hvd.tensorflow.rank_ops import size_op
from spark_hvd.torch.optimizer.recipe import Recipe
from spark_hvd.transport.communicator import ReduceOp


@dataclass(eq=False)
class GradientReduction:
    """How gradients are reduced over all ranks.

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
    """Ids of variables whose gradients stay with their rank."""

    def __post_init__(self) -> None:
        if self.predivide_factor != 1.0 and self.op is not ReduceOp.AVERAGE:
            raise ValueError(
                f"gradient_predivide_factor={self.predivide_factor} with op={self.op}: expected op=Average"
            )

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce gradients over all ranks; None stays None. Ranks outside the process set keep their own.

        Gradients of variables are reduced in buckets, like a step's. Sparse ones and those of other tensors are reduced
        by name, and so are all of them in a plain graph, whose operations have no order that ranks could share.
        """
        results = list(gradients)
        if self.process_set.included() is False:
            return results
        shared = [
            place
            for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if gradient is not None and id(variable) not in self.local
        ]
        for place in shared:
            results[place] = tf.convert_to_tensor(results[place]) if self.sparse_as_dense else results[place]
        planned: list[int] = []
        if self.op in (ReduceOp.AVERAGE, ReduceOp.SUM) and (tf.executing_eagerly() or tf.inside_function()):
            planned = [place for place in shared if fits(results[place], variable_of(variables[place]))]
        if planned:
            averaged = self._in_buckets([results[place] for place in planned], [variables[place] for place in planned])
            for place, gradient in zip(planned, averaged, strict=True):
                results[place] = gradient
        named = [place for place in shared if place not in planned]
        by_name = grouped_allreduce(
            [results[place] for place in named],
            op=self.op,
            compression=self.compression,
            process_set=self.process_set,
            prescale_factor=1.0 / self.predivide_factor,
            postscale_factor=self.predivide_factor,
        )
        for place, gradient in zip(named, by_name, strict=True):
            results[place] = gradient
        if self.scale_local and self.local and self.op is ReduceOp.AVERAGE:
            size = size_op(self.process_set)
            for place, variable in enumerate(variables):
                if id(variable) in self.local and results[place] is not None:
                    results[place] /= tf.cast(size, results[place].dtype)
        return results

    def _in_buckets(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        recipe = Recipe(
            [f"source {place}" for place in range(len(sources))],
            [],
            self.op,
            self.compression,
            passes=1,
            gradient_predivide_factor=self.predivide_factor,
            sparse_as_dense=True,
            process_set=self.process_set,
            bucket_cap_mb=None,
            shared_memory=True,
        )
        external = external_gradients_of([variable_of(source) for source in sources], recipe)
        return reduced(external, range(len(sources)), gradients, for_the_step=False)
