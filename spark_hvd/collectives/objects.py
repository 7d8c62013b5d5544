"""Sends Python objects between ranks: pickles them, seals the pickles, and sends the bytes by named collectives.

Unpickling runs code, and a stranger on the network may take over the connections that carry the bytes. So a seal, the
digest and lengths of the bytes, goes through the coordinator, whose channel is encrypted and authenticated with keys of
this world. The seal arrives with the decision to run this very call, so a pickle of another call, or of the same call
at another time, does not match it. Bytes that do not match are not unpickled.

A small pickle is sent through the coordinator alone, in place of its seal.

The numbers of large arrays follow the pickle as separate buffers (PEP 574). They become elements of tensors, which
cannot run code, so they are not hashed: that would take as long as sending them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import pickle
from typing import Any, TypeVar

import numpy as np
import torch

from spark_hvd.collectives.execution import Work, single_result
from spark_hvd.collectives.process_set import ProcessSet, global_process_set, queue_of
from spark_hvd.collectives.start import start_allgather, start_broadcast, start_sealing
from spark_hvd.world.errors import CollectiveError
from spark_hvd.world.pickles import SourcePickler

T = TypeVar("T")

_UNPICKLABLE = "-"
_WHOLE = "="
"""Marks a pickle that is sent in place of its seal."""
_SMALL = 1 << 10
"""Maximum bytes of such a pickle: the coordinator sends all ranks' pickles to each rank."""
_LARGE = 1 << 16
"""Arrays of at least this many bytes are sent after the pickle."""
_ALIGNMENT = 64
"""Bytes. Each part starts at a multiple of this, because numpy is slow on unaligned numbers."""


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Give every rank the object of one rank.

    A pickle of up to 1 KiB goes through the coordinator. A larger one uses the process group's connections, and other
    ranks load it only if it is the one that the root sent. Only memory limits its size. The numbers of large numpy
    arrays are sent separately. Like tensors in :func:`spark_hvd.torch.broadcast`, they are not verified.

    Args:
        obj: Anything that cloudpickle can pickle; ignored on ranks other than `root_rank`.
        root_rank: The rank, in the world, that has the object.
        name: Ranks match calls by name. Calls without a name match by their order.
        process_set: The ranks that get the object.

    Returns:
        On `root_rank` the object itself, elsewhere a copy.

    Raises:
        ValueError: There is no rank `root_rank`, or its object cannot be pickled.
        CollectiveError: A peer or the network failed, or the received pickle is not the one that the root sent.
    """
    process_set.require_root(root_rank)
    queue = queue_of(process_set)
    if len(queue.ranks) == 1:
        return obj
    me = queue.ranks[queue.communicator.rank]
    mine = me == root_rank
    payload, own, failure = _pickled(obj) if mine else (torch.empty(0, dtype=torch.uint8, device="cpu"), None, None)
    seal = start_sealing(own, root_rank, name and f"{name}.seal", process_set).wait()
    if seal == _UNPICKLABLE:
        raise _unpicklable("broadcast_object", root_rank) from failure
    if seal.startswith(_WHOLE):
        return obj if mine else _loaded(payload, seal, "")
    if not mine:
        payload = torch.empty(_numel(seal), dtype=torch.uint8, device="cpu")
    payload = payload.to(queue.communicator.fact_device)
    start_broadcast([payload], root_rank, name, process_set, single_result, in_place=True, urgent=True).wait()
    return obj if mine else _loaded(payload.cpu(), seal, f"rank {me} got a pickle from rank {root_rank}")


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Give every rank the objects of all ranks.

    The pickles are sent as in :func:`broadcast_object`.

    Args:
        obj: Anything that cloudpickle can pickle.
        name: Ranks match calls by name. Calls without a name match by their order.
        process_set: The ranks that take part.

    Returns:
        Copies of the objects, in rank order.

    Raises:
        ValueError: A rank's object cannot be pickled. Raised on every rank.
        CollectiveError: A peer or the network failed, or a received pickle is not the one that its rank sent.
    """
    queue = queue_of(process_set)
    payload, seal, failure = _pickled(obj)
    payload = payload.to(queue.communicator.fact_device)
    work = start_allgather([payload], name, process_set, _whole, urgent=True, seal=seal).wait()
    gathered = single_result(work).cpu()
    me = queue.ranks[queue.communicator.rank]
    values: list[T] = []
    start = 0
    for rank, each in zip(queue.ranks, work.seals, strict=True):
        if each == _UNPICKLABLE:
            raise _unpicklable("allgather_object", rank) from failure
        if each is not None:  # None: a rank that has joined
            end = start + _numel(each)
            own = gathered[start:end].clone()  # arrays are views of it, and must not keep other ranks' bytes alive
            values.append(_loaded(own, each, f"rank {me} got a pickle from rank {rank}"))
            start = end
    return values


