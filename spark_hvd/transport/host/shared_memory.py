"""All-reduce of buffers that all ranks of one host can see: each rank sums its share of everyone's, in place.

Gloo moves every byte through the loopback interface, twice, at the cost of four copies. Ranks on one host can instead
map each other's buffers. A reduction has three parts: I say that my buffer is filled; when all have said so, I sum my
share over all ranks, in rank order, and write it into every rank's buffer (reduce-scatter and all-gather in one, as in
Patarasuk and Yuan, 2009, without the ring); then I say that I have. For small buffers the time is not in the bytes but
in waiting: there each rank sums all of them for itself, and the third part falls away. What is said goes through pipes,
so a peer that dies is noticed at once. The memory has no name and goes with its last user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from spark_hvd.transport.host.arena import SharedArena
from spark_hvd.transport.host.pipes import Pipes, SyncPoint

CHUNK = 1 << 16
"""Elements summed at a time: small enough that a chunk is still in the cache when it is written to the other ranks."""
SMALL = 1 << 19
"""Bytes of all ranks' buffers together up to which to sum them all costs less than to wait a second time."""


class MemorySum(Protocol):
    """The sum of a buffer over all ranks, time and again. Mine belongs to it from :meth:`start` to :meth:`wait`.

    Raises:
        RuntimeError: From each method: a peer has gone, or the network failed.
    """

    def start(self) -> None:
        """My buffer is filled."""

    def poll(self) -> bool:
        """Do my part of it if that needs no waiting; returns whether it is done.

        As :meth:`advance`, to be called for one buffer after the other, in the order in which they were filled.
        """

    def advance(self) -> None:
        """Wait until the others have filled their buffers, and do my part."""

    def wait(self) -> None:
        """Wait until my buffer holds the sum."""


class SharedSum(MemorySum):
    """Repeated sums of a large buffer: each rank sums its share, in place.

    ``buffers`` are those of all ranks, in rank order; this rank's belongs to the sum from :meth:`start` to
    :meth:`wait`. ``finish`` is as in :func:`sum_share`.
    """

    def __init__(
        self, buffers: Sequence[torch.Tensor], pipes: Pipes, finish: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        self._buffers = buffers
        self._pipes = pipes
        self._finish = finish
        self._filled = self._summed = 0

    def start(self) -> None:
        self._filled, self._summed = self._pipes.send(SyncPoint.FILLED), 0

    def poll(self) -> bool:
        if not self._summed and self._pipes.arrived(SyncPoint.FILLED, self._filled):
            self._sum()
        return self._summed > 0

    def advance(self) -> None:
        if not self._summed:
            self._pipes.wait(SyncPoint.FILLED, self._filled)
            self._sum()

    def wait(self) -> None:
        self.advance()
        self._pipes.wait(SyncPoint.SUMMED, self._summed)

    def _sum(self) -> None:
        sum_share(self._buffers, self._pipes.place, self._finish)
        self._summed = self._pipes.send(SyncPoint.SUMMED)


class CopiedSum(MemorySum):
    """The sum of a small buffer, time and again: each rank copies its own out and sums all copies.

    The ranks wait for each other once a sum and not twice, as there are two copies that take turns. A rank overwrites
    the copy of the sum before last, and it does so only when all have come to the last sum: then nobody reads it.
    ``copies`` has every rank's for either turn, in rank order. ``buffer`` is mine, which nobody else sees; it belongs
    to the sum from :meth:`start` to :meth:`wait`.
    """

    def __init__(self, buffer: torch.Tensor, copies: Sequence[Sequence[torch.Tensor]], pipes: Pipes) -> None:
        self._buffer = buffer
        self._copies = copies
        self._pipes = pipes
        self._turn = 0
        self._filled = 0

    def start(self) -> None:
        self._pipes.wait(SyncPoint.FILLED, self._filled)  # the last sum's, if it was abandoned
        self._turn = 1 - self._turn
        self._copies[self._turn][self._pipes.place].copy_(self._buffer)
        self._filled = self._pipes.send(SyncPoint.FILLED)

    def poll(self) -> bool:
        return True  # there is nothing that another rank waits for

    def advance(self) -> None:
        """See base class."""

    def wait(self) -> None:
        self._pipes.wait(SyncPoint.FILLED, self._filled)
        first, second, *others = self._copies[self._turn]
        with torch.no_grad():
            torch.add(first, second, out=self._buffer)
            for other in others:
                self._buffer.add_(other)


def in_memory(
    kinds: Sequence[tuple[int, torch.dtype]], pipes: Pipes, exchange: Callable[[Any], list[Any]]
) -> list[tuple[torch.Tensor, SharedSum | CopiedSum]] | None:
    """Make buffers that are summed in memory, each in the way that suits its size; collective.

    Returns:
        Each buffer, zeros, and what sums it; None, on every rank, if some rank cannot map another's memory.
    """
    small = [numel * dtype.itemsize * pipes.size <= SMALL for numel, dtype in kinds]
    arena = SharedArena([kind for kind, is_small in zip(kinds, small, strict=True) for _ in range(1 + is_small)])
    gathered = arena.map_all(pipes.place, exchange)
    if gathered is None:
        return None
    mapped = iter(gathered)
    sums: list[tuple[torch.Tensor, SharedSum | CopiedSum]] = []
    for (numel, dtype), is_small in zip(kinds, small, strict=True):
        buffers = next(mapped)
        if is_small:
            buffer = torch.zeros(numel, dtype=dtype, device="cpu")
            sums.append((buffer, CopiedSum(buffer, [buffers, next(mapped)], pipes)))
        else:
            sums.append((buffers[pipes.place], SharedSum(buffers, pipes)))
    return sums


def sum_share(
    buffers: Sequence[torch.Tensor], place: int, finish: Callable[[torch.Tensor], None] | None = None
) -> None:
    """Sum one rank's share of all ranks' buffers, in rank order, and write it into all of them.

    ``buffers`` are flat, of one dtype and length, and in rank order; ``place`` says whose share. ``finish`` makes the
    result of a sum in place and element by element, while it is in the cache.
    """
    numel, size = buffers[0].numel(), len(buffers)
    start, end = numel * place // size, numel * (place + 1) // size
    with torch.no_grad():
        for low in range(start, end, CHUNK):
            first, *others = [buffer[low : min(low + CHUNK, end)] for buffer in buffers]
            for other in others:
                first.add_(other)
            if finish is not None:
                finish(first)
            for other in others:
                other.copy_(first)
