"""Leaving a world: in order, or, as an elastic rank, at once."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from spark_hvd.collectives.queue import NegotiatedQueue
from spark_hvd.context.standing import Context, PendingMember, standing
from spark_hvd.transport.mpi import backend as mpi_backend
from spark_hvd.transport.mpi.ends import at_exit

_LAST_SECONDS = 1.0
"""How long leaving waits for what is still on the wire."""

_log = logging.getLogger("spark_hvd")

at_end: list[Callable[[], None]] = []
"""Each finishes something that a program leaves unfinished when it ends, and raises what failed; none needs a world."""


def finish() -> None:
    """Finish what the program left unfinished; the caller of its function calls this when that has returned.

    Raises:
        Exception: The first failure.
    """
    for each in at_end:
        each()


def shutdown() -> None:
    """Leave the world; does nothing outside one. init() may follow, if every rank calls it.

    Collectives in flight fail, here and on the other ranks. A default process group that the user initialised stays.
    Called automatically when the interpreter exits. Checkpoints that are being written are finished first.

    Raises:
        StoreError: A checkpoint could not be written. The world is left nevertheless.
    """
    _shutdown()


def shutdown_for_good() -> None:
    """Do :func:`shutdown` for a process that will end by ``os._exit`` and join no other world.

    It does not wait until Gloo has taken its connections apart: for each, Gloo waits for a thread that wakes up every
    10 ms. A thread does it, as others may still wait for this rank, and ends with the process.
    """
    _shutdown(for_good=True)


def _shutdown(*, for_good: bool = False) -> None:
    try:
        finish()
    finally:
        with standing.lock:
            end("hvd.shutdown() was called on this rank.", for_good=for_good)


def abort(text: str, generation: int | None = None) -> None:
    """End the connections of an elastic world at once; what the training thread waits for fails. From any thread.

    :func:`join`, too, then ends with a CollectiveError soon.

    Args:
        text: Why, for the errors that follow.
        generation: Whose world it is about. Nothing happens to a later one, and an earlier or equal one cannot be
            joined any more: so no call is lost that comes a moment before :func:`join`. None: the one that is joined
            or is being joined, if any.
    """
    if generation is not None and (standing.aborted is None or generation >= standing.aborted[0]):
        standing.aborted = generation, text
    registry = standing.registry
    if registry is None or (generation is not None and registry.generation > generation):
        return
    registry.abort(text)
    context = standing.context
    if context is not None:
        for queue in [context.queue, *context.queues.values()]:
            if queue.members.nccl is not None:
                queue.members.nccl.abort_soon()


def is_aborted() -> bool:
    """Return whether :func:`abort` was called for the world that this process is in."""
    return standing.registry is not None and standing.registry.broken is not None


def abandon() -> None:
    """Leave an elastic world, broken or not, and take a provisional place; nobody is waited for.

    Does nothing outside a world. To be called in the training thread. Process sets are unregistered.
    """
    with standing.lock:
        context = standing.context
        if context is None:
            return
        me, config, number = context.world.me, context.engine.config, context.world.generation
        end("this rank has left the generation: it is over.")
        standing.pending = PendingMember(me, config, number)
        standing.joined = standing.registry = None


def end(text: str, *, for_good: bool = False) -> None:
    """Leave the world, if there is one."""
    context, standing.context = standing.context, None
    if context is None:
        return
    for process_set in context.process_sets.values():
        process_set.registered_as(None)
    context.engine.close(text)
    drain([context.queue, *context.queues.values()])
    if context.registry is not None:
        context.registry.abort(text)
    # The user may have destroyed the default group, and all others with it.
    if dist.is_initialized():
        if not context.owns_default_group:
            context.groups.destroy_all()
        elif for_good and dist.get_backend() == "gloo":
            threading.Thread(target=_destroy, args=[context], name="spark_hvd-farewell", daemon=True).start()
        else:
            _destroy(context)


def _destroy(context: Context) -> None:
    dist.destroy_process_group()
    context.groups.forget()
    mpi_backend.release()


def drain(queues: Sequence[NegotiatedQueue]) -> None:
    """Wait for collectives in flight on closed queues, then abort them, so that their process groups can be destroyed.

    A process group waits for what is under way when it is destroyed, also where that waits for a rank that is gone.
    """
    for queue in queues:
        if (queue.peer_lost or queue.left_unfinished) and queue.members.nccl is not None:
            queue.members.nccl.abort()
    # It may still end well, and the peers may need it.
    _wait([queue for queue in queues if not queue.peer_lost], _LAST_SECONDS)
    for queue in queues:
        if queue.unfinished:
            queue.abort()
    _wait(queues, _LAST_SECONDS)
    for queue in queues:
        if queue.unfinished:
            # A daemon: when the process ends, it neither waits for this thread nor for the group that it holds.
            threading.Thread(target=_hold, args=[queue], name="spark_hvd-farewell", daemon=True).start()


def _wait(queues: Sequence[NegotiatedQueue], seconds: float) -> None:
    until = time.monotonic() + seconds
    while any(queue.unfinished for queue in queues) and time.monotonic() < until:
        time.sleep(0.005)


def _hold(queue: NegotiatedQueue) -> None:
    while queue.unfinished:
        time.sleep(1.0)


def _leave() -> None:
    if standing.forked is not None:
        return
    try:
        shutdown()
    except Exception as error:  # nobody is left to take it
        _log.error("%s", error)
    for end in at_exit:
        end()


atexit.register(_leave)
