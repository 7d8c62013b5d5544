"""How the ranks of one host wait for each other: counters in memory that all of them see, and pipes to sleep on.

Gloo needs four thread switches from rank to rank, each at the scheduler's mercy if processes share cores. Here, a rank
that reaches a point writes so into memory, without a system call. A waiting rank polls that memory for a moment, then
sleeps until a byte in a pipe wakes it. Only sleeping ranks are sent a byte. Each rank holds the only write end of its
pipes, so the kernel tells the others when it closes them or its process ends.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spark_hvd.transport.connections import Forkable
from spark_hvd.transport.host.arena import SharedArena
from spark_hvd.transport.host.synchronization import AdaptiveSpin, Fence
from spark_hvd.transport.waits import abort_reason

_READ = 4096
_LOOK_SECONDS = 1.0
"""Seconds after which a sleeping rank checks by itself."""


class SyncPoint(enum.IntEnum):
    """A point that a rank can reach; each kind has its own counter."""

    FILLED = 0
    SUMMED = 1


_NOBODY = -1
_ASLEEP = len(SyncPoint)
"""Index, after a rank's counters, of the flag that says whether it sleeps."""
BOARD = _ASLEEP + 1
"""Number of 64-bit integers on a rank's board."""

Board = memoryview
"""One rank's counters, which the others read; each item is read and written atomically."""


