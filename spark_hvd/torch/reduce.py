"""The collectives that compute, with Horovod's signatures: allreduce, also of sparse tensors, and reducescatter."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.execution import Work, all_results, single_result
from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.process_set import ProcessSet, global_process_set, queue_of
from spark_hvd.collectives.start import (
    Reducing,
    require_tensor,
    require_tensors,
    start_allgather,
    start_allreduce,
    start_reducescatter,
)
from spark_hvd.torch.gradients import Allreduce, Call, ReduceScatter, apply
from spark_hvd.torch.handles import numbered
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.world.errors import MismatchError

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]

Tensors = list[torch.Tensor]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks into a new tensor.

    It is differentiable: gradients of Average and Sum are reduced in the same way; those of Min and Max go to the ranks
    that hold the extreme, in equal parts; that of Product is the product of the others. Adasum has no derivative.

    Args:
        tensor: The same shape and dtype on every rank; any stride.
        average: Deprecated: use `op`.
        name: Ranks match calls by name, in any order. Calls without a name match by their order on a process set.
        compression: Compression.none, .fp16, .bf16, or an object with their two methods.
        op: Average (default), Sum, Min, Max, Product or Adasum. An integer Average truncates toward zero. On bool, Sum
            and Max are any, Min and Product are all.
        prescale_factor: Multiplies each rank's tensor before the reduction; integers are truncated toward zero.
        postscale_factor: Multiplies the result.
        process_set: The ranks to reduce over.

    Raises:
        NotInitializedError: Before init().
        TypeError: The reduction does not support this dtype.
        ValueError: `op` and `average` are both given, or this rank is not in the process set.
        MismatchError: Ranks made different calls under this name. Raised on every rank; the world stays usable.
        DuplicateNameError: A call of this rank under this name has not ended.
        StalledError: Some ranks did not call it within the stall timeout.
        CollectiveError: A peer or the network failed.
    """
    reducing = Reducing(chosen_op(op, average), prescale_factor, postscale_factor)
    require_tensor(tensor)
    return apply(Allreduce, [tensor], Call(name, process_set, reducing, compression))[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> NamedHandle[torch.Tensor]:
    """Start an :func:`allreduce`. The handle's wait() returns the new tensor; `tensor` must not change until then.

    Asynchronous calls are not differentiable.
    """
    return numbered(_start(tensor, average, name, op, prescale_factor, postscale_factor, process_set, in_place=False))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks in place, and return it. Not differentiable. See :func:`allreduce`."""
    return _start(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set, in_place=True, urgent=True
    ).wait()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> NamedHandle[torch.Tensor]:
    """Start to reduce a tensor in place; do not use it before the handle's wait(). See :func:`allreduce`."""
    return numbered(_start(tensor, average, name, op, prescale_factor, postscale_factor, process_set, in_place=True))


def _start(
    tensor: torch.Tensor,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    in_place: bool,
    urgent: bool = False,
) -> NamedHandle[torch.Tensor]:
    if average is None:  # a repeated call with this name was checked before
        given = ReduceOp.AVERAGE if op is None else op, prescale, postscale
        queue = queue_of(process_set)
        handle = queue.again("allreduce", name, tensor, given, single_result, in_place=in_place, urgent=urgent)
        if handle is not None:
            return handle
    reducing = Reducing(chosen_op(op, average, 4), prescale, postscale)
    require_tensor(tensor)
    return start_allreduce([tensor], name, reducing, process_set, single_result, in_place=in_place, urgent=urgent)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensors:
    """Reduce several tensors together, fused by dtype, into new ones. See :func:`allreduce`."""
    reducing = Reducing(chosen_op(op, average), prescale_factor, postscale_factor)
    require_tensors(tensors)
    return apply(Allreduce, tensors, Call(name, process_set, reducing, compression)) if tensors else []


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> NamedHandle[Tensors]:
    """Start to reduce several tensors together into new ones. See :func:`allreduce_async`."""
    reducing = Reducing(chosen_op(op, average), prescale_factor, postscale_factor)
    require_tensors(tensors)
    if not tensors:
        return numbered(NamedHandle.ended([]))
    return numbered(start_allreduce(tensors, name, reducing, process_set, all_results, in_place=False))


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensors:
    """Reduce several tensors together in place, and return them. See :func:`allreduce_`."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return handle.wait()


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> NamedHandle[Tensors]:
    """Start to reduce several tensors together in place. See :func:`allreduce_async_`."""
    reducing = Reducing(chosen_op(op, average), prescale_factor, postscale_factor)
    require_tensors(tensors)
    if not tensors:
        return numbered(NamedHandle.ended([]))
    return numbered(start_allreduce(tensors, name, reducing, process_set, all_results, in_place=True))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks and return this rank's share of its rows.

    Rows are divided in rank order; the first ``rows % size`` ranks get one more than the others. Arguments and errors
    are those of :func:`allreduce`. A 0-dim tensor or Adasum raises a ValueError.
    """
    reducing = Reducing(chosen_op(op, None), prescale_factor, postscale_factor)
    require_tensor(tensor)
    return apply(ReduceScatter, [tensor], Call(name, process_set, reducing, compression))[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NamedHandle[torch.Tensor]:
    """Start a :func:`reducescatter`; the handle's wait() returns this rank's share."""
    reducing = Reducing(chosen_op(op, None), prescale_factor, postscale_factor)
    require_tensor(tensor)
    return numbered(start_reducescatter([tensor], name, reducing, process_set, single_result))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensors:
    """Apply :func:`reducescatter` to several tensors together."""
    reducing = Reducing(chosen_op(op, None), prescale_factor, postscale_factor)
    require_tensors(tensors)
    return apply(ReduceScatter, tensors, Call(name, process_set, reducing, compression)) if tensors else []


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NamedHandle[Tensors]:
    """Start a :func:`grouped_reducescatter`."""
    reducing = Reducing(chosen_op(op, None), prescale_factor, postscale_factor)
    require_tensors(tensors)
    return numbered(
        start_reducescatter(tensors, name, reducing, process_set, all_results) if tensors else NamedHandle.ended([])
    )


def chosen_op(op: ReduceOp | None, average: bool | None, stacklevel: int = 3) -> ReduceOp:
    """Return the reduction that Horovod's two arguments select; ``stacklevel`` is that of a deprecation warning.

    Raises:
        ValueError: both are given, or `op` is not a reduction.
    """
    if average is not None:
        if op is not None:
            raise ValueError(f"op={op} and average={average} are both given; pass op alone.")
        warnings.warn("average= is deprecated; pass op=Average or op=Sum.", DeprecationWarning, stacklevel=stacklevel)
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return ReduceOp.AVERAGE
    if not isinstance(op, ReduceOp):
        raise ValueError(f"op={op!r} is not a reduction; pass Average, Sum, Min, Max, Product or Adasum.")
    return op


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> NamedHandle[torch.Tensor]:
    """Start to sum sparse tensors of all ranks.

    Args:
        tensor: A sparse COO tensor of the same shape and dtype on every rank; its elements may differ by rank.
        name: Ranks match calls by name, in any order. Calls without a name match by their order.
        op: Average or Sum.
        process_set: The ranks that take part.

    Returns:
        A handle. Its wait() returns a coalesced sparse tensor; calling the handle does the same, as in Horovod.

    Raises:
        TypeError: `tensor` is not sparse.
        ValueError: `op` is another reduction, or this rank is not in the process set.
        MismatchError, DuplicateNameError, CollectiveError: See :func:`spark_hvd.torch.move.allgather`.
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.is_sparse:
        kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"expected a sparse COO tensor, got {kind}; use allreduce_async for dense tensors.")
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"op={op!r}: sparse tensors can be reduced with Average or Sum.")
    mine = tensor.detach().coalesce()
    shape = torch.tensor([mine.shape], device=mine.device)

    def result(work: Work) -> torch.Tensor:
        indices, values, shapes = work.results
        if not bool((shapes == shape).all()):
            raise MismatchError(
                f"sparse_allreduce of tensors of different shapes: {sorted(map(tuple, shapes.tolist()))}."
            )
        if op is ReduceOp.AVERAGE:
            values = values / shapes.shape[0]  # divides by the number of ranks that contributed
        # Coalescing adds up elements that several ranks have.
        return torch.sparse_coo_tensor(indices.t(), values, mine.shape, check_invariants=False).coalesce()

    return start_allgather([mine.indices().t().contiguous(), mine.values(), shape], name, process_set, result)