def _whole(work: Work) -> Work:
    return work


def _pickled(obj: Any) -> tuple[torch.Tensor, str, Exception | None]:
    """Return the pickle with the buffers that follow it, its seal, and the error if pickling failed."""
    file = io.BytesIO()
    buffers: list[memoryview] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if not _is_numbers(raw):
            return True
        buffers.append(raw)
        return False

    try:
        SourcePickler(file, buffer_callback=stays).dump(obj)
    except Exception as error:  # any error of a __reduce__; the other ranks wait to hear about it
        return torch.empty(0, dtype=torch.uint8, device="cpu"), _UNPICKLABLE, error
    if not buffers and file.tell() <= _SMALL:
        return (
            torch.empty(0, dtype=torch.uint8, device="cpu"),
            _WHOLE + base64.b64encode(file.getbuffer()).decode(),
            None,
        )
    parts = [np.frombuffer(part, dtype=np.uint8) for part in (file.getbuffer(), *buffers)]
    seal = " ".join([hashlib.sha256(parts[0].data).hexdigest(), *(str(part.nbytes) for part in parts)])
    payload = np.zeros(_numel(seal), dtype=np.uint8)
    for part, place in zip(parts, _places(seal), strict=True):
        payload[place] = part
    return torch.from_numpy(payload), seal, None


def _is_numbers(raw: memoryview) -> bool:
    """Return whether this is a large array of numbers. Arrays of bytes do not count: they may hold a pickle."""
    array: Any = raw.obj
    return type(array) is np.ndarray and raw.nbytes >= _LARGE and array.dtype.kind in "iufc" and array.itemsize > 1


def _places(seal: str) -> list[slice]:
    """Return where the pickle and each buffer lie in the bytes that follow the seal."""
    places = []
    start = 0
    for length in map(int, seal.split(" ")[1:]):
        places.append(slice(start, start + length))
        start += length + -length % _ALIGNMENT
    return places


def _numel(seal: str) -> int:
    """Return the number of bytes that a rank sends besides its seal."""
    if seal.startswith(_WHOLE):
        return 0
    end: int = _places(seal)[-1].stop
    return end + -end % _ALIGNMENT


def _loaded(payload: torch.Tensor, seal: str, what: str) -> Any:
    if seal.startswith(_WHOLE):
        return pickle.loads(base64.b64decode(seal[len(_WHOLE) :]))
    data, *buffers = (payload.numpy()[place] for place in _places(seal))
    if not hmac.compare_digest(seal.split(" ")[0], hashlib.sha256(data.data).hexdigest()):
        raise CollectiveError(
            f"{what}, of {len(data):,} bytes, that differs from what was sent: its digest differs from the one "
            "that the sender told the coordinator. It was not unpickled. Something changes what ranks send each "
            "other: keep strangers off the network of the ranks, see docs/security.md."
        )
    return pickle.loads(data.data, buffers=buffers)


def _unpicklable(operation: str, rank: int) -> ValueError:
    return ValueError(
        f"{operation}: the object of rank {rank} cannot be pickled; the error of rank {rank} says why. Send its "
        "contents instead: numbers, arrays, state dicts."
    )
