"""The settings of a DistributedOptimizer, from which each elastic generation makes a new gradient reducer."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from spark_hvd.collectives.compression import Compression, GradientCompressor
from spark_hvd.collectives.execution import single_result
from spark_hvd.collectives.process_set import ProcessSet, global_process_set, queue_of
from spark_hvd.collectives.start import Reducing, start_allreduce
from spark_hvd.context.global_state import Context, current, in_world
from spark_hvd.context.local import is_averaged, is_local
from spark_hvd.elastic.run import WorldHook, register_world_hook
from spark_hvd.torch.optimizer.arguments import exchange_device, placement, spec_of
from spark_hvd.torch.optimizer.buckets import MEGABYTE, ParamSpec
from spark_hvd.torch.optimizer.flat import Reduction
from spark_hvd.torch.optimizer.hooks import remove_all
from spark_hvd.torch.optimizer.reducer import GradientReducer
from spark_hvd.torch.optimizer.tuner import GLOO_THREADS, StepTuner, TunedGroups
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.transport.host.hierarchy import HostSharing
from spark_hvd.transport.mpi import backend as mpi_backend
from spark_hvd.transport.nccl import carries
from spark_hvd.world.config import Config

DEFAULT_CAP_MB = 25.0


@dataclass(slots=True)
class Recipe:
    """The validated arguments of DistributedOptimizer that its reducer needs."""

    names: list[str]
    """The names of all parameters."""
    grouped: Sequence[Sequence[int]]
    """Indices of parameters to keep in one bucket."""
    op: ReduceOp
    compression: GradientCompressor
    passes: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet
    bucket_cap_mb: float | None
    shared_memory: bool
    scale_local: bool = True
    """Whether Average also divides the gradients of local parameters."""
    loss_name: str | None = None
    """Name of the collective that makes a closure's loss equal on all ranks, if the optimizer's steps depend on it."""
    scaled: dict[int, torch.utils.hooks.RemovableHandle] = field(default_factory=dict)
    """The hooks that scale gradients of local parameters, by the parameters' ids."""

    def reduced(
        self, params: Sequence[torch.nn.Parameter]
    ) -> tuple[list[torch.nn.Parameter], list[ParamSpec], list[list[int]]]:
        """Return the non-local parameters, their specifications, and the indices of those to keep in one bucket."""
        here = [index for index, param in enumerate(params) if not is_local(param)]
        place = {index: number for number, index in enumerate(here)}
        groups = [[place[index] for index in group if index in place] for group in self.grouped]
        return [params[i] for i in here], [spec_of(self.names[i], params[i]) for i in here], [g for g in groups if g]

    def scale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale gradients of local parameters before they reach ``grad``, so that several backward passes add up."""
        if not self.scaled:
            weakref.finalize(optimizer, lambda scaled: remove_all(list(scaled.values())), self.scaled)
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if is_local(param) and id(param) not in self.scaled:
                self.scaled[id(param)] = self._scale(param, is_averaged(param))

    def release(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Stop scaling the gradients of these parameters, because another optimizer now does."""
        for param in params:
            if (handle := self.scaled.pop(id(param), None)) is not None:
                handle.remove()

    def _scale(self, param: torch.nn.Parameter, averaged: bool) -> torch.utils.hooks.RemovableHandle:
        def scale(gradient: torch.Tensor) -> torch.Tensor | None:
            factor = self._local_scale(averaged)
            return None if factor == 1.0 else gradient * factor

        trained = param.requires_grad  # torch hooks only trained parameters, but this one may be unfrozen later
        handle: torch.utils.hooks.RemovableHandle = param.requires_grad_(True).register_hook(scale)  # type: ignore[no-untyped-call]
        param.requires_grad_(trained)
        return handle

    def agreed(self, loss: Any) -> Any:
        """Return a closure's loss. If the optimizer's steps depend on it, it is reduced like gradients, collectively.

        Raises:
            CollectiveError: A peer or the network failed.
        """
        if self.loss_name is None:
            return loss
        device = queue_of(self.process_set).communicator.fact_device
        value = loss.item() if isinstance(loss, torch.Tensor) else loss
        local = torch.tensor([value], dtype=torch.float64, device=device)
        reducing = Reducing(self.op)  # which treats ranks that have joined as the reducer does
        handle = start_allreduce(
            [local], self.loss_name, reducing, self.process_set, single_result, in_place=True, urgent=True
        )
        total = handle.wait().item()
        return torch.full_like(loss, total, requires_grad=False) if isinstance(loss, torch.Tensor) else total

    def _local_scale(self, averaged: bool) -> float:
        """Return the factor for a local parameter's gradient; `averaged`: it is already a mean over all ranks."""
        if not in_world():
            return 1.0
        included = self.process_set is global_process_set or self.process_set.included()
        size = len(queue_of(self.process_set).ranks) if included else 1
        if averaged:
            return 1.0 if self.op is ReduceOp.AVERAGE else float(size)
        return 1.0 / size if self.scale_local and self.op is ReduceOp.AVERAGE else 1.0

    def open(self, params: Sequence[torch.nn.Parameter]) -> GradientReducer | None:
        """Make a reducer in the current world. Collective over the process set.

        Returns:
            The reducer; None if there is no other rank to reduce with.

        Raises:
            NotInitializedError: Outside a world.
            PlanMismatchError: Parameters or settings differ between ranks; raised on all of them.
        """
        context = current()
        included = self.process_set is global_process_set or self.process_set.included()
        ranks = list(queue_of(self.process_set).ranks) if included else []
        if len(ranks) <= 1 or (params and all(map(is_local, params))):
            return None
        with context.establishing():
            return self._open(params, context, ranks)

    def _open(self, params: Sequence[torch.nn.Parameter], context: Context, ranks: Sequence[int]) -> GradientReducer:
        size, config = len(ranks), context.engine.config
        params, specs, groups = self.reduced(params)
        cap_mb = DEFAULT_CAP_MB if self.bucket_cap_mb is None else self.bucket_cap_mb
        average = self.op is ReduceOp.AVERAGE
        if self.gradient_predivide_factor != 1.0:
            scales = (1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor / size)
        else:
            scales = (1.0 / size if average else 1.0, 1.0)
        set_id = self.process_set.process_set_id or 0
        # NCCL requires all ranks of a communicator to launch the same collectives in the same order. Buckets have an
        # order, that of the plan (autograd's threads launch them), and so do named calls, that of the coordinator (the
        # engine's thread launches them). There is no common order of both: to agree on one, ranks would have to hold
        # back buckets until every rank has made its calls, which may come after its step. So buckets have a
        # communicator of their own. NCCL runs kernels of two communicators at the same time, in any order, if the
        # device has room for both, and neither stream waits for the other unless the program makes it wait.
        group = context.new_group(set_id)
        in_memory = self.shared_memory and self.compression is Compression.none
        one_host = len({context.layout.ranks[rank].host for rank in ranks}) == 1
        device = exchange_device(group, params)
        pipes: HostSharing | None = None
        if not one_host:
            on_cpu = all(param.device.type == "cpu" for param in params)
            pipes = context.hierarchy(set_id, group, in_memory and on_cpu and config.hierarchical_allreduce)
        elif in_memory and hasattr(os, "memfd_create"):
            pipes = context.pipes(set_id, group, device)
        reducer = GradientReducer(
            params,
            specs,
            groups,
            group=group,
            device=device,
            reduction=Reduction(
                *scales,
                self.compression,
                self.sparse_as_dense,
                average,
                size,
                dist.get_rank(group),
                by_nccl=scales == (1.0 / size, 1.0) and self.compression is Compression.none and carries(group),
            ),
            pipes=pipes,
            passes=self.passes,
            cap_bytes=int(cap_mb * MEGABYTE),
            settings=self._settings(config, params),
            tracing=context.engine.tracing,
        )
        if self.process_set is global_process_set:
            context.joinables[next(context.ordinals["joinable"])] = reducer
        if config.autotune:
            on_gloo = mpi_backend.carrier(on_gpu=any(param.is_cuda for param in params)) == "gloo"
            by_threads = [context.new_group(set_id, threads) for threads in GLOO_THREADS] if on_gloo else []
            cap = cap_mb, self.bucket_cap_mb is not None
            reducer.tuner = StepTuner(
                reducer, TunedGroups(group, by_threads), device, context.engine, config, cap, pipes is not None
            )
        return reducer

    def _settings(self, config: Config, params: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks, besides the parameters."""
        return {
            "op": self.op.name,
            "placement of the parameters": placement(params),
            "gradient_predivide_factor": self.gradient_predivide_factor,
            "compression": getattr(self.compression, "__name__", type(self.compression).__name__),
            "backward_passes_per_step": self.passes,
            "groups": self.grouped,
            "sparse_as_dense": self.sparse_as_dense,
            "bucket_cap_mb": self.bucket_cap_mb,
            "shared_memory": self.shared_memory,
            "autotune": config.autotune and [config.autotune_steps_per_sample, config.autotune_max_samples],
        }


class ExternalGradients:
    """Reduces gradients that its owner passes in, instead of waiting for autograd; lives across worlds.

    The gradients belong to torch parameters, to some of which autograd may also write, or to variables of another
    framework.
    """

    def __init__(self, recipe: Recipe, params: Sequence[torch.nn.Parameter]) -> None:
        self._recipe, self._params = recipe, params
        self._reducer: GradientReducer | None = None
        self._context: Context | None = None
        _external.add(self)

    def ready(self) -> GradientReducer | None:
        """Return the reducer in the current world; None if there is no other rank. Collective in a new world.

        Raises:
            NotInitializedError, PlanMismatchError: See :meth:`Recipe.open`.
        """
        if self._context is not current():
            self.close()
            self._reducer = self._recipe.open(self._params)
            self._context = current()
        return self._reducer

    def reduce(self, places: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the reduced gradients, in the buckets' memory, valid until the next step; None if no rank has one.

        ``places`` holds the indices of the parameters of ``gradients``, which are not changed.

        Raises:
            CollectiveError: A peer or the network failed.
        """
        reducer = self.ready()
        if reducer is None:
            return list(gradients)
        params = [self._params[place] for place in places]
        for param, gradient in zip(params, gradients, strict=True):
            if param.grad is not gradient:
                param.grad = None if gradient is None else gradient.detach()
        reducer.synchronize()
        return [param.grad for param in params]

    def opened(self) -> GradientReducer | None:
        """Return the reducer in the current world, if there is one yet."""
        return self._reducer if in_world() and self._context is current() else None

    def stepped(self) -> None:
        """Record that the gradients have been used."""
        if self._reducer is not None:
            self._reducer.stepped()

    def forget(self) -> None:
        """Do :meth:`stepped` and drop the gradients, so that those not passed in next time count as missing."""
        self.stepped()
        self._clear()

    def drop(self) -> None:
        """Restart the step without the gradients that have arrived; no bucket may have been launched."""
        if self._reducer is not None:
            self._reducer.reset()
        self._clear()

    def _clear(self) -> None:
        for param in self._params:
            param.grad = None

    def close(self) -> None:
        """Close the reducer of the current world."""
        if self._reducer is not None:
            self._reducer.close()
        self._reducer = self._context = None


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    """Return a parameter without memory, for gradients of variables that are not torch parameters."""
    return torch.nn.Parameter(torch.zeros(1, dtype=dtype, device=device).expand(tuple(shape)))


_external: weakref.WeakSet[ExternalGradients] = weakref.WeakSet()


def _release() -> None:
    for each in list(_external):
        each.close()


register_world_hook(WorldHook(lambda: None, _release))
