"""The collectives that move elements without computing, barrier and join, with Horovod's signatures."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spark_hvd.collectives.execution import all_results, single_result
from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.collectives.start import (
    require_tensor,
    require_tensors,
    start_allgather,
    start_alltoall,
    start_barrier,
    start_broadcast,
)
from spark_hvd.context.global_state import speaks_horovod
from spark_hvd.context.join import join as shadow_others
from spark_hvd.torch.gradients import Allgather, Alltoall, Broadcast, Call, apply, gradients_by
from spark_hvd.torch.handles import numbered
from spark_hvd.transport.communicator import ReduceOp

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "join",
]

Tensors = list[torch.Tensor]
Splits = Sequence[int] | torch.Tensor


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    grad_op: ReduceOp | None = None,
) -> torch.Tensor:
    """Concatenate all ranks' tensors along the first dimension, in rank order.

    Args:
        tensor: Any dtype. Only the first dimension may differ by rank. A 0-dim tensor counts as one row.
        name: Ranks match calls by name, in any order. Calls without a name match by their order on a process set.
        process_set: The ranks that take part.
        grad_op: How gradients are reduced: Sum (default), or Average as in Horovod.

    Raises:
        NotInitializedError: Before init().
        ValueError: This rank is not in the process set.
        MismatchError: dtypes, or dimensions after the first, differ. Raised on every rank; the world stays usable.
        DuplicateNameError: A call of this rank under this name has not ended.
        StalledError: Some ranks did not call it within the stall timeout.
        CollectiveError: A peer or the network failed.
    """
    require_tensor(tensor)
    return apply(Allgather, [tensor], Call(name, process_set, gradients_by(grad_op)))[0]


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> NamedHandle[torch.Tensor]:
    """Start an :func:`allgather`; the handle's wait() returns the new tensor. Not differentiable."""
    require_tensor(tensor)
    return numbered(start_allgather([tensor], name, process_set, single_result))


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    grad_op: ReduceOp | None = None,
) -> Tensors:
    """Apply :func:`allgather` to several tensors together."""
    require_tensors(tensors)
    return apply(Allgather, tensors, Call(name, process_set, gradients_by(grad_op))) if tensors else []


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> NamedHandle[Tensors]:
    """Start a :func:`grouped_allgather`."""
    require_tensors(tensors)
    return numbered(start_allgather(tensors, name, process_set, all_results) if tensors else NamedHandle.ended([]))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    grad_op: ReduceOp | None = None,
) -> torch.Tensor:
    """Return a new tensor with the elements of the root's tensor.

    Args:
        tensor: Any dtype; the same shape and dtype on every rank. Only the root's elements count.
        root_rank: The root, as a rank of the world, also with a process set.
        name: Ranks match calls by name, in any order. Calls without a name match by their order on a process set.
        process_set: The ranks that take part.
        grad_op: How gradients are reduced to the root's: Sum (default), or Average as in Horovod.

    Raises:
        ValueError: `root_rank` or this rank is not in the process set.
        MismatchError: dtypes, shapes or roots differ. Raised on every rank; the world stays usable.
        DuplicateNameError, StalledError, CollectiveError: See :func:`allgather`.
    """
    require_tensor(tensor)
    return apply(Broadcast, [tensor], Call(name, process_set, gradients_by(grad_op), root_rank=root_rank))[0]


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> NamedHandle[torch.Tensor]:
    """Start a :func:`broadcast`; the handle's wait() returns the new tensor. Not differentiable."""
    require_tensor(tensor)
    return numbered(start_broadcast([tensor], root_rank, name, process_set, single_result, in_place=False))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite a tensor with the root's, in place, and return it. See :func:`broadcast`."""
    require_tensor(tensor)
    return start_broadcast([tensor], root_rank, name, process_set, single_result, in_place=True, urgent=True).wait()


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> NamedHandle[torch.Tensor]:
    """Start to overwrite a tensor with the root's; do not use it before the handle's wait()."""
    require_tensor(tensor)
    return numbered(start_broadcast([tensor], root_rank, name, process_set, single_result, in_place=True))


def alltoall(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send a share of this rank's rows to each rank.

    Args:
        tensor: Any dtype, at least 1-dim. Only the first dimension may differ by rank.
        splits: Number of rows for each rank, as a list or an integer tensor; None for equal shares.
        name: Ranks match calls by name, in any order. Calls without a name match by their order on a process set.
        process_set: The ranks that take part.

    Returns:
        The rows received, in rank order. If `splits` is given, also the number from each rank (int32, on the CPU).

    Raises:
        ValueError: This rank is not in the process set, or `splits` does not consist of whole numbers.
        MismatchError: dtypes, or dimensions after the first, differ, or splits do not fit. Raised on every rank.
        DuplicateNameError, StalledError, CollectiveError: See :func:`allgather`.
    """
    require_tensor(tensor)
    rows, counts = apply(Alltoall, [tensor], Call(name, process_set, splits=splits))
    return rows if splits is None else (rows, counts)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> NamedHandle[tuple[torch.Tensor, torch.Tensor]]:
    """Start an :func:`alltoall`; wait() always returns both the rows received and the number from each rank."""
    require_tensor(tensor)
    return numbered(start_alltoall(tensor, splits, name, process_set))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called this.

    Raises:
        NotInitializedError: Before init().
        CollectiveError: A peer or the network failed.
    """
    start_barrier(process_set).wait()


def join(device: int = -1, *, count_in_average: bool | None = None) -> int:
    """Announce that this rank has no more data, and wait until every rank of the world has done so.

    Meanwhile the collectives of the others continue without this rank. It contributes nothing to a reduction and no
    rows to an allgather, and gets nothing from a broadcast. Average divides by the number of ranks that still
    contribute. DistributedOptimizers treat it in the same way; gradients that this rank has accumulated for a step it
    never makes are dropped.

    Args:
        device: Accepted for Horovod's sake. This rank uses its current GPU.
        count_in_average: Whether Average counts this rank in its divisor, as Horovod does; None: only in Horovod's
            dialect.

    Returns:
        The last rank that joined.

    Raises:
        NotInitializedError: Before init().
        CollectiveError: A peer or the network failed.
        AssertionError: Gradients of this rank are being reduced; call `step` or `synchronize` first.
    """
    return shadow_others(counts=speaks_horovod() if count_in_average is None else count_in_average)
