"""What a DistributedOptimizer was asked for: its gradient reducer is made from it, in every elastic generation anew."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.process_set import ProcessSet, global_process_set, queue_of
from spark_hvd.context.standing import Context, current
from spark_hvd.torch.optimizer.arguments import exchange_device, spec_of
from spark_hvd.torch.optimizer.buckets import MEGABYTE
from spark_hvd.torch.optimizer.flat import GradientCompressor, Reduction
from spark_hvd.torch.optimizer.reducer import GradientReducer
from spark_hvd.torch.optimizer.tuner import GLOO_THREADS, StepTuner, TunedGroups
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.transport.mpi import backend as mpi_backend
from spark_hvd.world.config import Config

DEFAULT_CAP_MB = 25.0


@dataclass(slots=True)
class Recipe:
    """The arguments of DistributedOptimizer that matter to its reducer, checked."""

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

    def open(self, params: Sequence[torch.nn.Parameter]) -> GradientReducer | None:
        """Make a reducer in the present world; collective over the process set.

        Args:
            params: The parameters that the names are of.

        Returns:
            None where there is nobody to reduce with.

        Raises:
            NotInitializedError: Outside a world.
            PlanMismatchError: Parameters or settings differ between ranks; raised on all of them.
        """
        context = current()
        included = self.process_set is global_process_set or self.process_set.included()
        ranks = list(queue_of(self.process_set).ranks) if included else []
        if len(ranks) <= 1:
            return None
        with context.establishing():
            return self._open(params, context, ranks)

    def _open(self, params: Sequence[torch.nn.Parameter], context: Context, ranks: Sequence[int]) -> GradientReducer:
        size, config = len(ranks), context.engine.config
        cap_mb = DEFAULT_CAP_MB if self.bucket_cap_mb is None else self.bucket_cap_mb
        average = self.op is ReduceOp.AVERAGE
        if self.gradient_predivide_factor != 1.0:
            scales = (1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor / size)
        else:
            scales = (1.0 / size if average else 1.0, 1.0)
        set_id = self.process_set.process_set_id or 0
        group = context.new_group(set_id)
        in_memory = (
            self.shared_memory
            and hasattr(os, "memfd_create")
            and len({context.layout.ranks[rank].host for rank in ranks}) == 1
            and self.compression is Compression.none
        )
        device = exchange_device(group, params)
        pipes = context.pipes(set_id, group, device) if in_memory else None
        reducer = GradientReducer(
            params,
            [spec_of(name, param) for name, param in zip(self.names, params, strict=True)],
            self.grouped,
            group=group,
            device=device,
            reduction=Reduction(*scales, self.compression, self.sparse_as_dense, average, size, dist.get_rank(group)),
            pipes=pipes,
            passes=self.passes,
            cap_bytes=int(cap_mb * MEGABYTE),
            settings=self._settings(config),
            tracing=context.engine.tracing,
        )
        if self.process_set is global_process_set:
            context.stand_ins[next(context.ordinals["stand-in"])] = reducer
        if config.autotune:
            on_gloo = mpi_backend.carrier(on_gpu=any(param.is_cuda for param in params)) == "gloo"
            by_threads = [context.new_group(set_id, threads) for threads in GLOO_THREADS] if on_gloo else []
            cap = cap_mb, self.bucket_cap_mb is not None
            reducer.tuner = StepTuner(
                reducer, TunedGroups(group, by_threads), device, context.engine, config, cap, pipes is not None
            )
        return reducer

    def _settings(self, config: Config) -> dict[str, Any]:
        """What must be the same on all ranks, besides the parameters."""
        return {
            "op": self.op.name,
            "gradient_predivide_factor": self.gradient_predivide_factor,
            "compression": getattr(self.compression, "__name__", type(self.compression).__name__),
            "backward_passes_per_step": self.passes,
            "groups": self.grouped,
            "sparse_as_dense": self.sparse_as_dense,
            "bucket_cap_mb": self.bucket_cap_mb,
            "shared_memory": self.shared_memory,
            "autotune": config.autotune and [config.autotune_steps_per_sample, config.autotune_max_samples],
        }
