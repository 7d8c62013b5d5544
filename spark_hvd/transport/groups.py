"""The process groups of process sets: only members make them, and they are destroyed with the set or the world."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spark_hvd.transport.connections import Address, Connections, Forkable, listening, since, sockets
from spark_hvd.transport.torch_private import PrefixStore, Store, gloo_devices, process_group

if TYPE_CHECKING:
    from spark_hvd.transport.registry import ConnectionRegistry

GROUP_PREFIX = "spark_hvd."
"""Prefix of the names of all process groups made here."""


_Made = tuple[dist.ProcessGroup, list[Address]]
"""A new group, and the addresses at which Gloo listened for it already."""


class Groups:
    """The process groups of one world.

    A collective gives up on its peers after ``timeout`` seconds. With ``owns_default_group``, all other process groups
    also end with the world. ``registry`` is an elastic world's registry, which must know all connections; None: there
    is none.
    """

    def __init__(
        self, kv: Store, timeout: float, *, owns_default_group: bool, registry: ConnectionRegistry | None = None
    ) -> None:
        self.owns_default_group = owns_default_group
        self._registry = registry
        self._kv = PrefixStore("groups", kv)
        self.timeout = timeout
        self._made: dict[int, list[dist.ProcessGroup]] = {}
        self._slices: dict[int, list[dist.ProcessGroup]] = {}
        self._pipes: dict[int, list[Forkable]] = {}
        self._devices: list[Any] = []
        self._listeners: list[Address] = []

    def make(self, process_set_id: int, ranks: Sequence[int], gloo_threads: int | None = None) -> dist.ProcessGroup:
        """Make a process group for a process set; each of its ranks must call this, in the same order.

        ``process_set_id`` is 0 for the world; ``ranks`` are numbers in the world, ascending. With ``gloo_threads``, the
        group has only Gloo with that many threads; None: the world's backends.
        """
        if self._registry is None:
            return self._make(process_set_id, ranks, gloo_threads)[0]
        return self.make_known(process_set_id, ranks, gloo_threads)[0]

    def make_known(
        self, process_set_id: int, ranks: Sequence[int], gloo_threads: int | None = None
    ) -> tuple[dist.ProcessGroup, Connections]:
        """Do :meth:`make`, and return the group's connections too, which costs an exchange."""
        return self._known(lambda: self._make(process_set_id, ranks, gloo_threads))

    def make_slice(self, process_set_id: int, ranks: Sequence[int], name: str) -> tuple[dist.ProcessGroup, Connections]:
        """Make a process group for some of a process set's ranks; exactly these must call this.

        The name must be the same on all of them, and unused within the set. ``process_set_id`` is 0 for the world;
        ``ranks`` are numbers in the world, ascending.
        """
        full = f"{GROUP_PREFIX}{process_set_id}.{name}"
        group = self._known(lambda: self._group(full, ranks))
        self._slices.setdefault(process_set_id, []).append(group[0])
        return group

    def _known(self, make: Callable[[], _Made]) -> tuple[dist.ProcessGroup, Connections]:
        with contextlib.nullcontext() if self._registry is None else self._registry.establishing():
            before = sockets()
            group, listeners = make()
            connections = Connections.since(before, group, listeners)
            if self._registry is not None:
                self._registry.add(connections)
        return group, connections

    def _make(self, process_set_id: int, ranks: Sequence[int], gloo_threads: int | None) -> _Made:
        groups = self._made.setdefault(process_set_id, [])
        made = self._group(f"{GROUP_PREFIX}{process_set_id}.{len(groups)}", ranks, gloo_threads)
        groups.append(made[0])
        return made

    def _group(self, name: str, ranks: Sequence[int], gloo_threads: int | None = None) -> _Made:
        listeners: list[Address] = []

        def shared() -> list[Any]:
            """Return Gloo's devices for all groups of the world: each has a thread that wakes 100 times a second."""
            if not self._devices:
                before = sockets()
                self._devices = gloo_devices()
                self._listeners = listening(since(before))
            listeners.extend(self._listeners)
            return self._devices

        # An elastic world searches a new group's own sockets for its listener, so each group has its own device.
        devices = shared if self._registry is None else gloo_devices
        timeout = timedelta(seconds=self.timeout)
        return process_group(name, ranks, self._kv, timeout, gloo_threads, devices), listeners

    def keep(self, process_set_id: int, pipes: Forkable) -> None:
        """Keep pipes between a process set's ranks until its groups end."""
        self._pipes.setdefault(process_set_id, []).append(pipes)
        if self._registry is not None:
            self._registry.add(pipes)

    def forked(self) -> None:
        """Give up all pipes in a child of the rank's process."""
        for pipes in self._pipes.values():
            for each in pipes:
                each.forked()

    def of(self, process_set_id: int) -> list[dist.ProcessGroup]:
        """Return the groups of a process set, in the order in which they were made."""
        return list(self._made.get(process_set_id, []))

    def destroy(self, process_set_id: int) -> None:
        """Destroy the groups of a process set; its number is never reused."""
        for pipes in self._pipes.pop(process_set_id, []):
            pipes.abort()
        for group in [*self._slices.pop(process_set_id, []), *self._made.pop(process_set_id, [])]:
            dist.destroy_process_group(group)

    def forget(self) -> None:
        """Drop all references: torch has destroyed the groups with the default group."""
        for pipes in self._pipes.values():
            for each in pipes:
                each.abort()
        for groups in (self._pipes, self._slices, self._made):
            groups.clear()

    def destroy_all(self) -> None:
        """Destroy all groups of the world."""
        for process_set_id in {*self._made, *self._slices, *self._pipes}:
            self.destroy(process_set_id)


_KEPT = "_spark_hvd_group"


class _LastReference:
    """A reference to a process group, which is not copied or pickled with its model: a copy gets its own."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def __reduce__(self) -> tuple[type[_LastReference], tuple[()]]:
        return _LastReference, ()


def free_groups_last() -> None:
    """Let each DistributedDataParallel made or copied from now on free its process group after its reducer. Idempotent.

    The C++ reducer has a reference to the group. If it is the last one, Gloo's destructor waits for its threads while
    the training thread holds the GIL. In torch 2.13, such a thread needs the GIL to free the last gradient's
    all-reduce, and both may wait forever (https://github.com/pytorch/pytorch/issues/56297). A function that makes a
    model, trains it, and ends with ``destroy_process_group()`` does all that this takes. A reference of Python's does
    no harm: torch releases the GIL before it frees a group for Python.
    """
    for name in ("__init__", "__setstate__"):
        method = getattr(DistributedDataParallel, name)
        if not hasattr(method, _KEPT):
            setattr(DistributedDataParallel, name, _keeping(method))


def _keeping(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def keeping(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        # An object's attributes are freed in the order in which they were set, and the reducer is one of them.
        self.__dict__.pop(_KEPT, None)
        self.__dict__[_KEPT] = _LastReference(self.process_group)

    setattr(keeping, _KEPT, None)
    return keeping
