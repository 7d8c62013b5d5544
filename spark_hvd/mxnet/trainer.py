"""Training with Gluon: a trainer that averages gradients over all ranks."""

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
    """``mx.gluon.Trainer`` whose gradients are averaged over all ranks, exchanged as one unit in each step.

    ``step(batch_size)`` takes the size of this rank's batch. To change gradients in between, call ``allreduce_grads()``
    and ``update(batch_size)``.
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
            params: As for ``mx.gluon.Trainer``; a list must have the same order on every rank.
            optimizer: A name, or an optimizer; of a DistributedOptimizer, the inner optimizer is used.
            optimizer_params: Parameters of an optimizer given by name.
            compression: Compression.none, .fp16, .bf16, or an object with their two methods, which get torch tensors.
            gradient_predivide_factor: Gradients are divided by it before the sum; the sum is multiplied by it.
            prefix: Prefix of the name by which ranks match the exchange; trainers of one program need none.
            num_groups: Accepted for Horovod's sake; has no effect, as all gradients are one unit.
            process_set: The ranks over which gradients are averaged; other ranks keep their own.

        Raises:
            ValueError: `gradient_predivide_factor` is not above 0.
        """
        predivide = positive(gradient_predivide_factor)
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer averages gradients itself: it uses the optimizer inside the DistributedOptimizer.",
                stacklevel=2,
            )
            optimizer = optimizer.inside
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        self._predivide = predivide
        self._compression = compression
        self._exchange = None if prefix is None else f"{prefix}gradients"
        self._process_set = process_set

    def _allreduce_grads(self) -> None:
        """Average the gradients; Gluon's trainer calls this in ``step`` and ``allreduce_grads``."""
        if not self._process_set.included():
            return
        gradients = [parameter.list_grad() for parameter in self._params if parameter.grad_req != "null"]
        for found in gradients:
            if len(found) > 1:
                raise ValueError(f"parameters are on {len(found)} contexts; a rank can use only one: start more ranks.")
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
