"""DistributedOptimizer: a torch optimizer whose gradients are reduced over all ranks before each step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from spark_hvd import mpi_backend
from spark_hvd.adasum_optimizer import AdasumOptimizer, take_over_with_adasum
from spark_hvd.buckets import MEGABYTE
from spark_hvd.communicator import ReduceOp
from spark_hvd.compression import Compression
from spark_hvd.context import current
from spark_hvd.flat import Compressor, Reduction
from spark_hvd.optimizer_arguments import check_passes, chosen_groups, exchange_device, group_indices, names_of, spec_of
from spark_hvd.planned import PlannedLane
from spark_hvd.process_sets import ProcessSet, global_process_set, lane_of
from spark_hvd.tuning import GLOO_THREADS, TAIL_MB, Groups, StepTuner

# The last bucket has no backward left to hide behind: small enough to be all latency, it costs one round trip.
TAIL_BYTES = int(TAIL_MB * MEGABYTE)
DEFAULT_CAP_MB = 25.0


class ReducedOptimizer(torch.optim.Optimizer):
    """What DistributedOptimizer adds to the methods of the optimizer it is given."""

    _lane: PlannedLane | None
    _synchronizes: bool

    def synchronize(self) -> None:
        """Finish reducing gradients, so that they may be read or changed (clipped) before `step`.

        Needed only if some parameters get no gradient in some backward passes; else backward ends with all gradients
        reduced, and this returns at once. A later `step` does not reduce again.

        Raises:
            CollectiveError: a peer or the network failed.
        """
        if self._lane is not None:
            self._lane.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context `step` takes gradients as they are."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many calls of backward() are summed up before gradients are reduced.

        Raises:
            ValueError: `passes` is not positive.
        """
        check_passes(passes)
        if self._lane is not None:
            self._lane.set_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch.optim.Optimizer.zero_grad.

        Raises:
            AssertionError: gradients are being reduced; call `synchronize` or `step` first.
        """
        if self._lane is not None:
            if self._lane.in_flight:
                raise AssertionError(
                    "optimizer.zero_grad() was called while gradients are being reduced: "
                    "call optimizer.step() or optimizer.synchronize() after backward() first"
                )
            self._lane.reset()
        super().zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer.add_param_group; to be called on every rank, between steps.

        Raises:
            PlanMismatchError: ranks add different parameters.
        """
        super().add_param_group(param_group)
        if self._lane is not None:
            number = len(self.param_groups) - 1
            added = self.param_groups[number]["params"]
            self._lane.extend(added, [spec_of(f"group{number}.param{i}", param) for i, param in enumerate(added)])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch.optim.Optimizer.load_state_dict; the count of backward passes starts anew."""
        super().load_state_dict(state_dict)
        if self._lane is not None and not self._lane.in_flight:
            self._lane.reset()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    bucket_cap_mb: float | None = None,
    shared_memory: bool = True,
) -> ReducedOptimizer | AdasumOptimizer:
    """Make `optimizer` reduce gradients over all ranks; collective, every rank must call it.

    The same object is returned, now of a class of the same name that has the methods of ReducedOptimizer too: learning
    rate schedulers and other holders of the optimizer need not know. Gradients are summed into flat buffers, bucket by
    bucket while backward goes on, as in Li et al., "PyTorch Distributed" (VLDB 2020); `param.grad` is a view of them.

    Args:
        optimizer: any torch optimizer over dense or sparse parameters, on CPU or GPU.
        named_parameters: `model.named_parameters()`; names are used in errors. Without it names are made up.
        compression: `Compression.none`, `.fp16`, `.bf16` or an object with `compress` and `decompress`, which gets a
            one-dimensional bucket of gradients.
        backward_passes_per_step: calls of backward() whose gradients are summed (not averaged) before a step.
        op: `Average`, `Sum` or `Adasum`. With Adasum each rank makes a step of its own, and the ranks' changes of the
            weights are combined (Maleki et al., arXiv 2006.02924); the arguments below `compression` are of no
            consequence then.
        gradient_predivide_factor: with Average, gradients are divided by it before the sum and by size / factor after.
        num_groups: deprecated: use `groups`.
        groups: a number of groups, or lists of parameters, each of which is reduced in one piece.
        sparse_as_dense: reduce sparse gradients as dense ones; else indices and values of all ranks are gathered.
        process_set: the ranks to reduce over; on other ranks the optimizer stays a local one.
        bucket_cap_mb: upper bound of a bucket in MiB, 25 by default. A given one is not changed by autotuning.
        shared_memory: where all ranks are on one Linux host, reduce uncompressed buckets on the CPU in shared memory
            instead of over Gloo.

    Returns:
        `optimizer`.

    Raises:
        NotInitializedError: `init()` was not called.
        ValueError: an argument does not fit, as its message says.
        PlanMismatchError: parameters or settings differ between ranks; raised on all of them.
    """
    if isinstance(optimizer, ReducedOptimizer | AdasumOptimizer):
        raise ValueError("optimizer is already a DistributedOptimizer: wrap it once")
    check_passes(backward_passes_per_step)
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
        raise ValueError(f"op={op!r}: DistributedOptimizer can reduce gradients with Average, Sum or Adasum")
    if gradient_predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} needs op=Average, got op={op!r}")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    specs = [spec_of(name, param) for name, param in zip(names_of(optimizer, named_parameters), params, strict=True)]
    grouped = group_indices(chosen_groups(groups, num_groups), params)

    context = current()
    included = process_set is global_process_set or process_set.included()
    ranks = list(lane_of(process_set).ranks) if included else []
    size = len(ranks)
    if op is ReduceOp.ADASUM:
        return take_over_with_adasum(optimizer, process_set if size > 1 else None, compression)
    lane = None
    if size > 1:
        config = context.engine.config
        cap_mb = DEFAULT_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        settings = {
            "op": op.name,
            "gradient_predivide_factor": gradient_predivide_factor,
            "compression": getattr(compression, "__name__", type(compression).__name__),
            "backward_passes_per_step": backward_passes_per_step,
            "groups": grouped,
            "sparse_as_dense": sparse_as_dense,
            "bucket_cap_mb": bucket_cap_mb,
            "shared_memory": shared_memory,
            "autotune": config.autotune and [config.autotune_steps_per_sample, config.autotune_max_samples],
        }
        average = op is ReduceOp.AVERAGE
        if gradient_predivide_factor != 1.0:
            scales = (1.0 / gradient_predivide_factor, gradient_predivide_factor / size)
        else:
            scales = (1.0 / size if average else 1.0, 1.0)
        set_id = process_set.process_set_id or 0
        group = context.new_group(set_id)
        in_memory = (
            shared_memory
            and hasattr(os, "memfd_create")
            and len({context.layout.ranks[rank].host for rank in ranks}) == 1
            and compression is Compression.none
        )
        device = exchange_device(group, params)
        lane = PlannedLane(
            params,
            specs,
            grouped,
            group=group,
            device=device,
            reduction=Reduction(*scales, compression, sparse_as_dense),
            host_group=context.new_group(set_id) if in_memory else None,
            sparse_scale=1.0 / size if average else 1.0,
            passes=backward_passes_per_step,
            cap_bytes=int(cap_mb * MEGABYTE),
            tail_bytes=min(TAIL_BYTES, int(cap_mb * MEGABYTE)),
            settings=settings,
            tracing=context.engine.tracing,
        )
        if config.autotune:
            on_gloo = mpi_backend.carrier(on_gpu=any(param.is_cuda for param in params)) == "gloo"
            by_threads = [context.new_group(set_id, threads) for threads in GLOO_THREADS] if on_gloo else []
            cap = cap_mb, bucket_cap_mb is not None
            lane.tuner = StepTuner(lane, Groups(group, by_threads), device, context.engine, config, cap, in_memory)
    return _take_over(optimizer, lane)


def _take_over(optimizer: torch.optim.Optimizer, lane: PlannedLane | None) -> ReducedOptimizer:
    base = type(optimizer)
    namespace = {"__doc__": base.__doc__, "__module__": base.__module__, "__qualname__": base.__qualname__}
    # A class swap instead of a wrapper or a copy: state, schedulers and references made before stay valid.
    optimizer.__class__ = type(base.__name__, (ReducedOptimizer, base), namespace)
    assert isinstance(optimizer, ReducedOptimizer)
    optimizer._lane = lane
    optimizer._synchronizes = True
    # Hooks, because a scheduler made before the swap has bound the old class's step to the instance.
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    return optimizer


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    assert isinstance(optimizer, ReducedOptimizer)
    lane = optimizer._lane
    if lane is None:
        return None
    if not optimizer._synchronizes:
        if lane.in_flight:
            raise AssertionError(
                "step() under skip_synchronize() while gradients are being reduced: call synchronize()"
            )
        return None
    # Optimizer pre-hooks see the optimizer itself as first of args.
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        lane.synchronize()
        return None
    if lane.started:
        lane.synchronize()
    reduced = _reducing(closure, lane)
    if len(args) > 1:
        return (args[0], reduced, *args[2:]), kwargs
    return args, {**kwargs, "closure": reduced}


def _reducing(closure: Callable[[], Any], lane: PlannedLane) -> Callable[[], Any]:
    def reduced() -> Any:
        loss = closure()
        lane.synchronize()
        return loss

    return reduced


def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(optimizer, ReducedOptimizer)
    if optimizer._lane is not None:
        optimizer._lane.stepped()
