"""Training with gluon: a trainer that averages gradients over all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import mxnet
import torch

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.collectives.start import Reducing, compressed_allreduce
from spark_hvd.mxnet.arrays import change, require_arrays
from spark_hvd.mxnet.collectives import grouped_allreduce_
from spark_hvd.mxnet.optimizer import DistributedOptimizer, positive
from spark_hvd.transport.communicator import ReduceOp


class DistributedTrainer(mxnet.gluon.Trainer):  # type: ignore[misc]
    """``mx.gluon.Trainer`` whose gradients are averages over all ranks, exchanged as one unit in each step.

    ``step(batch_size)`` takes the size of this rank's batch. ``allreduce_grads()`` and ``update(batch_size)`` are for
    those who change gradients in between.
    """

    __module__ = "spark_hvd.mxnet"

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Make a trainer for one context, without a kvstore.

        Args:
            params: As ``mx.gluon.Trainer`` takes them; a list must have the same order on every rank.
            optimizer: A name, or an optimizer, not a DistributedOptimizer, of which the one inside is taken.
            optimizer_params: Of an optimizer given by name.
            compression: Compression.none, .fp16, .bf16, or anything with their two methods, which are given torch
                tensors.
            gradient_predivide_factor: Gradients are divided by it before they are summed, the sum multiplied after.
            prefix: Begins the name by which ranks match the exchange; trainers of one program need none.
            num_groups: Horovod's; means nothing here, as all gradients are one unit.
            process_set: The ranks over which gradients are averaged; others keep their own.

        Raises:
            ValueError: `gradient_predivide_factor` is not above 0.
        """
        predivide = positive(gradient_predivide_factor)
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer averages gradients itself: it takes the optimizer inside the DistributedOptimizer.",
                stacklevel=2,
            )
            optimizer = optimizer.inside
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        self._predivide = predivide
        self._compression = compression
        self._exchange = None if prefix is None else f"{prefix}gradients"
        self._process_set = process_set

    def _allreduce_grads(self) -> None:
        """What gluon's trainer calls in ``step`` and ``allreduce_grads``."""
        if not self._process_set.included():
            return
        gradients = [parameter.list_grad() for parameter in self._params if parameter.grad_req != "null"]
        for found in gradients:
            if len(found) > 1:
                raise ValueError(f"parameters are on {len(found)} contexts; a rank trains on one: start more ranks.")
        first = [found[0] for found in gradients]
        divided = 1.0 / self._predivide
        if self._compression is Compression.none:
            grouped_allreduce_(
                first, None, self._exchange, 0, divided, self._predivide, self._process_set, ReduceOp.AVERAGE
            )  # fmt: skip
            return
        require_arrays(first)
        reducing = Reducing(ReduceOp.AVERAGE, divided, self._predivide)

        def reduced(given: list[torch.Tensor]) -> list[torch.Tensor]:
            return compressed_allreduce(given, self._exchange, reducing, self._process_set, self._compression)

        if first:
            change(first, reduced)
