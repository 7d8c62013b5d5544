"""Where this process stands: the world it is in, or, as an elastic rank between two worlds, its provisional place."""

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
from spark_hvd.transport.waits import stand_by
from spark_hvd.world import launcher
from spark_hvd.world.config import Config
from spark_hvd.world.errors import NotInitializedError
from spark_hvd.world.layout import RankInfo, World, WorldLayout

_NO_GENERATION = (
    "this elastic rank is in no world at the moment, so there is nobody to talk to: collectives belong inside the "
    "function that is decorated with hvd.elastic.run."
)


class StandIn(Protocol):
    """Collectives of all ranks that are not negotiated."""

    @property
    def in_flight(self) -> bool:
        """Whether collectives of this rank are in flight."""

    def stand_in(self, *, counts: bool) -> bool:
        """Take part in the next step of the other ranks; returns whether any rank has made one.

        ``counts`` says that Average divides by this rank.
        """


@dataclass(frozen=True, slots=True)
class Context:
    """What this process knows of the world it is in."""

    world: World
    layout: WorldLayout
    communicator: Communicator
    kv: Store
    """The ranks' key-value store, with a prefix of this world's own."""
    owns_default_group: bool
    """False if the user had initialised torch.distributed; it is then left alone."""
    engine: Engine
    queue: NegotiatedQueue
    """The queue of the collectives of all ranks."""
    groups: Groups
    process_sets: dict[int, ProcessSet] = field(default_factory=dict)
    """The registered process sets, the global one aside, by number."""
    queues: dict[int, NegotiatedQueue] = field(default_factory=dict)
    """The queues of the process sets that this rank is in, by number."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """The numbers of process sets; none is used twice, as keys of the key-value store must not be."""
    ordinals: defaultdict[str, Iterator[int]] = field(default_factory=lambda: defaultdict(itertools.count))
    """See :func:`ordinal`."""
    registry: ConnectionRegistry | None = None
    """The connections of an elastic world."""
    handles: dict[int, NamedHandle[Any]] = field(default_factory=dict)
    """In Horovod's dialect: handles by their numbers, until they are waited for."""
    stand_ins: weakref.WeakValueDictionary[int, StandIn] = field(default_factory=weakref.WeakValueDictionary)
    """What this rank stands in for while it has joined, besides named collectives; by numbers that all ranks share."""

    def establishing(self) -> contextlib.AbstractContextManager[None]:
        """Make process groups and queues within this context, so that :func:`abort` ends that too."""
        return contextlib.nullcontext() if self.registry is None else self.registry.establishing()

    def new_group(self, process_set_id: int, gloo_threads: int | None = None) -> dist.ProcessGroup:
        """Return a process group of the ranks of a process set; each of them must call this, in the same order.

        With ``gloo_threads``, Gloo alone with so many threads, in place of the world's backends. ``process_set_id`` is
        0 for all ranks.
        """
        queue = self.queues[process_set_id] if process_set_id else self.queue
        return self.groups.make(process_set_id, queue.ranks, gloo_threads)

    def pipes(self, process_set_id: int, group: dist.ProcessGroup, device: torch.device) -> Pipes | None:
        """Pipes between a process set's ranks, all on one host; each of them must call this.

        ``process_set_id`` is 0 for all ranks. The ranks agree over ``group``, a process group of theirs, which can
        exchange small facts on ``device``.

        Returns:
            None, on every rank, if one cannot reach another's.
        """
        queue = self.queues[process_set_id] if process_set_id else self.queue
        facts = partial(exchange, group=group, device=device)
        made = Pipes.open(queue.ranks, dist.get_rank(group), self.groups.timeout, facts)
        if made is not None:
            self.groups.keep(process_set_id, made)
        return made

    def hierarchy(self, process_set_id: int, group: dist.ProcessGroup, wanted: bool) -> Hierarchy | None:
        """Return the two levels of a process set, see :meth:`spark_hvd.transport.host.hierarchy.Hierarchy.open`."""
        members = (self.queues[process_set_id] if process_set_id else self.queue).members
        return Hierarchy.open(process_set_id, members.ranks, members.hosts, wanted, self.groups, group)


@dataclass(frozen=True, slots=True)
class JoinedWorld:
    """How the world was joined, so that init() after shutdown() finds it again."""

    world: World
    kv: Store
    timeout: float
    backend: str | None
    times: int
    """How often this generation was joined over this store: every time gets keys of its own."""


@dataclass(frozen=True, slots=True)
class PendingMember:
    """What an elastic rank is outside its worlds."""

    me: RankInfo
    config: Config | None
    generation: int


class ProcessState:
    """What changes when a world is joined or left."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held by whoever joins or leaves."""
        self.context: Context | None = None
        self.joined: JoinedWorld | None = None
        self.pending: PendingMember | None = None
        self.registry: ConnectionRegistry | None = None
        """The connections of the elastic world that is joined, or is being joined."""
        self.aborted: tuple[int, str] | None = None
        """The last generation that was aborted by its number, and why."""
        self.forked: str | None = None
        """What a process that a rank has forked must not do; None in others. See :mod:`spark_hvd.context.forks`."""
        self.functions = 0
        """Elastic functions that were begun here."""

    def register_connections(self, registry: ConnectionRegistry) -> ConnectionRegistry:
        """These connections are to be made; they are cut at once if their generation was aborted already."""
        self.registry = registry
        stand_by(lambda: registry.broken)
        if self.aborted is not None and registry.generation <= self.aborted[0]:
            registry.abort(self.aborted[1])
        return registry


standing = ProcessState()
"""What this process is: in a world, expecting one, or in none."""


def current() -> Context:
    """Return the world this process is in.

    Raises:
        NotInitializedError: init() has not been called, or shutdown() has, or a rank has forked this process.
    """
    context = standing.context
    if context is None:
        refuse_fork()
        raise NotInitializedError() if standing.pending is None else NotInitializedError(_NO_GENERATION)
    return context


look_up_with(current)


def refuse_fork() -> None:
    """Go on only in a rank itself.

    Raises:
        NotInitializedError: A rank has forked this process.
    """
    if standing.forked is not None:
        raise NotInitializedError(standing.forked)


def place() -> RankInfo:
    """Who I am: in the world, or, as an elastic rank outside one, provisionally.

    Raises:
        NotInitializedError: Neither.
    """
    outside = standing.pending
    return current().world.me if outside is None or in_world() else outside.me


def generation() -> int:
    """Return the number of the world; outside of a world, an elastic rank's last one.

    Raises:
        NotInitializedError: Before init().
    """
    outside = standing.pending
    return current().world.generation if outside is None or in_world() else outside.generation


def is_initialized() -> bool:
    """Return whether this process is in a world or, as an elastic rank, waits for its first or next one."""
    return standing.context is not None or standing.pending is not None


def speaks_horovod() -> bool:
    """Return whether this process is in a world of Horovod's dialect, whose numbers and errors then apply."""
    return standing.context is not None and standing.context.engine.config.is_horovod


def in_world() -> bool:
    """Return whether this process is in a world, so that collectives work."""
    return standing.context is not None


_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def ordinal(kind: str) -> str:
    """Return the next number for a kind of thing that all ranks make in the same order, so that it is the same on each.

    A rank that an elastic world has taken in has not made what the others made in the worlds before: what is made
    inside such a world is numbered from 0.
    """
    if launcher.installed() is None or not in_world():
        return str(next(_numbers[kind]))
    here = current()
    return f"{here.world.generation}.{next(here.ordinals[kind])}"