class Pipes(Forkable):
    """The counters and pipes between one rank and others; one thread at a time sends and waits, any thread aborts.

    ``ranks`` are numbers in the world. Indexed by place among them, ``incoming`` has the read ends of the others'
    pipes, ``outgoing`` the write ends to them, and ``boards`` everyone's counters, initially zero. ``timeout`` is the
    number of seconds to wait for the others at one point.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        incoming: dict[int, int],
        outgoing: dict[int, int],
        boards: Sequence[Board],
        timeout: float,
    ) -> None:
        self._ranks = ranks
        self.place = next(place for place in range(len(ranks)) if place not in incoming)
        """The place of this rank."""
        self._incoming = incoming
        self._mine = boards[self.place]
        self._others = [(place, boards[place], outgoing[place]) for place in outgoing]
        self._timeout = timeout
        self._lock = threading.Lock()  # held during each write, as abort() closes these ends from any thread
        self._ended = set[int]()
        self._spin = AdaptiveSpin(len(ranks))
        self._fence = Fence()
        self._published = Fence()
        # Its end tells a thread that waits for the others that abort() was called.
        self._closing, self._open = os.pipe()
        self._places = {fd: place for place, fd in incoming.items()}
        self._poller = select.poll()
        for fd in [*incoming.values(), self._closing]:
            self._poller.register(fd, select.POLLIN)

    @classmethod
    def open(
        cls,
        ranks: Sequence[int],
        place: int,
        timeout: float,
        exchange: Callable[[Any], list[Any]],
        agree: Callable[[bool], bool] | None = None,
    ) -> Pipes | None:
        """Make counters and pipes between all ranks; collective.

        ``ranks`` are numbers in the world, and ``place`` is this rank's index among them. ``timeout`` is the number of
        seconds to wait for the others at one point. ``exchange`` returns the facts of all ranks, in the order of
        ``ranks``. ``agree`` returns whether a fact is true on all ranks that exchange facts, if there are more than
        ``ranks``.

        Returns:
            None, on every rank, if a rank cannot reach another's pipes.
        """
        others = [other for other in range(len(ranks)) if other != place]
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as undo:
            outgoing: dict[int, int] = {}
            incoming: dict[int, int] = {}
            arena = None
            try:
                # There is a pipe for each pair of ranks; their numbers are exchanged through memory.
                arena = SharedArena([(BOARD, torch.int64), (1 + 2 * len(ranks), torch.int64)])
                undo.callback(arena.discard)
                offers = arena.buffers[1].numpy()
                offers[0] = os.getpid()
                for other in others:
                    reading, outgoing[other] = os.pipe()
                    theirs.callback(os.close, reading)
                    undo.callback(os.close, outgoing[other])
                    os.set_blocking(outgoing[other], False)
                    offers[1 + 2 * other :][:2] = reading, os.fstat(reading).st_ino
                possible = True
            except (OSError, AttributeError):  # other systems have no memfd, and some kernels and sandboxes refuse it
                possible = False
            if not (agree(possible) if agree is not None else all(exchange(possible))) or arena is None:
                return None
            gathered = arena.map_all(place, exchange)
            if gathered is not None:
                try:
                    for other in others:
                        theirs_to_me = gathered[1][other].numpy()
                        pid, (reading, inode) = int(theirs_to_me[0]), theirs_to_me[1 + 2 * place :][:2].tolist()
                        incoming[other] = open_pipe(pid, reading, inode, os.O_RDONLY)
                        undo.callback(os.close, incoming[other])
                except OSError:
                    gathered = None
            # All ranks have opened them now, or nobody uses them. `theirs` are closed in either case.
            if not all(exchange(gathered is not None)) or gathered is None:
                return None
            undo.pop_all()
            return cls(ranks, incoming, outgoing, [board.numpy().data for board in gathered[0]], timeout)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    def send(self, point: SyncPoint) -> int:
        """Tell all others that this rank has reached a point.

        Returns:
            How often this rank has reached such a point: the number to wait for.

        Raises:
            RuntimeError: A sleeping rank is gone, or the pipes are closed.
        """
        if self._open < 0:
            raise RuntimeError(self._closed_here())
        times: int = self._mine[point] + 1
        self._published.release()
        self._mine[point] = times
        # Before reading who sleeps: a rank about to sleep says so, then reads this counter. One of the two sees the
        # other.
        self._fence()
        if (lacking := self._missing(point, times)) is None:
            return times
        for place, board, fd in self._others:
            if board[_ASLEEP] and lacking in (_NOBODY, place):
                self._wake(place, fd)
        return times

    def _missing(self, point: SyncPoint, times: int) -> int | None:
        """Return the only other rank that is missing, as its place, _NOBODY if none is, or None if there are several.

        Only the last rank that it waits for wakes a rank. If each did, n ranks would write n² bytes.
        """
        lacking = _NOBODY
        for place, board, _ in self._others:
            if board[point] < times:
                if lacking != _NOBODY:
                    return None
                lacking = place
        return lacking

    def arrived(self, point: SyncPoint, times: int) -> bool:
        """Return whether all others have reached a kind of point this many times; do not wait."""
        if not all(board[point] >= times for _, board, _ in self._others):
            return False
        self._published.acquire()
        return True

    def wait(self, point: SyncPoint, times: int) -> None:
        """Wait until all others have reached a kind of point this many times.

        Raises:
            RuntimeError: A rank is gone that has not reached it, the timeout has expired, or the pipes are closed.
        """
        if self.arrived(point, times) or self._spin.until(lambda: self.arrived(point, times)):
            return
        self._mine[_ASLEEP] = 1
        try:
            self._fence()
            self._sleep(point, times)
        finally:
            self._mine[_ASLEEP] = 0

    def _sleep(self, point: SyncPoint, times: int) -> None:
        until = time.monotonic() + self._timeout
        while not self.arrived(point, times):
            lacking = [place for place, board, _ in self._others if board[point] < times]
            for place in lacking:
                if place in self._ended:
                    raise RuntimeError(self._end_of(place))
            left = until - time.monotonic()
            if left <= 0:
                late = [self._ranks[place] for place in lacking]
                raise RuntimeError(f"timed out after {self._timeout:g} s of waiting for ranks {late}")
            for fd, _ in self._poller.poll(1e3 * min(left, _LOOK_SECONDS)):
                if fd == self._closing:
                    raise RuntimeError(self._closed_here())
                self._read(self._places[fd])

    def abort(self) -> None:
        """Leave: the others, and threads that wait here, see this rank as gone. From any thread."""
        with self._lock:
            if self._open >= 0:
                for fd in [*(fd for _, _, fd in self._others), self._open]:
                    os.close(fd)
            self._open = -1

    def forked(self) -> None:
        """See Forkable.forked."""
        self._lock = threading.Lock()
        self.abort()

    def __del__(self) -> None:
        """Close the pipes; no thread waits any more."""
        self.abort()
        for fd in [*self._places, self._closing]:
            os.close(fd)

    def _wake(self, place: int, fd: int) -> None:
        with self._lock:  # otherwise abort() might close the descriptor, and another file get its number
            if self._open < 0:
                raise RuntimeError(self._closed_here())
            try:
                os.write(fd, b"\0")
            except BlockingIOError:
                pass  # full of bytes, each of which wakes the rank
            except BrokenPipeError as error:
                raise RuntimeError(self._end_of(place)) from error

    def _read(self, place: int) -> None:
        if not os.read(self._incoming[place], _READ):
            # Everything that it wrote earlier is visible by now.
            self._ended.add(place)
            self._poller.unregister(self._incoming[place])

    def _end_of(self, place: int) -> str:
        return abort_reason() or f"the connection to rank {self._ranks[place]} has ended"

    def _closed_here(self) -> str:
        return abort_reason() or "this rank has left the world"


def open_pipe(pid: int, fd: int, inode: int, mode: int) -> int:
    """Open another rank's pipe. Raise OSError if it is on another host, in another container or another user's.

    ``fd`` is any end of the pipe, as a number of process ``pid``; ``mode`` is os.O_RDONLY or os.O_WRONLY.
    """
    own = os.open(f"/proc/{pid}/fd/{fd}", mode | os.O_NONBLOCK)
    status = os.fstat(own)
    # The rank may be in another container, where the numbers belong to another process.
    if not stat.S_ISFIFO(status.st_mode) or status.st_ino != inode:
        os.close(own)
        raise OSError(f"file descriptor {fd} of process {pid} is not the other rank's pipe")
    return own
