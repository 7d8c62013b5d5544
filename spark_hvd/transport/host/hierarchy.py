"""All-reduce over several hosts with several ranks each: in memory within a host, over the network in slices.

A ring over all ranks sends 2 (n - 1) / n times the data over each host's link, where n counts ranks. Here, every host
first sums in memory that its ranks share. Then one rank per slice sums that slice with its peers on the other hosts,
all slices at once, and writes the result to its host's ranks. So the link carries 2 (h - 1) / h times the data, where h
counts hosts. There are as many slices as the smallest host has ranks; the other ranks of larger hosts carry none.

All ranks go through the stages of all sums in the order in which the sums were started, so there is no circular wait. A
rank that detects a failure ends its own connections, so that the ranks that wait for it detect it too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from spark_hvd.transport.connections import Connections
from spark_hvd.transport.exchange import exchange
from spark_hvd.transport.groups import Groups
from spark_hvd.transport.host.arena import SharedArena
from spark_hvd.transport.host.pipes import Pipes, SyncPoint
from spark_hvd.transport.host.shared_memory import CHUNK, MemorySum
from spark_hvd.transport.waits import wait_for

_PIECE = 2 << 20
"""Bytes sent over the network at a time; meanwhile the next piece is summed and the last one is distributed."""

_log = logging.getLogger("spark_hvd")


@dataclass(frozen=True, slots=True)
class Levels:
    """A rank's place within its host and among the hosts."""

    home: Sequence[int]
    """Places in the process set of this host's ranks, ascending."""
    place: int
    """This rank's index among them."""
    slices: int
    """Number of slices of a buffer: the number of ranks on the smallest host."""
    group: dist.ProcessGroup | None
    """Process group of the ranks with this rank's slice, one per host; None if this rank has no slice."""
    connections: Connections
    """Connections of that group."""

    def among_home(self, ask: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
        """Return an exchange between all ranks of the set that shows each rank the facts of its own host only."""
        return lambda fact: [facts[place] for facts in [ask(fact)] for place in self.home]

    def bounds(self, numel: int) -> tuple[int, int]:
        """Return the first element of this rank's slice, and the one past its last."""
        if self.group is None:
            return 0, 0
        return numel * self.place // self.slices, numel * (self.place + 1) // self.slices

    def map_all(
        self, kinds: Sequence[tuple[int, torch.dtype]], ask: Callable[[Any], list[Any]]
    ) -> list[list[torch.Tensor]] | None:
        """Make buffers that the ranks of each host share; collective. Every rank must pass the same kinds.

        Returns:
            For each buffer, those of all ranks of this host; None, on every rank, if one has no memory to share.
        """
        arena, why = None, None
        try:
            arena = SharedArena(kinds)
        except (OSError, AttributeError) as error:  # AttributeError: not Linux
            why = f"{type(error).__name__}: {error}"
        if refused := [(place, text) for place, text in enumerate(ask(why)) if text is not None]:
            if arena is not None:
                arena.discard()
            self.warn_disabled(f"rank {refused[0][0]} of it has no memory to share ({refused[0][1]})")
            return None
        assert arena is not None
        gathered = arena.map_all(self.place, self.among_home(ask))
        possible = ask(gathered is not None)
        if not all(possible):
            self.warn_disabled(f"rank {possible.index(False)} of it cannot map the memory of its host's other ranks")
            return None
        return gathered

    def warn_disabled(self, why: str) -> None:
        """Warn once, on the process set's first rank."""
        if self.place == 0 and self.home[0] == 0:
            warn_disabled(why)


_warned: list[str] = []


def warn_disabled(why: str) -> None:
    """Warn, once per process and reason, why a process set does not reduce in levels."""
    if _warned:
        return
    _warned.append(why)
    _log.warning(
        "hierarchical all-reduce is off for a process set: %s. All ranks reduce in one ring over Gloo instead, which "
        "sends more over each host's link. HOROVOD_HIERARCHICAL_ALLREDUCE=0 turns it off without this warning.",
        why,
    )


@torch.no_grad()
def reduce_home(buffers: Sequence[torch.Tensor], place: int, low: int, high: int) -> torch.Tensor:
    """Sum some elements of all of a host's ranks into those of one rank, and return these."""
    mine = buffers[place]
    for start in range(low, high, CHUNK):
        chunk = slice(start, min(start + CHUNK, high))
        total = mine[chunk]
        for other, buffer in enumerate(buffers):
            if other != place:
                total.add_(buffer[chunk])
    return mine[low:high]


@torch.no_grad()
def spread_home(buffers: Sequence[torch.Tensor], place: int, low: int, high: int) -> None:
    """Copy some elements of one rank of a host to all its other ranks."""
    mine = buffers[place]
    for start in range(low, high, CHUNK):
        chunk = slice(start, min(start + CHUNK, high))
        for other, buffer in enumerate(buffers):
            if other != place:
                buffer[chunk] = mine[chunk]


class Hierarchy:
    """The two levels of a process set, for buffers summed repeatedly in one order; one thread at a time."""

    def __init__(self, levels: Levels, pipes: Pipes) -> None:
        self.levels = levels
        self.pipes = pipes
        self._line = deque[HierarchicalSum]()
        """Sums that have begun and are not distributed yet, in the order of their start, the same on all ranks."""

    @classmethod
    def open(
        cls,
        process_set_id: int,
        ranks: Sequence[int],
        hosts: Sequence[str],
        wanted: bool,
        groups: Groups,
        group: dist.ProcessGroup,
    ) -> Hierarchy | None:
        """Make the groups of the slices, and the pipes; collective over `group`.

        Returns:
            None, on every rank, if there is only one level, if a rank declines (``wanted``), if Gloo is not used, or if
            a rank has no memory to share.
        """
        counts = Counter(hosts)
        if not 1 < len(counts) < len(ranks) or "gloo" not in str(dist.get_backend_config(group)):
            return None
        ask = functools.partial(exchange, group=group, device=torch.device("cpu"))
        facts = ask([wanted and hasattr(os, "memfd_create"), secrets.token_hex(4)])
        if not all(agreed for agreed, _ in facts):
            return None
        me = dist.get_rank(group)
        homes = [[place for place, host in enumerate(hosts) if host == each] for each in counts]
        home = next(places for places in homes if me in places)
        place, slices = home.index(me), min(counts.values())
        group_of_slice, connections = None, Connections({})
        if place < slices:
            fellows = sorted(ranks[places[place]] for places in homes)
            group_of_slice, connections = groups.make_slice(process_set_id, fellows, f"{facts[0][1]}.{place}")
        levels = Levels(home, place, slices, group_of_slice, connections)
        reached: list[bool] = []

        def agree(fact: bool) -> bool:
            reached[:] = ask(fact)
            return all(reached)

        pipes = Pipes.open([ranks[each] for each in home], place, groups.timeout, levels.among_home(ask), agree)
        possible = ask(pipes is not None)
        if not all(possible):
            if pipes is not None:
                pipes.abort()
            unable = (reached if False in reached else possible).index(False)
            levels.warn_disabled(
                f"rank {unable} of it has no memory to share, or cannot open that of its host's other ranks"
            )
            return None
        assert pipes is not None
        groups.keep(process_set_id, pipes)
        return cls(levels, pipes)

    def sums(
        self, kinds: Sequence[tuple[int, torch.dtype]], ask: Callable[[Any], list[Any]]
    ) -> list[tuple[torch.Tensor, HierarchicalSum]] | None:
        """Make buffers of zeros, and the sum of each; arguments and None are those of :meth:`Levels.map_all`."""
        gathered = self.levels.map_all(kinds, ask)
        if gathered is None:
            return None
        return [(buffers[self.pipes.place], HierarchicalSum(buffers, self)) for buffers in gathered]

    def begin(self, started: HierarchicalSum) -> None:
        """Append a sum that has begun."""
        self._line.append(started)

    def is_in_flight(self, started: HierarchicalSum) -> bool:
        """Return whether a sum has begun and its slice has not been copied to the host's ranks yet."""
        return started in self._line

    def poll(self) -> None:
        """Advance all sums as far as possible without waiting."""
        for each in self._line:
            if not each.reduced:
                if not self.pipes.arrived(SyncPoint.FILLED, each.filled):
                    break
                each.reduce()
        while self._line and self._line[0].reduced and self._line[0].summed:
            self._line.popleft().spread()

    def advance(self, last: HierarchicalSum) -> None:
        """Wait until the host's ranks have filled all sums up to this one, and send this rank's slices of them."""
        for each in self._line if last in self._line else ():
            if not each.reduced:
                self.pipes.wait(SyncPoint.FILLED, each.filled)
                each.reduce()
            if each is last:
                return

    def finish(self, last: HierarchicalSum) -> None:
        """Wait until this rank's slices of all sums up to this one are copied to the host's ranks."""
        self.advance(last)
        while last in self._line:
            self._line.popleft().spread()

    @contextlib.contextmanager
    def ending_with_it(self) -> Iterator[None]:
        """Within this context, let an error here fail all ranks that wait for this one."""
        try:
            yield
        except RuntimeError:
            self.cut()
            raise

    def cut(self) -> None:
        """Tell all ranks that wait for this one that it has failed, by ending its connections."""
        self.pipes.abort()
        self.levels.connections.abort()
        self._line.clear()


class HierarchicalSum(MemorySum):
    """The sum of a buffer over all ranks of several hosts, in place.

    Args:
        buffers: The buffers of all ranks of this host, in rank order. This rank's own is in use from :meth:`start` to
            :meth:`wait`.
        hierarchy: The levels.
        finish: Turns a sum into the result, in place and element by element.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        hierarchy: Hierarchy,
        finish: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._buffers = buffers
        self._hierarchy = hierarchy
        self._finish = finish
        self._bounds = hierarchy.levels.bounds(buffers[0].numel())
        self._works: list[tuple[int, int, dist.Work]] = []
        self._spread = 0
        self.filled = 0
        """How often the others must have filled their buffers before this rank may sum."""
        self.reduced = False
        """Whether this rank's slice is summed over the host."""

    def start(self) -> None:
        with self._hierarchy.ending_with_it():
            if self._hierarchy.is_in_flight(self):  # abandoned, but other ranks depend on this rank's part
                self._hierarchy.finish(self)
            self.filled, self.reduced = self._hierarchy.pipes.send(SyncPoint.FILLED), False
            self._hierarchy.begin(self)

    def poll(self) -> bool:
        with self._hierarchy.ending_with_it():
            self._hierarchy.poll()
        return self.reduced

    def advance(self) -> None:
        with self._hierarchy.ending_with_it():
            self._hierarchy.advance(self)

    def wait(self) -> None:
        with self._hierarchy.ending_with_it():
            self._hierarchy.finish(self)
            self._hierarchy.pipes.wait(SyncPoint.SUMMED, self._spread)

    @property
    def summed(self) -> bool:
        """Whether this rank's slice is summed over the hosts."""
        return all(work.is_completed() for _, _, work in self._works)

    def reduce(self) -> None:
        """Sum this rank's slice over the host and send it to the other hosts, piece by piece."""
        low, high = self._bounds
        size = max(1, _PIECE // self._buffers[0].element_size())
        for start in range(low, high, size):
            end = min(start + size, high)
            piece = reduce_home(self._buffers, self._hierarchy.pipes.place, start, end)
            work = dist.all_reduce(piece, group=self._hierarchy.levels.group, async_op=True)
            assert work is not None
            self._works.append((start, end, work))
        self.reduced = True

    def spread(self) -> None:
        """Wait for the network, and distribute this rank's slice on the host."""
        works, self._works = self._works, []
        for start, end, work in works:
            wait_for(work, self._hierarchy.levels.group)
            if self._finish is not None:
                self._finish(self._buffers[self._hierarchy.pipes.place][start:end])
            spread_home(self._buffers, self._hierarchy.pipes.place, start, end)
        self._spread = self._hierarchy.pipes.send(SyncPoint.SUMMED)


HostSharing = Pipes | Hierarchy
"""How ranks share buffers: on one host by pipes alone, on several by levels."""
