"""Leaving a world: in order, or at once if an elastic world is over."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from spark_hvd.collectives.queue import NegotiatedQueue
from spark_hvd.context.global_state import Context, PendingMember, global_state
from spark_hvd.transport.mpi import backend as mpi_backend
from spark_hvd.transport.mpi.ends import at_exit

_LAST_SECONDS = 1.0
"""Seconds for which leaving waits for collectives in flight."""

_log = logging.getLogger("spark_hvd")

at_end: list[Callable[[], None]] = []
"""Functions that finish work in the background when a program ends, and raise its failure. They need no world."""


def finish() -> None:
    """Finish the program's work in the background. The caller of the user's function calls this after it returned.

    Raises:
        Exception: The first failure.
    """
    for each in at_end:
        each()


def shutdown() -> None:
    """Leave the world; outside a world, do nothing. init() may follow, if every rank calls it.

    Collectives in flight fail, here and on the other ranks. A default process group that the user initialised stays.
    It is called automatically when the interpreter exits. Checkpoints that are being written are finished first.

    Raises:
        StoreError: A checkpoint could not be written. The rank has left the world nevertheless.
    """
    _shutdown()


def shutdown_for_good() -> None:
    """Do :func:`shutdown` for a process that will end with ``os._exit`` and join no other world.

    It does not wait until Gloo has closed its connections, for each of which Gloo waits up to 10 ms. A thread closes
    them, because others may still wait for this rank, and ends with the process.
    """
    _shutdown(for_good=True)


def _shutdown(*, for_good: bool = False) -> None:
    try:
        finish()
    finally:
        with global_state.lock:
            end("hvd.shutdown() was called on this rank.", for_good=for_good)


def abort(text: str, generation: int | None = None) -> None:
    """Close the connections of an elastic world at once, so that whatever the training thread waits for fails.

    Any thread may call this. :func:`~spark_hvd.context.init.join` then soon ends with a CollectiveError, too.

    Args:
        text: The reason, for the errors that follow.
        generation: The number of the world. Later worlds are not affected. This one and earlier ones can no longer be
            joined, so that a call just before :func:`~spark_hvd.context.init.join` is not lost. None for the world that
            is joined or is being joined, if any.
    """
    if generation is not None and (global_state.aborted is None or generation >= global_state.aborted[0]):
        global_state.aborted = generation, text
    registry = global_state.registry
    if registry is None or (generation is not None and registry.generation > generation):
        return
    registry.abort(text)
    context = global_state.context
    if context is not None:
        for queue in [context.queue, *context.queues.values()]:
            if queue.members.nccl is not None:
                queue.members.nccl.abort_soon()


def is_aborted() -> bool:
    """Return whether :func:`abort` was called for the world that this process is in."""
    return global_state.registry is not None and global_state.registry.broken is not None


def abandon() -> None:
    """Leave an elastic world, broken or not, without waiting for anyone, and take a provisional rank.

    Outside a world, this does nothing. Call it in the training thread. Process sets are unregistered.
    """
    with global_state.lock:
        context = global_state.context
        if context is None:
            return
        me, config, number = context.world.me, context.engine.config, context.world.generation
        end("this rank has left the generation: it is over.")
        global_state.pending = PendingMember(me, config, number)
        global_state.joined = global_state.registry = None


def end(text: str, *, for_good: bool = False) -> None:
    """Leave the world, if there is one."""
    context, global_state.context = global_state.context, None
    if context is None:
        return
    for process_set in context.process_sets.values():
        process_set.registered_as(None)
    context.engine.close(text)
    drain([context.queue, *context.queues.values()])
    if context.registry is not None:
        context.registry.abort(text)
    # The user may have destroyed the default group, which destroys all groups.
    if dist.is_initialized():
        if not context.owns_default_group:
            context.groups.destroy_all()
        elif for_good and dist.get_backend() == "gloo":
            threading.Thread(target=_destroy, args=[context], name="spark_hvd-teardown", daemon=True).start()
        else:
            _destroy(context)


def _destroy(context: Context) -> None:
    dist.destroy_process_group()
    context.groups.forget()
    mpi_backend.release()


def drain(queues: Sequence[NegotiatedQueue]) -> None:
    """Wait for collectives in flight on closed queues, then abort them, so that their process groups can be destroyed.

    When a process group is destroyed, it waits for its collectives, even if they wait for a lost rank.
    """
    for queue in queues:
        if (queue.peer_lost or queue.left_unfinished) and queue.members.nccl is not None:
            queue.members.nccl.abort()
    # The other collectives may still succeed, and peers may need them.
    _wait([queue for queue in queues if not queue.peer_lost], _LAST_SECONDS)
    for queue in queues:
        if queue.unfinished:
            queue.abort()
    _wait(queues, _LAST_SECONDS)
    for queue in queues:
        if queue.unfinished:
            # A daemon thread keeps the group alive, so that the process can exit without waiting for either.
            threading.Thread(target=_hold, args=[queue], name="spark_hvd-teardown", daemon=True).start()


def _wait(queues: Sequence[NegotiatedQueue], seconds: float) -> None:
    until = time.monotonic() + seconds
    while any(queue.unfinished for queue in queues) and time.monotonic() < until:
        time.sleep(0.005)


def _hold(queue: NegotiatedQueue) -> None:
    while queue.unfinished:
        time.sleep(1.0)


def _leave() -> None:
    if global_state.forked is not None:
        return
    try:
        shutdown()
    except Exception as error:  # at exit, nothing catches it
        _log.error("%s", error)
    for end in at_exit:
        end()


atexit.register(_leave)
