"""Derivatives of the synchronous collectives.

Each rank's loss is taken as a part of the sum of all ranks' losses: the gradient of a collective's input is the sum
over ranks of what each rank's results contribute to its own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.execution import all_results
from spark_hvd.collectives.process_set import ProcessSet, queue_of
from spark_hvd.collectives.start import (
    Reducing,
    Tensors,
    compressed_allreduce,
    compressed_reducescatter,
    start_allgather,
    start_alltoall,
    start_broadcast,
)
from spark_hvd.transport.communicator import ReduceOp

Forward = Callable[[Sequence[torch.Tensor]], Tensors]


SUM = Reducing(ReduceOp.SUM)


@dataclass(frozen=True, slots=True)
class Call:
    """What a collective was called with, tensors aside."""

    name: str | None
    process_set: ProcessSet
    reducing: Reducing = SUM
    compression: Any = Compression.none
    root_rank: int = 0
    splits: Sequence[int] | torch.Tensor | None = None

    def name_of(self, step: str) -> str | None:
        """A name for a collective of the backward pass."""
        return None if self.name is None else f"{self.name}.{step}"


def allreduce(tensors: Sequence[torch.Tensor], call: Call) -> Tensors:
    """Reduce tensors into new ones."""
    if _wanted(tensors):
        return list(_Allreduce.apply(call, *tensors))  # type: ignore[no-untyped-call]
    return compressed_allreduce(tensors, call.name, call.reducing, call.process_set, call.compression)


def reducescatter(tensors: Sequence[torch.Tensor], call: Call) -> Tensors:
    """Reduce tensors and keep my share of the rows."""
    if _wanted(tensors):
        return list(_ReduceScatter.apply(call, *tensors))  # type: ignore[no-untyped-call]
    return compressed_reducescatter(tensors, call.name, call.reducing, call.process_set, call.compression)


def allgather(tensors: Sequence[torch.Tensor], call: Call) -> Tensors:
    """Concatenate tensors over the ranks; `call.reducing` says how their gradients are reduced."""
    if _wanted(tensors):
        return list(_Allgather.apply(call, *tensors))  # type: ignore[no-untyped-call]
    return start_allgather(tensors, call.name, call.process_set, all_results, urgent=True).wait()


def broadcast(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """The root's tensor; `call.reducing` says how its gradients are reduced."""
    if _wanted([tensor]):
        result: torch.Tensor = _Broadcast.apply(call, tensor)  # type: ignore[no-untyped-call]
        return result
    return _broadcast(tensor, call)


def alltoall(tensor: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows received, and how many came from each rank."""
    if _wanted([tensor]):
        rows, counts = _Alltoall.apply(call, tensor)  # type: ignore[no-untyped-call]
        return rows, counts
    return start_alltoall(tensor, call.splits, call.name, call.process_set, urgent=True).wait()


def _wanted(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _broadcast(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    handle = start_broadcast(
        [tensor], call.root_rank, call.name, call.process_set, all_results, in_place=False, urgent=True
    )
    return handle.wait()[0]


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        if call.reducing.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            ctx.save_for_backward(*tensors)
        return tuple(compressed_allreduce(tensors, call.name, call.reducing, call.process_set, call.compression))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call = ctx.call
        if call.reducing.op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            return None, *_total(call, grads, call.reducing)
        totals = _total(call, grads, SUM)
        return None, *_through_extremes(call, ctx.saved_tensors, totals)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        if call.reducing.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            ctx.save_for_backward(*tensors)
        return tuple(compressed_reducescatter(tensors, call.name, call.reducing, call.process_set, call.compression))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call = ctx.call
        totals = start_allgather(grads, call.name_of("gradient"), call.process_set, all_results, urgent=True).wait()
        reducing = call.reducing
        if reducing.op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            size = len(queue_of(call.process_set).ranks) if reducing.op is ReduceOp.AVERAGE else 1
            return None, *(total * (reducing.prescale * reducing.postscale / size) for total in totals)
        return None, *_through_extremes(call, ctx.saved_tensors, totals)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.shapes = [tensor.shape for tensor in tensors]
        queue = queue_of(call.process_set)
        counts = torch.tensor([tensor.shape[0] if tensor.dim() else 1 for tensor in tensors])
        results = start_allgather([counts, *tensors], call.name, call.process_set, all_results, urgent=True).wait()
        ctx.rows = results[0].view(len(queue.ranks), len(tensors)).t().tolist()
        return tuple(results[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call = ctx.call
        results: list[torch.Tensor | None] = [None]
        for number, (grad, rows, shape) in enumerate(zip(grads, ctx.rows, ctx.shapes, strict=True)):
            # Every rank sends each rank what belongs to its rows, half of what an all-reduce would move.
            name = call.name_of(f"gradient.{number}")
            parts, _ = start_alltoall(grad, rows, name, call.process_set, urgent=True).wait()
            total = parts.view(len(rows), *(shape or [1])).sum(0).view(shape)
            results.append(total / len(rows) if call.reducing.op is ReduceOp.AVERAGE else total)
        return tuple(results)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, tensor: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return _broadcast(tensor, call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        call = ctx.call
        (total,) = _total(call, [grad], call.reducing)
        queue = queue_of(call.process_set)
        is_root = queue.ranks[queue.communicator.rank] == call.root_rank
        return None, total if is_root else torch.zeros_like(total)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.call = call
        rows, counts = start_alltoall(tensor, call.splits, call.name, call.process_set, urgent=True).wait()
        ctx.counts = counts
        ctx.mark_non_differentiable(counts)
        return rows, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[None, torch.Tensor]:
        call = ctx.call
        back, _ = start_alltoall(grad, ctx.counts, call.name_of("gradient"), call.process_set, urgent=True).wait()
        return None, back


def _total(call: Call, grads: Sequence[torch.Tensor], reducing: Reducing) -> Tensors:
    return compressed_allreduce(grads, call.name_of("gradient"), reducing, call.process_set, Compression.none)


def _through_extremes(call: Call, inputs: Sequence[torch.Tensor], totals: Sequence[torch.Tensor]) -> Tensors:
    """Derivatives of Min, Max and Product, for which every rank needs everyone's inputs."""
    reducing = call.reducing
    if reducing.op is ReduceOp.ADASUM:
        raise NotImplementedError("op=Adasum has no derivative; call it on detached tensors.")
    queue = queue_of(call.process_set)
    rows = [tensor.unsqueeze(0) for tensor in inputs]
    gathered = start_allgather(rows, call.name_of("inputs"), call.process_set, all_results, urgent=True).wait()
    results = []
    for tensor, total in zip(gathered, totals, strict=True):
        with torch.enable_grad():
            x = tensor.requires_grad_()
            scaled = x * reducing.prescale
            if reducing.op is ReduceOp.PRODUCT:
                y = scaled.prod(0)
            else:
                y = scaled.amin(0) if reducing.op is ReduceOp.MIN else scaled.amax(0)
            (grad,) = torch.autograd.grad(y * reducing.postscale, x, total)
        results.append(grad[queue.communicator.rank])
    return results
