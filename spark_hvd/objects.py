"""Python objects between ranks: pickled, and sent as bytes by named collectives."""

from __future__ import annotations

import io
import pickle
from typing import Any, TypeVar

import cloudpickle
import torch

from spark_hvd.execution import only
from spark_hvd.named import start_allgather, start_broadcast
from spark_hvd.process_sets import ProcessSet, global_process_set, lane_of

T = TypeVar("T")

_LENGTH_BYTES = 8
_FAILED = -1


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Give every rank the object of one rank.

    The pickle travels over the process group's own connections, from rank to rank, and is loaded by the others: ranks
    trust each other, as they run the same program. Its size is not limited but by memory.

    Args:
        obj: Anything cloudpickle can pickle; ignored on ranks other than `root_rank`.
        root_rank: Whose object it is; counts in the world.
        name: Ranks match calls by name. None: such calls match by their order.
        process_set: Whose ranks get it.

    Returns:
        On `root_rank` the object itself, elsewhere a copy.

    Raises:
        ValueError: `root_rank` is no rank, or the object there cannot be pickled.
        CollectiveError: A peer or the network failed.
    """
    process_set.require_root(root_rank)
    lane = lane_of(process_set)
    if len(lane.ranks) == 1:
        return obj
    mine = lane.ranks[lane.communicator.rank] == root_rank
    device = lane.communicator.fact_device
    payload, failure = _pickled(obj) if mine else (torch.empty(0, dtype=torch.uint8), None)
    length = torch.tensor([_FAILED if failure else payload.numel()], dtype=torch.int64, device=device)
    count = int(_broadcast(length, root_rank, name and f"{name}.length", process_set))
    if failure is not None:
        raise _unpicklable("broadcast_object", root_rank) from failure
    if count == _FAILED:
        raise _unpicklable("broadcast_object", root_rank)
    if not mine:
        payload = torch.empty(count, dtype=torch.uint8)
    payload = _broadcast(payload.to(device), root_rank, name, process_set)
    return obj if mine else _loaded(payload)


def _broadcast(tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    return start_broadcast([tensor], root_rank, name, process_set, only, in_place=True, urgent=True).wait()


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Give every rank the objects of all ranks.

    The pickles travel as in :func:`broadcast_object`.

    Args:
        obj: Anything cloudpickle can pickle.
        name: Ranks match calls by name. None: such calls match by their order.
        process_set: Whose ranks take part.

    Returns:
        Copies of the objects, in rank order.

    Raises:
        ValueError: A rank's object cannot be pickled. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    lane = lane_of(process_set)
    payload, failure = _pickled(obj)
    length = torch.tensor([_FAILED if failure else payload.numel()], dtype=torch.int64)
    # Each pickle is led by its own length, so that one exchange of sizes, the allgather's, is enough.
    led = torch.cat([length.view(torch.uint8), payload])
    led = led.to(lane.communicator.fact_device)
    everyones = start_allgather([led], name, process_set, only, urgent=True).wait().cpu()
    values: list[T] = []
    start = 0
    while start < everyones.numel():  # ranks that have joined have no part
        end = start + _LENGTH_BYTES
        count = int(everyones[start:end].clone().view(torch.int64))
        if count == _FAILED:
            raise _unpicklable("allgather_object", lane.ranks[len(values)]) from failure
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
