"""Cuts the connections of a Gloo process group, which Gloo cannot do itself: what is under way on it fails at once.

Without that, a collective that waits for a rank which has stopped or left goes on waiting until the group's timeout,
and so does whoever destroys the group. A connection is known by its two addresses: it is the group's if it has come up
while the group was made, and one of them is that at which a member's Gloo listens for the others.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence, Set
from typing import Protocol

import torch
import torch.distributed as dist

from spark_hvd.transport.exchange import exchange

Sockets = dict[int, int]
"""The inode of each file descriptor that is a socket."""
Address = tuple[str, int]


def sockets() -> Sockets:
    """The sockets of this process, by file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def since(before: Sockets) -> Sockets:
    """Those sockets of this process that were not there before."""
    return {fd: inode for fd, inode in sockets().items() if before.get(fd) != inode}


class Abortable(Protocol):
    """What carries collectives, and can stop doing so."""

    def abort(self) -> None:
        """Fail what is under way on this rank, and on the others where that is possible. From any thread."""


class Forkable(Abortable, Protocol):
    """What a child of the rank's process inherits, and must not keep."""

    def forked(self) -> None:
        """This is a child of the rank's process, which must not outlive it for the others."""


class Connections(Abortable):
    """The connections of one process group.

    ``of_group`` tells whether a connection is the group's, by its two addresses, mine first.
    """

    def __init__(self, candidates: Sockets, of_group: Callable[[Address, Address], bool] = lambda *_: True) -> None:
        self._candidates = candidates
        self._of_group = of_group

    @classmethod
    def since(cls, before: Sockets, group: dist.ProcessGroup, listeners: Sequence[Address] = ()) -> Connections:
        """Find those of a new group; collective over it. There are none if it has no Gloo.

        ``before`` is what :func:`sockets` gave before; ``listeners`` are where Gloo has listened for longer.
        """
        if "gloo" not in str(dist.get_backend_config(group)):
            return cls({})
        fresh = since(before)
        here = listeners or listening(fresh)
        theirs = exchange(here, group, torch.device("cpu"))
        known = {tuple(each) for rank, every in enumerate(theirs) if rank != dist.get_rank(group) for each in every}
        return cls(fresh, lambda mine, other: mine in here or other in known)

    def abort(self) -> None:
        """End them, in both directions; their file descriptors stay Gloo's to close. From any thread."""
        for ends, (fd, inode) in _ends(self._candidates).items():
            if self._of_group(*ends):
                with contextlib.suppress(OSError), _opened(fd, inode) as end:
                    end.shutdown(socket.SHUT_RDWR)


class Several(Abortable):
    """What is aborted together. Parts are aborted in order."""

    def __init__(self, parts: Sequence[Abortable]) -> None:
        self._parts = parts

    def abort(self) -> None:
        """See Abortable.abort."""
        for each in self._parts:
            each.abort()


def cut_to(addresses: Set[Address]) -> None:
    """End this process' connections to some addresses, in both directions. From any thread."""
    Connections(sockets(), lambda _, other: (other[0].removeprefix("::ffff:"), other[1]) in addresses).abort()


def cut_among(candidates: Sockets) -> None:
    """End those TCP connections that are among some sockets, in both directions. From any thread."""
    Connections(candidates).abort()


def answer(candidates: Sockets, size: int) -> None:
    """Connect to those of Gloo's listeners that are among some sockets, in place of peers that never will.

    Gloo does not look after a listener that is waited for: it would wait until the group's timeout. Here it gets the
    connections that it waits for, which then end.

    Args:
        candidates: The sockets.
        size: Number of ranks. Gloo knows its peers by numbers below that.
    """
    for fd, inode in candidates.items():
        with contextlib.suppress(OSError), _opened(fd, inode) as end:
            if end.family not in (socket.AF_INET, socket.AF_INET6) or not _listens(end):
                continue
            address = end.getsockname()
            for number in range(size):
                with socket.create_connection(address[:2], timeout=1.0) as peer:
                    peer.sendall(struct.pack("=q", number))


def listening(candidates: Sockets) -> list[Address]:
    """Where those among sockets listen that do."""
    found = []
    for fd, inode in candidates.items():
        with contextlib.suppress(OSError), _opened(fd, inode) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6) and _listens(end):
                host, port = end.getsockname()[:2]
                found.append((host, port))
    return found


def _listens(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _opened(fd: int, inode: int) -> socket.socket:
    """A second file descriptor of a socket; OSError if its owner has closed it, and the number is another's by now."""
    own = os.dup(fd)
    if os.stat(own).st_ino != inode:
        os.close(own)
        raise OSError(f"file descriptor {fd} is another's")
    return socket.socket(fileno=own)


def _ends(candidates: Sockets) -> dict[tuple[Address, Address], tuple[int, int]]:
    """The TCP connections among sockets: by their addresses, mine first."""
    found = {}
    for fd, inode in candidates.items():
        with contextlib.suppress(OSError), _opened(fd, inode) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                here, there = end.getsockname(), end.getpeername()
                found[(here[0], here[1]), (there[0], there[1])] = fd, inode
    return found
