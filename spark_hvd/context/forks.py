"""Processes that a rank forks: they know who their parent is, and leave its world alone.

A forked child has its parent's connections and none of its threads. If it used, shut down or even destroyed what it
has, the parent would suffer: both share the sockets, and what the kernel knows of who waits for them. So it can ask
what its parent's rank is, as workers of data loaders do, and all else is an error.
"""

from __future__ import annotations

import ctypes
import os
import threading

from spark_hvd.context.standing import PendingMember, standing
from spark_hvd.transport.torch_private import process_groups


def _leave_world_to_parent() -> None:
    """Runs in every forked child, before anything else does; no other thread lives that could hold a lock."""
    standing.lock = threading.RLock()
    context, joined, outside = standing.context, standing.joined, standing.pending
    places = [each.world.me for each in (context, joined) if each is not None]
    places += [] if outside is None else [outside.me]
    if not places:
        return
    me = places[0]
    # Destructors wait for threads that are not here, and take sockets out of the epoll that the parent waits with.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((context, joined, process_groups())))
    standing.forked = (
        f"this process was forked from rank {me.rank}: it may ask for the rank and the size, but the connections to "
        "the other ranks are its parent's. Call collectives and join worlds in the rank itself."
    )
    if context is None or (me.size == 1 and context.registry is None):
        return  # a world of one has no connections
    standing.context = standing.joined = standing.registry = None
    standing.pending = PendingMember(me, None, context.world.generation)
    for queue in [context.queue, *context.queues.values()]:
        queue.forked(standing.forked)
    context.groups.forked()


os.register_at_fork(after_in_child=_leave_world_to_parent)
