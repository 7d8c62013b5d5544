"""The synchronous collectives that move elements without computing: allgather, broadcast, alltoall, and barrier."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spark_hvd.context import current
from spark_hvd.ops import require_tensor, require_tensors


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Concatenate all ranks' tensors along the first dimension, in rank order.

    Args:
        tensor: Any dtype. The first dimension may differ by rank, the others not. A 0-dim tensor counts as one row.
        name: Accepted for Horovod's sake. Calls are matched by their order, which must be the same on every rank.

    Raises:
        NotInitializedError: Before init().
        MismatchError: dtypes, or dimensions after the first, differ. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    communicator = current().communicator
    require_tensor(tensor)
    return communicator.allgather(tensor).wait()


def grouped_allgather(tensors: Sequence[torch.Tensor], name: str | None = None) -> list[torch.Tensor]:
    """Apply :func:`allgather` to each of several tensors."""
    communicator = current().communicator
    require_tensors(tensors)
    handles = [communicator.allgather(tensor) for tensor in tensors]
    return [handle.wait() for handle in handles]


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return a new tensor with the elements of the root's.

    Args:
        tensor: Any dtype; the same shape and dtype on every rank. Only the root's elements count.
        root_rank: Whose elements.
        name: Accepted for Horovod's sake. Calls are matched by their order, which must be the same on every rank.

    Raises:
        NotInitializedError: Before init().
        ValueError: `root_rank` is no rank.
        CollectiveError: A peer or the network failed.
    """
    communicator = current().communicator
    require_tensor(tensor)
    return communicator.broadcast(tensor.detach().clone(memory_format=torch.contiguous_format), root_rank).wait()


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite a tensor with the root's, in place, and return it. See :func:`broadcast`."""
    communicator = current().communicator
    require_tensor(tensor)
    return communicator.broadcast(tensor, root_rank).wait()


def alltoall(
    tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None = None, name: str | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send a share of my rows to each rank.

    Args:
        tensor: Any dtype, at least 1-dim. The first dimension may differ by rank, the others not.
        splits: How many rows go to each rank, as a list or an integer tensor; None: equal shares.
        name: Accepted for Horovod's sake. Calls are matched by their order, which must be the same on every rank.

    Returns:
        The rows received, in rank order. If `splits` is given, also how many came from each rank (int32, on the CPU).

    Raises:
        NotInitializedError: Before init().
        MismatchError: dtypes, or dimensions after the first, differ, or splits do not fit. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    communicator = current().communicator
    require_tensor(tensor)
    if splits is None:
        return communicator.alltoall(tensor).wait()[0]
    counts = splits.tolist() if isinstance(splits, torch.Tensor) else list(splits)
    received, received_splits = communicator.alltoall(tensor, counts).wait()
    return received, torch.tensor(received_splits, dtype=torch.int32)


def barrier() -> None:
    """Return when every rank has called this.

    Raises:
        NotInitializedError: Before init().
        CollectiveError: A peer or the network failed.
    """
    current().communicator.barrier().wait()
