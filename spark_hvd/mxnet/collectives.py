"""The collectives with Horovod's signatures for MXNet: each returns when it is done, and none has a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mxnet
import torch

from spark_hvd.collectives.execution import all_results
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.collectives.start import (
    Reducing,
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)
from spark_hvd.mxnet.arrays import change, require_arrays, to_mxnet, to_torch
from spark_hvd.torch.reduce import chosen_op
from spark_hvd.transport.communicator import ReduceOp

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> Any:
    """Reduce an array over all ranks into a new array.

    Args:
        tensor: ``mx.nd.NDArray`` or ``mx.np.ndarray`` on a CPU, of the same shape and dtype on every rank.
        average: Deprecated: use `op`.
        name: Ranks match calls by name, in any order. None: such calls on a process set match by their order.
        priority: Accepted for Horovod's sake; has no effect, as every call returns when it is done.
        prescale_factor: Multiplies each rank's array before the reduction; integers are truncated toward zero.
        postscale_factor: Multiplies the result.
        process_set: The ranks to reduce over.
        op: Average (default), Sum, Min, Max, Product or Adasum.

    Raises:
        NotInitializedError: Before init().
        TypeError: `tensor` is not a dense array on a CPU, or the reduction does not support its dtype.
        ValueError: `op` and `average` are both given, or this rank is not in the process set.
        MismatchError: Ranks made different calls under this name. Raised on every rank; the world stays usable.
        StalledError: Some ranks did not call it within the stall timeout.
        CollectiveError: A peer or the network failed.
    """
    return grouped_allreduce(
        [tensor], average, name, priority, prescale_factor, postscale_factor, process_set, op
    )[0]  # fmt: skip


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> Any:
    """Reduce an array over all ranks in place, and return it. See :func:`allreduce`."""
    grouped_allreduce_([tensor], average, name, priority, prescale_factor, postscale_factor, process_set, op)
    return tensor


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> list[Any]:
    """Reduce several arrays as one unit, fused by dtype, into new ones. See :func:`allreduce`."""
    reducing = Reducing(chosen_op(op, average), prescale_factor, postscale_factor)

    def reduced(given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        handle = start_allreduce(given, name, reducing, process_set, all_results, in_place=False, urgent=True)
        return handle.wait()

    return _made(tensors, reduced)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> Sequence[Any]:
    """Reduce several arrays as one unit in place, and return them. See :func:`allreduce`."""
    reducing = Reducing(chosen_op(op, average), prescale_factor, postscale_factor)
    require_arrays(tensors)
    if tensors:
        change(
            tensors,
            lambda given: start_allreduce(
                given, name, reducing, process_set, all_results, in_place=True, urgent=True
            ).wait(),
        )
    return tensors


def allgather(
    tensor: Any, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate all ranks' arrays along the first dimension, which may differ in size, in rank order.

    The arguments are those of :func:`allreduce`.

    Raises:
        MismatchError: Dtypes, or dimensions after the first, differ. Raised on every rank; the world stays usable.
        NotInitializedError, TypeError, ValueError, StalledError, CollectiveError: See :func:`allreduce`.
    """
    return grouped_allgather([tensor], name, priority, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Apply :func:`allgather` to several arrays, as one unit."""
    return _made(
        tensors, lambda given: start_allgather(given, name, process_set, all_results, urgent=True).wait()
    )  # fmt: skip


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return a new array with the elements of the root's array; the same shape and dtype on every rank.

    Args:
        tensor: Only the root's elements count.
        root_rank: The root, as a rank of the world, even with a process set.
        name: As for :func:`allreduce`.
        priority: As for :func:`allreduce`.
        process_set: The ranks that take part.

    Raises:
        ValueError: `root_rank` or this rank is not in the process set.
        NotInitializedError, TypeError, MismatchError, StalledError, CollectiveError: See :func:`allreduce`.
    """
    return _made([tensor], lambda given: broadcasts(given, root_rank, name, process_set, in_place=False))[0]


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrite an array with the root's, and return it. See :func:`broadcast`."""
    require_arrays([tensor])
    change([tensor], lambda given: broadcasts(given, root_rank, name, process_set, in_place=True))
    return tensor


def broadcasts(
    tensors: Sequence[torch.Tensor], root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool
) -> Sequence[torch.Tensor]:
    """Return the root's tensors, in the given ones or in new ones."""
    return start_broadcast(
        tensors, root_rank, name, process_set, all_results, in_place=in_place, urgent=True
    ).wait()  # fmt: skip


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to every rank, and receive rows from every rank.

    Args:
        tensor: Its rows go to the ranks in rank order; dimensions after the first are the same on every rank.
        splits: Number of rows for each rank, as an array of whole numbers or a list; None for equal shares.
        name: As for :func:`allreduce`.
        priority: As for :func:`allreduce`.
        process_set: The ranks that take part.

    Returns:
        The rows received, in rank order. If `splits` is given, also the number from each rank (int32).

    Raises:
        NotInitializedError, TypeError, ValueError, MismatchError, StalledError, CollectiveError: See :func:`allreduce`.
    """
    counts = to_torch(splits) if isinstance(splits, mxnet.nd.NDArray) else splits
    rows = _made([tensor], lambda given: start_alltoall(given[0], counts, name, process_set, urgent=True).wait())
    return rows[0] if splits is None else tuple(rows)


def reducescatter(
    tensor: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce an array over all ranks and return this rank's share of its rows; the first ranks may get one more row.

    The arguments and errors are those of :func:`allreduce`; Adasum raises a ValueError.
    """
    return grouped_reducescatter([tensor], op, name, priority, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Apply :func:`reducescatter` to several arrays, as one unit."""
    reducing = Reducing(chosen_op(op, None), prescale_factor, postscale_factor)
    return _made(
        tensors, lambda given: start_reducescatter(given, name, reducing, process_set, all_results, urgent=True).wait()
    )


def _made(tensors: Sequence[Any], function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]) -> list[Any]:
    """Apply a function of torch tensors to arrays, and return its results as new arrays."""
    require_arrays(tensors)
    if not tensors:
        return []
    results = function([to_torch(tensor) for tensor in tensors])
    return [to_mxnet(result, tensors[0]) for result in results]
