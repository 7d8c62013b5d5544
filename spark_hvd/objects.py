"""Python objects between ranks: pickled, sealed, and sent as bytes by named collectives.

Unpickling runs code, and the bytes travel over connections that a stranger on the network may take over. Their length
and digest, the seal, goes by the coordinator, whose channel is encrypted and authenticated with keys of this world. It
comes with the decision to run just this call, so a pickle of another call, or of the same one at another time, does not
fit it. What does not is not unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle
from typing import Any, TypeVar

import cloudpickle
import torch

from spark_hvd.errors import CollectiveError
from spark_hvd.execution import Work, only
from spark_hvd.named import start_allgather, start_broadcast, start_sealing
from spark_hvd.process_sets import ProcessSet, global_process_set, lane_of

T = TypeVar("T")

_UNPICKLABLE = "-1 "


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Give every rank the object of one rank.

    The pickle travels over the process group's own connections, from rank to rank, and is loaded by the others if it is
    the one that the root has sent. Its size is not limited but by memory.

    Args:
        obj: Anything cloudpickle can pickle; ignored on ranks other than `root_rank`.
        root_rank: Whose object it is; counts in the world.
        name: Ranks match calls by name. None: such calls match by their order.
        process_set: Whose ranks get it.

    Returns:
        On `root_rank` the object itself, elsewhere a copy.

    Raises:
        ValueError: `root_rank` is no rank, or the object there cannot be pickled.
        CollectiveError: A peer or the network failed, or what came is not what the root has sent.
    """
    process_set.require_root(root_rank)
    lane = lane_of(process_set)
    if len(lane.ranks) == 1:
        return obj
    me = lane.ranks[lane.communicator.rank]
    mine = me == root_rank
    payload, failure = _pickled(obj) if mine else (torch.empty(0, dtype=torch.uint8), None)
    seal = _seal_of(payload, failure) if mine else None
    seal = start_sealing(seal, root_rank, name and f"{name}.seal", process_set).wait()
    if seal == _UNPICKLABLE:
        raise _unpicklable("broadcast_object", root_rank) from failure
    if not mine:
        payload = torch.empty(_length(seal), dtype=torch.uint8)
    payload = payload.to(lane.communicator.fact_device)
    start_broadcast([payload], root_rank, name, process_set, only, in_place=True, urgent=True).wait()
    return obj if mine else _loaded(payload.cpu(), seal, f"rank {me} got a pickle from rank {root_rank}")


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
        CollectiveError: A peer or the network failed, or what came is not what a rank has sent.
    """
    lane = lane_of(process_set)
    payload, failure = _pickled(obj)
    seal = _seal_of(payload, failure)
    payload = payload.to(lane.communicator.fact_device)
    work = start_allgather([payload], name, process_set, _whole, urgent=True, seal=seal).wait()
    everyones = only(work).cpu()
    me = lane.ranks[lane.communicator.rank]
    values: list[T] = []
    start = 0
    for rank, each in zip(lane.ranks, work.seals, strict=True):
        if each == _UNPICKLABLE:
            raise _unpicklable("allgather_object", rank) from failure
        if each is not None:  # ranks that have joined have no part
            end = start + _length(each)
            values.append(_loaded(everyones[start:end], each, f"rank {me} got a pickle from rank {rank}"))
            start = end
    return values


def _whole(work: Work) -> Work:
    return work


def _pickled(obj: Any) -> tuple[torch.Tensor, Exception | None]:
    file = io.BytesIO()
    try:
        cloudpickle.dump(obj, file)
    except Exception as error:  # whatever a __reduce__ raises; the other ranks wait to hear of it
        return torch.empty(0, dtype=torch.uint8), error
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8), None


def _seal_of(payload: torch.Tensor, failure: Exception | None) -> str:
    if failure is not None:
        return _UNPICKLABLE
    return f"{payload.numel()} {hashlib.sha256(payload.numpy().data).hexdigest()}"


def _length(seal: str) -> int:
    return int(seal.partition(" ")[0])


def _loaded(payload: torch.Tensor, seal: str, what: str) -> Any:
    data = payload.numpy().data
    if not hmac.compare_digest(seal, _seal_of(payload, None)):
        raise CollectiveError(
            f"{what}, of {len(data):,} bytes, that is not the one that was sent: its digest differs from the one "
            "that the sender told the coordinator. It was not unpickled. Something changes what ranks send each "
            "other: keep strangers off the network of the ranks, see docs/security.md."
        )
    return pickle.loads(data)


def _unpicklable(operation: str, rank: int) -> ValueError:
    return ValueError(
        f"{operation}: the object of rank {rank} cannot be pickled; the error of rank {rank} says why. Send what the "
        "object is made of instead: numbers, arrays, state dicts."
    )
