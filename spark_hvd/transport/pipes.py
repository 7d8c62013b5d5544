"""Pipes between the ranks of one host: a byte says that a rank has come to a point, and a pipe's end that it has gone.

Gloo needs four switches of threads from rank to rank, each at the mercy of the scheduler where processes share cores. A
byte in a pipe wakes the very thread that waits for it. Each rank keeps the only writing end of its pipes, so that the
kernel tells the others when it closes them or its process ends.
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

from spark_hvd.transport.connections import Abortable
from spark_hvd.transport.waits import why_broken

_READ = 4096
_FULL_SECONDS = 0.001
"""Seconds between two attempts at a pipe that is full: its reader is thousands of points behind."""


class SyncPoint(enum.IntEnum):
    """What a rank can have come to; each kind is counted by itself."""

    FILLED = 0
    SUMMED = 1


class Pipes(Abortable):
    """The pipes of one rank to and from others; one thread at a time sends and waits, any cuts.

    Args:
        ranks: In the world, of all who take part.
        incoming: Reading ends of the others' pipes, by place among `ranks`.
        outgoing: Writing ends to the others, by place.
        timeout: Seconds to wait for the others at one point.
    """

    def __init__(
        self, ranks: Sequence[int], incoming: dict[int, int], outgoing: dict[int, int], timeout: float
    ) -> None:
        self._ranks = ranks
        self.place = next(place for place in range(len(ranks)) if place not in incoming)
        """The place of this rank."""
        self._incoming = incoming
        self._outgoing = outgoing
        self._timeout = timeout
        self._lock = threading.Lock()  # held over each write: abort() closes these ends from any thread
        self._sent = [0 for _ in SyncPoint]
        self._come = {place: [0 for _ in SyncPoint] for place in incoming}
        self._ended = set[int]()
        # Its end tells a thread that waits for the others that abort() was called.
        self._closing, self._open = os.pipe()
        self._places = {fd: place for place, fd in incoming.items()}
        self._poller = select.poll()
        for fd in [*incoming.values(), self._closing]:
            self._poller.register(fd, select.POLLIN)

    @classmethod
    def open(
        cls, ranks: Sequence[int], place: int, timeout: float, exchange: Callable[[Any], list[Any]]
    ) -> Pipes | None:
        """Make pipes between all ranks; collective.

        Args:
            ranks: In the world, of all who take part.
            place: Mine among them.
            timeout: Seconds to wait for the others at one point.
            exchange: Gives every rank the facts of all ranks, in the order of `ranks`.

        Returns:
            None, on every rank, if one cannot open another's pipe.
        """
        others = [other for other in range(len(ranks)) if other != place]
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as undo:
            outgoing, offered, incoming = {}, {}, {}
            for other in others:
                reading, outgoing[other] = os.pipe()
                theirs.callback(os.close, reading)
                undo.callback(os.close, outgoing[other])
                os.set_blocking(outgoing[other], False)
                offered[str(other)] = [reading, os.fstat(reading).st_ino]
            offers = exchange([os.getpid(), offered])
            try:
                for other in others:
                    pid, pipes = offers[other]
                    incoming[other] = _opened(pid, *pipes[str(place)])
                    undo.callback(os.close, incoming[other])
                possible = True
            except OSError:
                possible = False
            # All have opened them now, or nobody uses them: `theirs` are closed in either case.
            if not all(exchange(possible)):
                return None
            undo.pop_all()
            return cls(ranks, incoming, outgoing, timeout)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    def send(self, point: SyncPoint) -> int:
        """Tell all others that I have come to a point.

        Returns:
            How often I have come to one of this kind: what to wait for.

        Raises:
            RuntimeError: A rank has gone, or the pipes are closed.
        """
        for place, fd in self._outgoing.items():
            self._write(place, fd, bytes([point]))
        self._sent[point] += 1
        return self._sent[point]

    def arrived(self, point: SyncPoint, times: int) -> bool:
        """Whether all others have come to a kind of point so many times; does not wait."""
        lacking = [place for place, come in self._come.items() if come[point] < times]
        for place in lacking:
            self._read(place)
        return all(self._come[place][point] >= times for place in lacking)

    def wait(self, point: SyncPoint, times: int) -> None:
        """Wait until all others have come to a kind of point so many times.

        Raises:
            RuntimeError: A rank has gone before it came there, all have waited for too long, or the pipes are closed.
        """
        until = None
        while not self.arrived(point, times):
            lacking = [place for place, come in self._come.items() if come[point] < times]
            for place in lacking:
                if place in self._ended:
                    raise RuntimeError(self._end_of(place))
            now = time.monotonic()
            until = until or now + self._timeout
            if now >= until:
                late = [self._ranks[place] for place in lacking]
                raise RuntimeError(f"timed out after {self._timeout:g} s of waiting for ranks {late}")
            ready = self._poller.poll(1e3 * min(until - now, 3600.0))
            for fd, _ in ready:
                if fd == self._closing:
                    raise RuntimeError(self._closed_here())
                self._read(self._places[fd])

    def abort(self) -> None:
        """Have gone, for the others and for whoever waits here. From any thread."""
        with self._lock:
            if self._open >= 0:
                for fd in [*self._outgoing.values(), self._open]:
                    os.close(fd)
            self._open = -1

    def forked(self) -> None:
        """This is a child of the rank's process, which must not outlive it for the others."""
        self._lock = threading.Lock()
        self.abort()

    def __del__(self) -> None:
        """Nobody waits any more."""
        self.abort()
        for fd in [*self._places, self._closing]:
            os.close(fd)

    def _write(self, place: int, fd: int, data: bytes) -> None:
        until = None
        while True:
            with self._lock:  # abort() might give the number to another file
                if self._open < 0:
                    raise RuntimeError(self._closed_here())
                try:
                    os.write(fd, data)
                    return
                except BlockingIOError:
                    pass
                except BrokenPipeError as error:
                    raise RuntimeError(self._end_of(place)) from error
            until = until or time.monotonic() + self._timeout
            if time.monotonic() >= until:
                raise RuntimeError(
                    f"timed out after {self._timeout:g} s of waiting for rank {self._ranks[place]} to read"
                )
            for other in self._come:  # or two ranks would wait for each other
                self._read(other)
            time.sleep(_FULL_SECONDS)

    def _read(self, place: int) -> None:
        if place in self._ended:
            return
        try:
            data = os.read(self._incoming[place], _READ)
        except BlockingIOError:
            return
        for point in SyncPoint:
            self._come[place][point] += data.count(point)
        if not data:
            self._ended.add(place)
            self._poller.unregister(self._incoming[place])

    def _end_of(self, place: int) -> str:
        return why_broken() or f"the connection to rank {self._ranks[place]} has ended"

    def _closed_here(self) -> str:
        return why_broken() or "this rank has left the world"


def _opened(pid: int, fd: int, inode: int) -> int:
    """The reading end of another rank's pipe; OSError if it cannot be reached: another host, container or user."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK)
    status = os.fstat(own)
    # Somebody else's, if the rank is in another container and the numbers mean another process here.
    if not stat.S_ISFIFO(status.st_mode) or status.st_ino != inode:
        os.close(own)
        raise OSError(f"file descriptor {fd} of process {pid} is not the pipe that the other rank means")
    return own
