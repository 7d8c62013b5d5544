"""The global state of a process: its world or, for an elastic rank between two worlds, its provisional rank."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.process_set import ProcessSet, look_up_with
from spark_hvd.collectives.queue import NegotiatedQueue
from spark_hvd.engine.engine import Engine
from spark_hvd.transport.communicator import Communicator
from spark_hvd.transport.exchange import exchange
from spark_hvd.transport.groups import Groups
from spark_hvd.transport.host.hierarchy import Hierarchy
from spark_hvd.transport.host.pipes import Pipes
from spark_hvd.transport.registry import ConnectionRegistry
from spark_hvd.transport.torch_private import Store
from spark_hvd.transport.waits import set_abort_check
from spark_hvd.world import launcher
from spark_hvd.world.config import Config
from spark_hvd.world.errors import NotInitializedError
from spark_hvd.world.layout import RankInfo, World, WorldLayout

_NO_GENERATION = (
    "this elastic rank is not in a world at the moment, so it has no peers: call collectives inside the "
    "function that is decorated with hvd.elastic.run."
)


class Joinable(Protocol):
    """An object whose collectives a joined rank must shadow, because they are not negotiated: a gradient reducer."""

    @property
    def in_flight(self) -> bool:
        """Whether collectives of this rank are in flight."""

    def shadow(self, *, counts: bool) -> bool:
        """Shadow the next step of the other ranks, and return whether any rank has made one.

        ``counts`` says whether Average also divides by this rank.
        """


@dataclass(frozen=True, slots=True)
class Context:
    """The world of this process, and its resources."""

    world: World
    layout: WorldLayout
    communicator: Communicator
    kv: Store
    """The key-value store of the ranks, with a prefix for this world."""
    owns_default_group: bool
    """False if the user had initialised torch.distributed, which is then never destroyed."""
    engine: Engine
    queue: NegotiatedQueue
    """The queue of the collectives of all ranks."""
    groups: Groups
    process_sets: dict[int, ProcessSet] = field(default_factory=dict)
    """The registered process sets by number, without the global one."""
    queues: dict[int, NegotiatedQueue] = field(default_factory=dict)
    """The queues of the process sets with this rank, by number."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """The numbers of process sets. None is used twice, because keys of the key-value store must be unique."""
    ordinals: defaultdict[str, Iterator[int]] = field(default_factory=lambda: defaultdict(itertools.count))
    """See :func:`ordinal`."""
    registry: ConnectionRegistry | None = None
    """The connections of an elastic world."""
    handles: dict[int, NamedHandle[Any]] = field(default_factory=dict)
    """In Horovod's dialect, the handles by number, until they are waited for."""
    joinables: weakref.WeakValueDictionary[int, Joinable] = field(default_factory=weakref.WeakValueDictionary)
    """The objects that this rank shadows once it has joined, by numbers that all ranks share."""

    def establishing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which to make process groups and queues, so that abort() can end that, too."""
        return contextlib.nullcontext() if self.registry is None else self.registry.establishing()

    def new_group(self, process_set_id: int, gloo_threads: int | None = None) -> dist.ProcessGroup:
        """Return a process group of the ranks of a process set; each of them must call this, in the same order.

        With ``gloo_threads``, the group uses Gloo with this number of threads instead of the world's backends.
        ``process_set_id`` is 0 for all ranks.
        """
        queue = self.queues[process_set_id] if process_set_id else self.queue
        return self.groups.make(process_set_id, queue.ranks, gloo_threads)

    def pipes(self, process_set_id: int, group: dist.ProcessGroup, device: torch.device) -> Pipes | None:
        """Open pipes between the ranks of a process set, which are all on one host. Each of them must call this.

        ``process_set_id`` is 0 for all ranks. ``group`` is a process group of these ranks, over which they exchange
        facts on ``device``.

        Returns:
            The pipes; None on every rank if a rank cannot reach another's.
        """
        queue = self.queues[process_set_id] if process_set_id else self.queue
        facts = partial(exchange, group=group, device=device)
        pipes = Pipes.open(queue.ranks, dist.get_rank(group), self.groups.timeout, facts)
        if pipes is not None:
            self.groups.keep(process_set_id, pipes)
        return pipes

    def hierarchy(self, process_set_id: int, group: dist.ProcessGroup, wanted: bool) -> Hierarchy | None:
        """Return the two levels of a process set; see :meth:`spark_hvd.transport.host.hierarchy.Hierarchy.open`."""
        members = (self.queues[process_set_id] if process_set_id else self.queue).members
        return Hierarchy.open(process_set_id, members.ranks, members.hosts, wanted, self.groups, group)


@dataclass(frozen=True, slots=True)
class JoinedWorld:
    """How the world was joined, so that init() can join it again after shutdown()."""

    world: World
    kv: Store
    timeout: float
    backend: str | None
    times: int
    """How often this generation was joined over this store before, so that each time uses new keys."""


@dataclass(frozen=True, slots=True)
class PendingMember:
    """The provisional rank of an elastic rank outside a world."""

    me: RankInfo
    config: Config | None
    generation: int


class GlobalState:
    """The state that changes when a world is joined or left."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while a world is joined or left."""
        self.context: Context | None = None
        self.joined: JoinedWorld | None = None
        self.pending: PendingMember | None = None
        self.registry: ConnectionRegistry | None = None
        """The connections of the elastic world that was joined or is being joined."""
        self.aborted: tuple[int, str] | None = None
        """The last generation that was aborted by number, and the reason."""
        self.forked: str | None = None
        """The error message for a process that a rank has forked; None in others. See spark_hvd.context.forks."""
        self.functions = 0
        """Number of elastic functions that were called in this process."""

    def register_connections(self, registry: ConnectionRegistry) -> ConnectionRegistry:
        """Register connections before they are made, or close them if their generation was already aborted."""
        self.registry = registry
        set_abort_check(lambda: registry.broken)
        if self.aborted is not None and registry.generation <= self.aborted[0]:
            registry.abort(self.aborted[1])
        return registry


