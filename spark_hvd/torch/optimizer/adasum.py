"""The Adasum optimizer: each rank makes its own step, and the ranks' weight changes are combined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from spark_hvd.collectives.objects import allgather_object
from spark_hvd.collectives.process_set import ProcessSet, global_process_set, queue_of
from spark_hvd.collectives.start import Reducing, compressed_allreduce
from spark_hvd.context.global_state import current, in_world, ordinal
from spark_hvd.context.local import is_local
from spark_hvd.torch.optimizer.arguments import spec_of
from spark_hvd.torch.optimizer.live import DistributedOptimizerBase, make_distributed
from spark_hvd.torch.optimizer.plan import require_same
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.world import launcher as elastic_launcher


class AdasumOptimizer(DistributedOptimizerBase):
    """Methods that DistributedOptimizer(op=Adasum) adds to its optimizer."""

    def synchronize(self) -> None:
        """Do nothing: gradients stay this rank's own, and may be read or changed (clipped) at any time."""

    def skip_synchronize(self) -> NoReturn:
        """Refuse: Adasum does not reduce gradients.

        Raises:
            AssertionError: Always.
        """
        raise AssertionError(
            "skip_synchronize() has no meaning with op=Adasum, which reduces weight changes and not gradients. "
            "Clip gradients right before step()."
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients accumulate until step() uses them."""


class _Deltas:
    """The weight changes of one step."""

    def __init__(self, process_set: ProcessSet | None, compression: Any) -> None:
        self._process_set = process_set
        self._compression = compression
        # Ranks create their optimizers in the same order, so the numbers agree.
        self._name = f"DistributedOptimizer.adasum.{ordinal('adasum')}"
        self._before: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    @torch.no_grad()
    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the weights before a step."""
        # An elastic rank moves between worlds, so each step checks who is there.
        if self._process_set is not None and _has_others(self._process_set):
            self._before = [
                (param, param.clone())
                for group in optimizer.param_groups
                for param in group["params"]
                if param.requires_grad and not is_local(param)
            ]

    @torch.no_grad()
    def end(self) -> None:
        """Combine the weight changes of a step with those of the other ranks."""
        before, self._before = self._before, []
        if self._process_set is None or not before:
            return
        deltas = [param - start for param, start in before]
        combined = compressed_allreduce(
            deltas, self._name, Reducing(ReduceOp.ADASUM), self._process_set, self._compression
        )
        for (param, start), delta in zip(before, combined, strict=True):
            param.copy_(start + delta)


def _has_others(process_set: ProcessSet) -> bool:
    current()  # raises outside a world
    included = process_set is global_process_set or process_set.included()
    return bool(included) and len(queue_of(process_set).ranks) > 1


def make_distributed_with_adasum(
    optimizer: torch.optim.Optimizer, names: Sequence[str], process_set: ProcessSet, compression: Any
) -> AdasumOptimizer:
    """Make `optimizer` combine the ranks' steps; on ranks outside the process set, steps stay local.

    Raises:
        PlanMismatchError: Parameters or compression differ between ranks; raised on all of them.
    """
    elastic = elastic_launcher.installed() is not None
    if (not elastic or in_world()) and _has_others(process_set):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        require_same(
            [spec_of(name, param) for name, param in zip(names, params, strict=True) if not is_local(param)],
            {"op": "ADASUM", "compression": getattr(compression, "__name__", type(compression).__name__)},
            lambda fact: allgather_object(fact, name="DistributedOptimizer.adasum", process_set=process_set),
        )
    combining = process_set if elastic or _has_others(process_set) else None
    optimizer = make_distributed(optimizer, AdasumOptimizer)
    deltas = _Deltas(combining, compression)
    optimizer.register_step_pre_hook(lambda own, args, kwargs: deltas.begin(own))
    optimizer.register_step_post_hook(lambda own, args, kwargs: deltas.end())
    return optimizer
