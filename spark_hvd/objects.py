"""Python objects between ranks: pickled, and sent as bytes over the CPU's process group."""

from __future__ import annotations

import io
import pickle
from typing import Any, TypeVar

import cloudpickle
import torch

from spark_hvd.context import current
from spark_hvd.shapes import require_root

T = TypeVar("T")

_LENGTH_BYTES = 8
_FAILED = -1


def broadcast_object(obj: T, root_rank: int = 0, name: str | None = None) -> T:
    """Give every rank the object of one rank.

    The pickle travels over the process group's own connections, from rank to rank, and is loaded by the others: ranks
    trust each other, as they run the same program. Its size is not limited but by memory.

    Args:
        obj: Anything cloudpickle can pickle; ignored on ranks other than `root_rank`.
        root_rank: Whose object it is.
        name: Accepted for Horovod's sake; calls are matched by their order.

    Returns:
        On `root_rank` the object itself, elsewhere a copy.

    Raises:
        ValueError: `root_rank` is no rank, or the object there cannot be pickled.
        CollectiveError: A peer or the network failed.
    """
    communicator = current().communicator
    require_root(root_rank, communicator.size)
    if communicator.size == 1:
        return obj
    device = communicator.fact_device
    payload, failure = _pickled(obj) if communicator.rank == root_rank else (torch.empty(0, dtype=torch.uint8), None)
    length = torch.tensor([_FAILED if failure else payload.numel()], dtype=torch.int64, device=device)
    communicator.broadcast(length, root_rank).wait()
    count = int(length)
    if failure is not None:
        raise _unpicklable("broadcast_object", root_rank) from failure
    if count == _FAILED:
        raise _unpicklable("broadcast_object", root_rank)
    if communicator.rank != root_rank:
        payload = torch.empty(count, dtype=torch.uint8)
    payload = communicator.broadcast(payload.to(device), root_rank).wait()
    return obj if communicator.rank == root_rank else _loaded(payload)


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Give every rank the objects of all ranks.

    The pickles travel as in :func:`broadcast_object`.

    Args:
        obj: Anything cloudpickle can pickle.
        name: Accepted for Horovod's sake; calls are matched by their order.

    Returns:
        Copies of the objects, in rank order.

    Raises:
        ValueError: A rank's object cannot be pickled. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    communicator = current().communicator
    payload, failure = _pickled(obj)
    length = torch.tensor([_FAILED if failure else payload.numel()], dtype=torch.int64)
    # Each pickle is led by its own length, so that one exchange of sizes, the allgather's, is enough.
    led = torch.cat([length.view(torch.uint8), payload])
    everyones = communicator.allgather(led.to(communicator.fact_device)).wait().cpu()
    values: list[T] = []
    start = 0
    for rank in range(communicator.size):
        end = start + _LENGTH_BYTES
        count = int(everyones[start:end].clone().view(torch.int64))
        if count == _FAILED:
            raise _unpicklable("allgather_object", rank) from failure
        values.append(_loaded(everyones[end : end + count]))
        start = end + count
    return values


def _pickled(obj: Any) -> tuple[torch.Tensor, Exception | None]:
    file = io.BytesIO()
    try:
        cloudpickle.dump(obj, file)
    except Exception as error:  # whatever a __reduce__ raises; the other ranks wait to hear of it
        return torch.empty(0, dtype=torch.uint8), error
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8), None


def _loaded(payload: torch.Tensor) -> Any:
    return pickle.loads(payload.cpu().numpy().data)


def _unpicklable(operation: str, rank: int) -> ValueError:
    return ValueError(
        f"{operation}: the object of rank {rank} cannot be pickled; the error of rank {rank} says why. Send what the "
        "object is made of instead: numbers, arrays, state dicts."
    )