global_state = GlobalState()
"""The state of this process."""


def current() -> Context:
    """Return the world this process is in.

    Raises:
        NotInitializedError: init() has not been called, or shutdown() has, or a rank has forked this process.
    """
    context = global_state.context
    if context is None:
        refuse_fork()
        raise NotInitializedError() if global_state.pending is None else NotInitializedError(_NO_GENERATION)
    return context


look_up_with(current)


def refuse_fork() -> None:
    """Raise an error in a process that a rank has forked.

    Raises:
        NotInitializedError: A rank has forked this process.
    """
    if global_state.forked is not None:
        raise NotInitializedError(global_state.forked)


def rank_info() -> RankInfo:
    """Return the rank in the world or, for an elastic rank outside a world, the provisional one.

    Raises:
        NotInitializedError: There is neither.
    """
    outside = global_state.pending
    return current().world.me if outside is None or in_world() else outside.me


def generation() -> int:
    """Return the number of the world; for an elastic rank outside a world, that of its last one.

    Raises:
        NotInitializedError: Before init().
    """
    outside = global_state.pending
    return current().world.generation if outside is None or in_world() else outside.generation


def is_initialized() -> bool:
    """Return whether this process is in a world or, as an elastic rank, waits for its first or next one."""
    return global_state.context is not None or global_state.pending is not None


def speaks_horovod() -> bool:
    """Return whether this process is in a world of Horovod's dialect, whose numbers and errors then apply."""
    return global_state.context is not None and global_state.context.engine.config.is_horovod


def in_world() -> bool:
    """Return whether this process is in a world, so that collectives work."""
    return global_state.context is not None


_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def ordinal(kind: str) -> str:
    """Return the next number for objects of a kind that all ranks make in the same order, so that it is equal on each.

    A new rank of an elastic world did not make the objects of previous worlds. Therefore objects that are made inside
    an elastic world are numbered from 0 in each world.
    """
    if launcher.installed() is None or not in_world():
        return str(next(_numbers[kind]))
    here = current()
    return f"{here.world.generation}.{next(here.ordinals[kind])}"
