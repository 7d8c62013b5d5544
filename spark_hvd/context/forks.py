"""Processes that a rank forks: they know their parent's rank, but do not touch its world.

A forked child has its parent's connections, but none of its threads. Both share the sockets and their registrations in
the kernel, so the parent would fail if the child used, shut down or destroyed them. Therefore the child may ask for the
rank, as workers of data loaders do, but anything else is an error.
"""

from __future__ import annotations

import ctypes
import os
import threading

from spark_hvd.context.global_state import PendingMember, global_state
from spark_hvd.transport.torch_private import process_groups


def _leave_world_to_parent() -> None:
    """Run first in every forked child. No other thread exists that could hold a lock."""
    global_state.lock = threading.RLock()
    context, joined, outside = global_state.context, global_state.joined, global_state.pending
    places = [each.world.me for each in (context, joined) if each is not None]
    places += [] if outside is None else [outside.me]
    if not places:
        return
    me = places[0]
    # Keep these objects forever: their destructors would wait for threads that do not exist here, and would remove
    # sockets from the epoll instance that the parent uses.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((context, joined, process_groups())))
    global_state.forked = (
        f"this process was forked from rank {me.rank}: it may ask for the rank and the size, but the connections to "
        "the other ranks are its parent's. Call collectives and join worlds in the rank itself."
    )
    if context is None or (me.size == 1 and context.registry is None):
        return  # a world of one has no connections
    global_state.context = global_state.joined = global_state.registry = None
    global_state.pending = PendingMember(me, None, context.world.generation)
    for queue in [context.queue, *context.queues.values()]:
        queue.forked(global_state.forked)
    context.groups.forked()


os.register_at_fork(after_in_child=_leave_world_to_parent)
