"""join(): a rank that has no more data stands in for itself in all collectives of the world, until every rank has come.

The coordinator of named collectives counts it as ready for all. Gradient reducers negotiate nothing: there it takes
part in one step after the other with zeros, and learns in each whether any rank has made that step in earnest. When
all have joined, all stand in for the same step, which nobody makes; thereby they know.
"""

from __future__ import annotations

import gc
import queue
import threading

import torch

from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.objects import allgather_object
from spark_hvd.collectives.process_set import ProcessSet, queue_of
from spark_hvd.context.standing import StandIn, current
from spark_hvd.world.errors import CollectiveError, MismatchError
from spark_hvd.world.words import ranks_text

Ends = queue.SimpleQueue[tuple[int, BaseException | None]]

_LOOK_SECONDS = 0.1
"""How often a rank that stands in looks whether the coordinator has told of a failure."""


def join(*, counts: bool) -> int:
    """See :func:`spark_hvd.torch.join`.

    Args:
        counts: Whether Average still divides by this rank.

    Returns:
        The last rank that joined.

    Raises:
        NotInitializedError: Before init().
        CollectiveError: A peer or the network failed.
        AssertionError: Gradients of this rank are being reduced.
    """
    here = current()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    if "stand-in" not in here.ordinals:  # as on all ranks
        return here.queue.join(counts, device).wait()
    gc.collect()  # optimizers that were dropped, before any rank stands in for one that others have no more
    stand_ins = dict(here.stand_ins)
    if any(each.in_flight for each in stand_ins.values()):
        raise AssertionError("join() was called while gradients are being reduced: call optimizer.step() first.")
    handle = here.queue.join(counts, device)
    # A thread each: the others may come to their optimizers in any order. They cannot be interrupted, the caller can.
    ends: Ends = queue.SimpleQueue()
    for number, each in stand_ins.items():
        args = (number, each, counts, device, ends)
        threading.Thread(target=_stand_in, args=args, name="spark_hvd-join", daemon=True).start()
    ended: set[int] = set()
    while not handle.done and len(ended) < len(stand_ins):
        _hear(ends, ended, handle)
    last = handle.wait()  # raises if a rank has gone
    # What some rank has no more, nobody can step through, nor need its other owners wait for its last step.
    wanted = set.intersection(*map(set, allgather_object(list(stand_ins), name="spark_hvd.context.join")))
    while not ended >= wanted:
        _hear(ends, ended, handle)
    return last


def require_everyone(what: str, process_set: ProcessSet) -> None:
    """Go on only if no rank has joined; collective. ``what`` is a name that is not used for something else meanwhile.

    Raises:
        MismatchError: A rank has joined.
    """
    here = set(allgather_object(current().world.me.rank, name=f"spark_hvd.{what}", process_set=process_set))
    away = [rank for rank in queue_of(process_set).ranks if rank not in here]
    if away:
        raise MismatchError(
            f"{what} cannot run: {ranks_text(away)} called join(), and it needs every rank; call it before or after."
        )


def _hear(ends: Ends, ended: set[int], handle: NamedHandle[int]) -> None:
    try:
        number, error = ends.get(timeout=_LOOK_SECONDS)
    except queue.Empty:
        return
    if isinstance(error, CollectiveError):
        raise current().queue.explained(handle, error) from error
    if error is not None:
        raise error
    ended.add(number)


def _stand_in(number: int, each: StandIn, counts: bool, device: torch.device | None, ends: Ends) -> None:
    try:
        if device is not None:
            torch.cuda.set_device(device)
        while each.stand_in(counts=counts):
            pass
    except BaseException as error:
        ends.put((number, error))
    else:
        ends.put((number, None))
