"""Training with modules: an optimizer that averages its gradients over all ranks."""

from __future__ import annotations

from typing import Any

import mxnet

from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.mxnet.collectives import grouped_allreduce_
from spark_hvd.transport.communicator import ReduceOp

_OWN = ("inside", "_predivide", "_process_set")


class DistributedOptimizer(mxnet.optimizer.Optimizer):  # type: ignore[misc]
    """An optimizer around another, for ``mx.mod.Module``, that averages gradients over all ranks before each update.

    It has the attributes and methods of the inner optimizer. For Gluon, use :class:`DistributedTrainer`, which
    exchanges all gradients at once.
    """

    __module__ = "spark_hvd.mxnet"

    def __init__(
        self,
        optimizer: mxnet.optimizer.Optimizer,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: One of ``mx.optimizer``; it is not changed.
            gradient_predivide_factor: Gradients are divided by it before the sum; the sum is multiplied by it.
            num_groups: Accepted for Horovod's sake; has no effect: what MXNet updates together is exchanged as one
                unit.
            process_set: The ranks over which gradients are averaged; other ranks keep their own.

        Raises:
            TypeError: `optimizer` is not an optimizer.
            ValueError: `gradient_predivide_factor` is not above 0.
        """
        if not isinstance(optimizer, mxnet.optimizer.Optimizer):
            given = type(optimizer).__name__
            raise TypeError(f"expected an mx.optimizer.Optimizer, got {given}; call mx.optimizer.create(name).")
        self.inside = optimizer
        self._predivide = positive(gradient_predivide_factor)
        self._process_set = process_set

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # during unpickling
            raise AttributeError(name)
        return getattr(self.inside, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inside, name, value)

    def create_state(self, index: Any, weight: Any) -> Any:
        """Call the inner optimizer's method."""
        return self.inside.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """Call the inner optimizer's method."""
        return self.inside.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average gradients in place, then call the inner optimizer's method."""
        self._reduce(index, grad)
        self.inside.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average gradients in place, then call the inner optimizer's method."""
        self._reduce(index, grad)
        self.inside.update_multi_precision(index, weight, grad, state)

    def _reduce(self, index: Any, grad: Any) -> None:
        if not self._process_set.included():
            return
        several = isinstance(index, (tuple, list))
        name = f"update.{':'.join(map(str, index)) if several else index}"
        grouped_allreduce_(
            grad if several else [grad], None, name, 0, 1.0 / self._predivide, self._predivide, self._process_set,
            ReduceOp.AVERAGE,
        )  # fmt: skip


def positive(gradient_predivide_factor: float) -> float:
    """Return the factor; raise a ValueError if it is not above 0."""
    if not gradient_predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor}: expected a number above 0.")
    return gradient_predivide_factor
