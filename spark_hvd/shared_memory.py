"""All-reduce of buffers that all ranks of one host can see: each rank sums its slice of everyone's, in place.

Gloo moves every byte through the loopback interface, twice, at the cost of four copies. Ranks on one host can instead
map each other's buffers. A reduction has three parts: a token says that my buffer is filled; when all have said so, I
sum my slice over all ranks, in rank order, and write it into every rank's buffer (reduce-scatter and all-gather in one,
as in Patarasuk and Yuan, 2009, without the ring); a second token says that I have. The tokens are tiny all-reduces, so
a peer that dies is noticed as ever. The two kinds have a process group each: ranks fill buckets in one order and sum
them in one order, but how many they fill before they come to sum one is a matter of luck. The memory has no name and
goes with its last user.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spark_hvd.waits import wait_for

_ALIGNMENT = 4096
_MARK_BYTES = 16
_CHUNK = 1 << 16
"""Elements summed at a time: small enough that a chunk is still in the cache when it is written to the other ranks."""


class SharedArena:
    """Buffers of this rank, in one piece of memory that other ranks of the host can map.

    Args:
        kinds: Number of elements and dtype of each buffer; they start as zeros.
    """

    def __init__(self, kinds: Sequence[tuple[int, torch.dtype]]) -> None:
        self._kinds = kinds
        self._end = sum(_padded(numel * dtype.itemsize) for numel, dtype in kinds)
        self._size = self._end + _ALIGNMENT
        # Behind the buffers: by it the other ranks know this memory, as numbers of processes and descriptors mean
        # something else in another container.
        self._mark = secrets.token_bytes(_MARK_BYTES)
        with contextlib.ExitStack() as undo:
            self._fd = os.memfd_create("spark_hvd", os.MFD_CLOEXEC)
            undo.callback(os.close, self._fd)
            os.ftruncate(self._fd, self._size)
            os.pwrite(self._fd, self._mark, self._end)
            self.buffers = self._map(self._fd)
            undo.pop_all()

    def map_everyones(self, rank: int, exchange: Callable[[Any], list[Any]]) -> list[list[torch.Tensor]] | None:
        """Map the arenas of all ranks; collective, every rank has buffers of the same kinds.

        Args:
            rank: My rank.
            exchange: Gives every rank the facts of all ranks, in rank order.

        Returns:
            For each buffer every rank's tensor, in rank order; None, on every rank, if some rank cannot map another's.
        """
        try:
            places = exchange([os.getpid(), self._fd, self._mark.hex()])
            try:
                arenas = [self.buffers if other == rank else self._attach(place) for other, place in enumerate(places)]
            except OSError:
                arenas = None
            possible = all(exchange(arenas is not None))
        finally:
            os.close(self._fd)  # all have mapped it, or nobody will: the mappings stay
        return [list(everyones) for everyones in zip(*arenas, strict=True)] if arenas and possible else None

    def _attach(self, place: Sequence[Any]) -> list[torch.Tensor]:
        """Map another rank's arena; OSError if it cannot be reached: another host, container or user."""
        pid, fd, mark = place
        # Opening through /proc needs no name in a file system and no socket to pass the descriptor over.
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK)
        try:
            # Somebody else's, if the rank is in another container and the numbers mean another process here.
            if os.fstat(own).st_size != self._size or os.pread(own, _MARK_BYTES, self._end).hex() != mark:
                raise OSError(f"file descriptor {fd} of process {pid} is not the arena that the other rank means")
            return self._map(own)
        finally:
            os.close(own)

    def _map(self, fd: int) -> list[torch.Tensor]:
        memory = mmap.mmap(fd, self._size)
        tensors, offset = [], 0
        for numel, dtype in self._kinds:
            tensors.append(torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset))
            offset += _padded(numel * dtype.itemsize)
        return tensors


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class SharedSum:
    """One sum over all ranks' buffers, under way. See the module's description.

    Args:
        buffers: Every rank's buffer, in rank order; mine is filled, and belongs to the reduction until :meth:`wait`.
        filled: The process group for the tokens that say that a buffer is filled.
        summed: The process group for the tokens that say that a slice is summed.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], filled: dist.ProcessGroup, summed: dist.ProcessGroup) -> None:
        self._buffers = buffers
        self._groups = filled, summed
        self._filled = _token(filled)
        self._summed: dist.Work | None = None

    def poll(self) -> bool:
        """Sum my slice if all ranks have filled their buffers by now; returns whether it is summed.

        As :meth:`advance`, to be called for one bucket after the other, in plan order.
        """
        if self._summed is None and self._filled.is_completed():
            self._sum()
        return self._summed is not None

    def advance(self) -> None:
        """Wait until all ranks have filled their buffers, and sum my slice.

        Raises:
            RuntimeError: as the backend raises it when a peer has gone.
        """
        if self._summed is None:
            self._sum()

    def wait(self) -> None:
        """Wait until every rank's buffer holds the sum.

        Raises:
            RuntimeError: as the backend raises it when a peer has gone.
        """
        self.advance()
        assert self._summed is not None
        wait_for(self._summed, *self._groups)

    def _sum(self) -> None:
        wait_for(self._filled, *self._groups)
        _, summed = self._groups
        sum_share(self._buffers, dist.get_rank(summed))
        self._summed = _token(summed)


def sum_share(buffers: Sequence[torch.Tensor], place: int) -> None:
    """Sum one rank's share of all ranks' buffers, in rank order, and write it into all of them.

    Args:
        buffers: Flat, of one dtype and length, in rank order.
        place: Whose share.
    """
    numel, size = buffers[0].numel(), len(buffers)
    start, end = numel * place // size, numel * (place + 1) // size
    with torch.no_grad():
        for low in range(start, end, _CHUNK):
            first, *others = [buffer[low : min(low + _CHUNK, end)] for buffer in buffers]
            for other in others:
                first.add_(other)
            for other in others:
                other.copy_(first)


def _token(group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work | None = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
    assert work is not None
    return work
