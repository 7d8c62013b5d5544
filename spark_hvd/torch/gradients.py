"""Derivatives of the synchronous collectives, for the autograd of any framework.

Each rank's loss counts as one term of the sum of all ranks' losses. So the gradient of a collective's input is the sum,
over all ranks, of the gradients that the rank's results receive from its own loss. Horovod's dialect has other
derivatives: allreduce reduces gradients as it reduced tensors, reducescatter gathers them, and those of allgather and
broadcast are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
from spark_hvd.context.global_state import speaks_horovod
from spark_hvd.transport.communicator import ReduceOp

SUM = Reducing(ReduceOp.SUM)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a collective, except its tensors."""

    name: str | None
    process_set: ProcessSet
    reducing: Reducing = SUM
    compression: Any = Compression.none
    root_rank: int = 0
    splits: Sequence[int] | torch.Tensor | None = None

    def name_of(self, step: str) -> str | None:
        """Return a name for a collective of the backward pass."""
        return None if self.name is None else f"{self.name}.{step}"


class Derivable(Protocol):
    """A collective and its derivative; a tape keeps tensors from one to the other."""

    @staticmethod
    def forward(call: Call, tensors: Sequence[torch.Tensor], *, keep: bool) -> tuple[Tensors, Tensors]:
        """Return the results, and, with ``keep``, what the derivative needs."""

    @staticmethod
    def backward(call: Call, kept: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Tensors:
        """Return gradients of the tensors, with as many elements but of any shape, from those of the results."""


class Allreduce:
    """Reduces tensors into new ones."""

    @staticmethod
    def forward(call: Call, tensors: Sequence[torch.Tensor], *, keep: bool) -> tuple[Tensors, Tensors]:
        """See Derivable."""
        results = compressed_allreduce(tensors, call.name, call.reducing, call.process_set, call.compression)
        return results, [] if reduced_alike(call) else list(tensors)

    @staticmethod
    def backward(call: Call, kept: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Tensors:
        """See Derivable."""
        if reduced_alike(call):
            return _total(call, grads, call.reducing)
        return _through_nonlinear(call, kept, _total(call, grads, SUM))


class ReduceScatter:
    """Reduces tensors, of which each rank keeps its share of rows."""

    @staticmethod
    def forward(call: Call, tensors: Sequence[torch.Tensor], *, keep: bool) -> tuple[Tensors, Tensors]:
        """See Derivable."""
        results = compressed_reducescatter(tensors, call.name, call.reducing, call.process_set, call.compression)
        return results, [] if reduced_alike(call) else list(tensors)

    @staticmethod
    def backward(call: Call, kept: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Tensors:
        """See Derivable."""
        totals = start_allgather(grads, call.name_of("gradient"), call.process_set, all_results, urgent=True).wait()
        if not reduced_alike(call):
            return _through_nonlinear(call, kept, totals)
        reducing, size = call.reducing, len(queue_of(call.process_set).ranks)
        factor = reducing.prescale * reducing.postscale / (size if reducing.op is ReduceOp.AVERAGE else 1)
        return [total * (factor * size if speaks_horovod() else factor) for total in totals]


class Allgather:
    """Concatenates tensors over the ranks; `call.reducing` says how their gradients are reduced."""

    @staticmethod
    def forward(call: Call, tensors: Sequence[torch.Tensor], *, keep: bool) -> tuple[Tensors, Tensors]:
        """See Derivable. It keeps the number of rows of each tensor, by rank."""
        if not keep:
            return start_allgather(tensors, call.name, call.process_set, all_results, urgent=True).wait(), []
        counts = torch.tensor([tensor.shape[0] if tensor.dim() else 1 for tensor in tensors], device="cpu")
        results = start_allgather([counts, *tensors], call.name, call.process_set, all_results, urgent=True).wait()
        return results[1:], [results[0].view(-1, len(tensors)).t().contiguous()]

    @staticmethod
    def backward(call: Call, kept: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Tensors:
        """See Derivable."""
        results = []
        for number, (grad, rows) in enumerate(zip(grads, kept[0].tolist(), strict=True)):
            # Every rank sends each rank the gradients of its rows, half of what an all-reduce would move.
            name = call.name_of(f"gradient.{number}")
            parts, counts = start_alltoall(grad, rows, name, call.process_set, urgent=True).wait()
            total = parts.view(len(rows), int(counts[0]), *grad.shape[1:]).sum(0)
            results.append(total / len(rows) if call.reducing.op is ReduceOp.AVERAGE else total)
        return results


class Broadcast:
    """Sends the root's tensor; `call.reducing` says how its gradients are reduced."""

    @staticmethod
    def forward(call: Call, tensors: Sequence[torch.Tensor], *, keep: bool) -> tuple[Tensors, Tensors]:
        """See Derivable."""
        handle = start_broadcast(
            tensors, call.root_rank, call.name, call.process_set, all_results, in_place=False, urgent=True
        )
        return handle.wait(), []

    @staticmethod
    def backward(call: Call, kept: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Tensors:
        """See Derivable."""
        totals = _total(call, grads, call.reducing)
        queue = queue_of(call.process_set)
        is_root = queue.ranks[queue.communicator.rank] == call.root_rank
        return totals if is_root else [torch.zeros_like(total) for total in totals]


class Alltoall:
    """Sends rows of one tensor; returns the rows received, and how many came from each rank."""

    @staticmethod
    def forward(call: Call, tensors: Sequence[torch.Tensor], *, keep: bool) -> tuple[Tensors, Tensors]:
        """See Derivable."""
        (tensor,) = tensors
        rows, counts = start_alltoall(tensor, call.splits, call.name, call.process_set, urgent=True).wait()
        return [rows, counts], [counts]

    @staticmethod
    def backward(call: Call, kept: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Tensors:
        """See Derivable. The counts have no gradient."""
        back, _ = start_alltoall(grads[0], kept[0], call.name_of("gradient"), call.process_set, urgent=True).wait()
        return [back]


def apply(kind: type[Derivable], tensors: Sequence[torch.Tensor], call: Call) -> Tensors:
    """Run a collective on tensors; gradients flow through it where they are required."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(_Applied.apply(kind, call, *tensors))  # type: ignore[no-untyped-call]
    return kind.forward(call, tensors, keep=False)[0]


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: type[Derivable], call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, kept = kind.forward(call, tensors, keep=True)
        ctx.kind, ctx.call, ctx.shapes = kind, call, [tensor.shape for tensor in tensors]
        # Counts are kept outside of save_for_backward, which the first backward frees: the results of a group may each
        # get a backward of their own.
        ctx.counts = None if any(each.is_floating_point() or each.is_complex() for each in kept) else kept
        if ctx.counts is None:
            ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(*(each for each in results if not (each.is_floating_point() or each.is_complex())))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = ctx.kind.backward(ctx.call, ctx.saved_tensors if ctx.counts is None else ctx.counts, grads)
        return None, None, *(grad.view(shape) for grad, shape in zip(gradients, ctx.shapes, strict=True))


def gradients_by(op: ReduceOp | None) -> Reducing:
    """Return how the gradients of allgather and broadcast are reduced, given `grad_op`; None: the dialect decides.

    Raises:
        ValueError: `op` is neither Sum nor Average.
    """
    if op is None:
        op = ReduceOp.AVERAGE if speaks_horovod() else ReduceOp.SUM
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ValueError(f"grad_op={op!r}: gradients can be reduced with Sum or Average.")
    return Reducing(op)


def reduced_alike(call: Call) -> bool:
    """Return whether gradients are reduced like the tensors, so that no tensors are kept; true in Horovod's dialect."""
    return call.reducing.op in (ReduceOp.SUM, ReduceOp.AVERAGE) or speaks_horovod()


def _total(call: Call, grads: Sequence[torch.Tensor], reducing: Reducing) -> Tensors:
    """Reduce gradients over the ranks."""
    return compressed_allreduce(grads, call.name_of("gradient"), reducing, call.process_set, Compression.none)


def _through_nonlinear(call: Call, inputs: Sequence[torch.Tensor], totals: Sequence[torch.Tensor]) -> Tensors:
    """Return the gradients of Min, Max and Product, which are not linear: every rank needs all ranks' inputs."""
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
