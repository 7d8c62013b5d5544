"""join(): a rank without more data takes part in all collectives of the world until every rank has joined.

The coordinator of named collectives counts the rank as ready for all of them. Gradient reducers do not negotiate, so
the rank shadows one step after another with zeros, and learns in each whether any rank has made a real step. Once
all ranks have joined, all take part in a step that no rank has made, which tells them to stop.
"""

from __future__ import annotations

import gc
import queue
import threading

import torch

from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.objects import allgather_object
from spark_hvd.collectives.process_set import ProcessSet, queue_of
from spark_hvd.context.global_state import Joinable, current
from spark_hvd.world.errors import CollectiveError, MismatchError
from spark_hvd.world.words import ranks_text

Ends = queue.SimpleQueue[tuple[int, int, BaseException | None]]
"""Number of an optimizer, how many steps of others it has shadowed, and an error."""

_LOOK_SECONDS = 0.1
"""Seconds between two checks whether the coordinator has reported a failure."""


def join(*, counts: bool) -> int:
    """See :func:`spark_hvd.torch.join`; ``counts`` says whether Average still divides by this rank."""
    here = current()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    if "joinable" not in here.ordinals:  # no optimizer was made, on any rank
        return here.queue.join(counts, device).wait()
    gc.collect()  # remove dropped optimizers, so that no rank shadows one that the others no longer have
    joinables = dict(here.joinables)
    if any(each.in_flight for each in joinables.values()):
        raise AssertionError("join() was called while gradients are being reduced: call optimizer.step() first.")
    handle = here.queue.join(counts, device)
    # Use a thread for each optimizer, as other ranks may step them in any order. Only the caller can be interrupted.
    ends: Ends = queue.SimpleQueue()
    for number, each in joinables.items():
        args = (number, each, counts, device, ends)
        threading.Thread(target=_shadow, args=args, name="spark_hvd-join", daemon=True).start()
    ended: dict[int, int] = {}
    while not handle.done and len(ended) < len(joinables):
        _collect_end(ends, ended, handle)
    last = handle.wait()  # raises if a rank was lost
    # If a rank no longer has an optimizer, nobody can step it, so do not wait for its last step.
    wanted = set.intersection(*map(set, allgather_object(list(joinables), name="spark_hvd.context.join")))
    while not ended.keys() >= wanted:
        _collect_end(ends, ended, handle)
    # The coordinator may have heard of a rank too late, while that one already shadowed others. Who has shadowed the
    # fewest steps has made the most, and has the weights that all want.
    shadowed = allgather_object(sum(ended[number] for number in wanted), name="spark_hvd.context.join.steps")
    return last if shadowed[last] == min(shadowed) else shadowed.index(min(shadowed))


def require_everyone(what: str, process_set: ProcessSet) -> None:
    """Check that no rank has called join(). Collective. ``what`` must be a name that nothing else uses meanwhile.

    Raises:
        MismatchError: A rank has joined.
    """
    present = set(allgather_object(current().world.me.rank, name=f"spark_hvd.{what}", process_set=process_set))
    joined = [rank for rank in queue_of(process_set).ranks if rank not in present]
    if joined:
        raise MismatchError(
            f"{what} cannot run: {ranks_text(joined)} called join(), and it needs every rank; call it before or after."
        )


def _collect_end(ends: Ends, ended: dict[int, int], handle: NamedHandle[int]) -> None:
    try:
        number, steps, error = ends.get(timeout=_LOOK_SECONDS)
    except queue.Empty:
        return
    if isinstance(error, CollectiveError):
        raise current().queue.explained(handle, error) from error
    if error is not None:
        raise error
    ended[number] = steps


def _shadow(number: int, each: Joinable, counts: bool, device: torch.device | None, ends: Ends) -> None:
    steps = 0
    try:
        if device is not None:
            torch.cuda.set_device(device)
        while each.shadow(counts=counts):
            steps += 1
    except BaseException as error:
        ends.put((number, steps, error))
    else:
        ends.put((number, steps, None))
