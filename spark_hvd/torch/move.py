"""The collectives that move elements without computing, with Horovod's signatures, and barrier and join."""

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
from spark_hvd.context.join import join as stand_in
from spark_hvd.context.standing import speaks_horovod
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
        tensor: Any dtype. The first dimension may differ by rank, the others not. A 0-dim tensor counts as one row.
        name: Ranks match calls by name, in any order. None: such calls on a process set match by their order.
        process_set: The ranks that take part.
        grad_op: How the ranks' gradients become one: Sum (default), or Average as in Horovod.

    Raises:
        NotInitializedError: Before init().
        ValueError: The process set is not this rank's.
        MismatchError: dtypes, or dimensions after the first, differ. Raised on every rank; the world goes on.
        DuplicateNameError: A call of this rank by that name has not ended.
        StalledError: Some ranks did not call it within the stall timeout.
        CollectiveError: A peer or the network failed.
    """
    require_tensor(tensor)
    return apply(Allgather, [tensor], Call(name, process_set, gradients_by(grad_op)))[0]


@numbered
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> NamedHandle[torch.Tensor]:
    """Start an :func:`allgather`; the handle's wait() returns the new tensor. No gradient flows through it."""
    require_tensor(tensor)
    return start_allgather([tensor], name, process_set, single_result)


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    grad_op: ReduceOp | None = None,
) -> Tensors:
    """Apply :func:`allgather` to several tensors, as one unit."""
    require_tensors(tensors)
    return apply(Allgather, tensors, Call(name, process_set, gradients_by(grad_op))) if tensors else []


@numbered
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> NamedHandle[Tensors]:
    """Start a :func:`grouped_allgather`."""
    require_tensors(tensors)
    return start_allgather(tensors, name, process_set, all_results) if tensors else NamedHandle.ended([])


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    grad_op: ReduceOp | None = None,
) -> torch.Tensor:
    """Return a new tensor with the elements of the root's.

    Args:
        tensor: Any dtype; the same shape and dtype on every rank. Only the root's elements count.
        root_rank: Whose elements; a rank of the world, also with a process set.
        name: Ranks match calls by name, in any order. None: such calls on a process set match by their order.
        process_set: The ranks that take part.
        grad_op: How the ranks' gradients become the root's: Sum (default), or Average as in Horovod.

    Raises:
        ValueError: `root_rank` is not in the process set, or the process set is not this rank's.
        MismatchError: dtypes, shapes or roots differ. Raised on every rank; the world goes on.
        DuplicateNameError, StalledError, CollectiveError: See :func:`allgather`.
    """
    require_tensor(tensor)
    return apply(Broadcast, [tensor], Call(name, process_set, gradients_by(grad_op), root_rank=root_rank))[0]


@numbered
def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> NamedHandle[torch.Tensor]:
    """Start a :func:`broadcast`; the handle's wait() returns the new tensor. No gradient flows through it."""
    require_tensor(tensor)
    return start_broadcast([tensor], root_rank, name, process_set, single_result, in_place=False)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite a tensor with the root's, in place, and return it. See :func:`broadcast`."""
    require_tensor(tensor)
    return start_broadcast([tensor], root_rank, name, process_set, single_result, in_place=True, urgent=True).wait()


@numbered
def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> NamedHandle[torch.Tensor]:
    """Start to overwrite a tensor with the root's; it is not to be touched before the handle's wait()."""
    require_tensor(tensor)
    return start_broadcast([tensor], root_rank, name, process_set, single_result, in_place=True)


def alltoall(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send a share of my rows to each rank.

    Args:
        tensor: Any dtype, at least 1-dim. The first dimension may differ by rank, the others not.
        splits: How many rows go to each rank, as a list or an integer tensor; None: equal shares.
        name: Ranks match calls by name, in any order. None: such calls on a process set match by their order.
        process_set: The ranks that take part.

    Returns:
        The rows received, in rank order. If `splits` is given, also how many came from each rank (int32, on the CPU).

    Raises:
        ValueError: The process set is not this rank's, or `splits` is no tensor of whole numbers.
        MismatchError: dtypes, or dimensions after the first, differ, or splits do not fit. Raised on every rank.
        DuplicateNameError, StalledError, CollectiveError: See :func:`allgather`.
    """
    require_tensor(tensor)
    rows, counts = apply(Alltoall, [tensor], Call(name, process_set, splits=splits))
    return rows if splits is None else (rows, counts)


@numbered
def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> NamedHandle[tuple[torch.Tensor, torch.Tensor]]:
    """Start an :func:`alltoall`; wait() returns the rows received and, always, how many came from each rank."""
    require_tensor(tensor)
    return start_alltoall(tensor, splits, name, process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called this.

    Raises:
        NotInitializedError: Before init().
        CollectiveError: A peer or the network failed.
    """
    start_barrier(None, process_set).wait()


def join(device: int = -1, *, count_in_average: bool | None = None) -> int:
    """Say that this rank has no more data, and wait until every rank of the world has said so.

    Meanwhile the others' collectives go on without it: to Sum and Average it adds nothing, Min, Max and Product are
    those of the others, an allgather has no rows of it, a broadcast from another rank passes it by. Average divides by
    the number of ranks that still contribute. Each DistributedOptimizer of all ranks goes on without it in the same
    way; what this rank has accumulated for a step that it does not make is dropped.

    Args:
        device: Accepted for Horovod's sake: this rank stands in on its current GPU.
        count_in_average: Whether Average divides by this rank too, as in Horovod; None: in its dialect.

    Returns:
        The last rank that joined.

    Raises:
        NotInitializedError: Before init().
        CollectiveError: A peer or the network failed.
        AssertionError: Gradients of this rank are being reduced; call `step` or `synchronize` first.
    """
    return stand_in(counts=speaks_horovod() if count_in_average is None else count_in_average)
