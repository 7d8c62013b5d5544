"""Anonymous shared memory that other ranks of the host can map; it is freed with its last user."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch

_ALIGNMENT = 4096
_MARK_BYTES = 16


class SharedArena:
    """Buffers of this rank, in one block of memory that other ranks of the host can map.

    ``kinds`` lists numbers of elements and dtypes; buffers start as zeros.
    """

    def __init__(self, kinds: Sequence[tuple[int, torch.dtype]]) -> None:
        self._kinds = kinds
        self._end = sum(_padded(numel * dtype.itemsize) for numel, dtype in kinds)
        self._size = self._end + _ALIGNMENT
        # Follows the buffers. Other ranks recognise this memory by it: in another container, the numbers of processes
        # and descriptors mean something else.
        self._mark = secrets.token_bytes(_MARK_BYTES)
        with contextlib.ExitStack() as undo:
            self._fd = os.memfd_create("spark_hvd", os.MFD_CLOEXEC)
            undo.callback(os.close, self._fd)
            os.ftruncate(self._fd, self._size)
            os.pwrite(self._fd, self._mark, self._end)
            self.buffers = self._map(self._fd)
            undo.pop_all()

    def discard(self) -> None:
        """Close the descriptor, since nobody will map the memory any more; mappings stay. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def map_all(self, rank: int, exchange: Callable[[Any], list[Any]]) -> list[list[torch.Tensor]] | None:
        """Map the arenas of all ranks; collective. Every rank must have buffers of the same kinds.

        Returns:
            Every rank's tensor for each buffer, in rank order; None, on every rank, if one cannot map another's arena.
        """
        try:
            places = exchange([os.getpid(), self._fd, self._mark.hex()])
            try:
                arenas = [self.buffers if other == rank else self._attach(place) for other, place in enumerate(places)]
            except OSError:
                arenas = None
            possible = all(exchange(arenas is not None))
        finally:
            self.discard()  # all have mapped it, or nobody will
        return [list(gathered) for gathered in zip(*arenas, strict=True)] if arenas and possible else None

    def _attach(self, place: Sequence[Any]) -> list[torch.Tensor]:
        """Map another rank's arena. Raise OSError if it is on another host, in another container or another user's."""
        pid, fd, mark = place
        # Opening through /proc needs neither a name in a file system nor a socket to pass the descriptor.
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK)
        try:
            # The rank may be in another container, where the numbers belong to another process.
            if os.fstat(own).st_size != self._size or os.pread(own, _MARK_BYTES, self._end).hex() != mark:
                raise OSError(f"file descriptor {fd} of process {pid} is not the other rank's arena")
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
