"""Cuts the connections of a Gloo process group, which Gloo cannot do itself: what is under way on it fails at once.

Without that, a collective that waits for a rank which has stopped or left goes on waiting until the group's timeout,
and so does whoever destroys the group. A connection is known by its two addresses: it is the group's if it has come up
while the group was made, and another member has its other end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterable, Set
from typing import Protocol

import torch
import torch.distributed as dist

from spark_hvd.transport.exchange import exchange

Sockets = dict[int, int]
"""The inode of each file descriptor that is a socket."""


def sockets() -> Sockets:
    """The sockets of this process, by file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


class Abortable(Protocol):
    """What carries collectives, and can stop doing so."""

    def abort(self) -> None:
        """Fail what is under way on this rank, and on the others where that is possible. From any thread."""
        ...


class Connections(Abortable):
    """The connections of one process group.

    Args:
        mine: Its sockets in this process.
    """

    def __init__(self, mine: Sockets) -> None:
        self._mine = mine

    @classmethod
    def since(cls, before: Sockets, group: dist.ProcessGroup) -> Connections:
        """Find those of a new group; collective over it. There are none if it has no Gloo.

        Args:
            before: What :func:`sockets` gave before the group was made.
            group: The group.
        """
        if "gloo" not in str(dist.get_backend_config(group)):
            return cls({})
        ends = _ends(item for item in sockets().items() if item not in before.items())
        place = dist.get_rank(group)
        theirs = exchange([[*here, *there] for here, there in ends], group, torch.device("cpu"))
        others = {tuple(end) for rank, known in enumerate(theirs) if rank != place for end in known}
        return cls({fd: inode for (here, there), (fd, inode) in ends.items() if (*there, *here) in others})

    def abort(self) -> None:
        """End them, in both directions; their file descriptors stay Gloo's to close. From any thread."""
        for fd, inode in self._mine.items():
            with contextlib.suppress(OSError), _opened(fd, inode) as end:
                end.shutdown(socket.SHUT_RDWR)


Address = tuple[str, int]


def cut_to(addresses: Set[Address]) -> None:
    """End this process' connections to some addresses, in both directions. From any thread."""
    for (_, (host, port)), (fd, inode) in _ends(sockets().items()).items():
        if (host.removeprefix("::ffff:"), port) in addresses:
            Connections({fd: inode}).abort()


def cut_among(candidates: Sockets) -> None:
    """End those TCP connections that are among some sockets, in both directions. From any thread."""
    for fd, inode in _ends(candidates.items()).values():
        Connections({fd: inode}).abort()


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


def _listens(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _opened(fd: int, inode: int) -> socket.socket:
    """A second file descriptor of a socket; OSError if its owner has closed it, and the number is another's by now."""
    own = os.dup(fd)
    if os.stat(own).st_ino != inode:
        os.close(own)
        raise OSError(f"file descriptor {fd} is another's")
    return socket.socket(fileno=own)


def _ends(candidates: Iterable[tuple[int, int]]) -> dict[tuple[Address, Address], tuple[int, int]]:
    """The TCP connections among sockets: by their addresses, mine first."""
    found = {}
    for fd, inode in candidates:
        with contextlib.suppress(OSError), _opened(fd, inode) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                here, there = end.getsockname(), end.getpeername()
                found[(here[0], here[1]), (there[0], there[1])] = fd, inode
    return found
