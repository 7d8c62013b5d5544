"""All-reduce of buffers that all ranks of one host can see: each rank sums its share of all buffers, in place.

Gloo moves every byte through the loopback interface twice, which costs four copies. Ranks on one host can map each
other's buffers instead. A reduction has three parts. Each rank announces that its buffer is filled. When all have done
so, it sums its share over all ranks, in rank order, and writes it into every rank's buffer (reduce-scatter and
all-gather in one, as in Patarasuk and Yuan, 2009, without the ring). Then it announces that it has. For small buffers,
waiting costs more than moving bytes, so each rank sums all of them for itself, and the third part is not needed. The
announcements go through pipes, so a peer that dies is noticed at once. The memory is anonymous, and is freed with its
last user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from spark_hvd.transport.host.arena import SharedArena
from spark_hvd.transport.host.pipes import Pipes, SyncPoint

CHUNK = 1 << 16
"""Elements summed at a time: few enough that a chunk is still in the cache when it is written to the other ranks."""
SMALL = 1 << 19
"""Total bytes of all ranks' buffers up to which summing them all costs less than waiting a second time."""


class MemorySum(Protocol):
    """The repeated sum of a buffer over all ranks. This rank's buffer is in use from :meth:`start` to :meth:`wait`.

    Raises:
        RuntimeError: Each method raises it if a peer is gone or the network failed.
    """

    def start(self) -> None:
        """Announce that this rank's buffer is filled."""

    def poll(self) -> bool:
        """Do this rank's part if that needs no waiting; return whether it is done.

        Like :meth:`advance`, call it for the buffers in the order in which they were filled.
        """

    def advance(self) -> None:
        """Wait until the others have filled their buffers, and do this rank's part."""

    def wait(self) -> None:
        """Wait until this rank's buffer holds the sum."""


class SharedSum(MemorySum):
    """Repeated sums of a large buffer: each rank sums its share, in place.

    ``buffers`` are those of all ranks, in rank order; this rank's is in use from :meth:`start` to :meth:`wait`.
    ``finish`` is that of :func:`sum_share`.
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
    """Repeated sums of a small buffer: each rank copies its own out and sums all copies.

    The ranks wait for each other once per sum and not twice, because two copies take turns. A rank overwrites the copy
    of the sum before last, and only once all ranks have reached the last sum: then nobody reads that copy. ``copies``
    has every rank's copy for either turn, in rank order. ``buffer`` is this rank's, which nobody else sees; it is in
    use from :meth:`start` to :meth:`wait`.
    """

    def __init__(self, buffer: torch.Tensor, copies: Sequence[Sequence[torch.Tensor]], pipes: Pipes) -> None:
        self._buffer = buffer
        self._copies = copies
        self._pipes = pipes
        self._turn = 0
        self._filled = 0

    def start(self) -> None:
        self._pipes.wait(SyncPoint.FILLED, self._filled)  # the previous sum's, if it was abandoned
        self._turn = 1 - self._turn
        self._copies[self._turn][self._pipes.place].copy_(self._buffer)
        self._filled = self._pipes.send(SyncPoint.FILLED)

    def poll(self) -> bool:
        return True  # no other rank waits for anything here

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
        Each buffer, filled with zeros, and its sum; None, on every rank, if a rank cannot map another's memory.
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

    ``buffers`` are flat, of one dtype and length, in rank order; ``place`` says whose share. ``finish`` turns a sum
    into the result, in place and element by element, while it is in the cache.
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
