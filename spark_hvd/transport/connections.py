"""Aborts the connections of a Gloo process group, which Gloo cannot do: collectives in flight on it fail at once.

Otherwise a collective that waits for a rank that has stopped or left waits until the group's timeout, and so does
destroying the group. A connection is identified by its two addresses. It belongs to the group if it came up while the
group was made, and if one of its addresses is one at which a member's Gloo listens for the others.
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
    """Return the sockets of this process, by file descriptor."""
    inodes = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                inodes[int(name)] = status.st_ino
    return inodes


def since(before: Sockets) -> Sockets:
    """Return the sockets of this process that did not exist before."""
    return {fd: inode for fd, inode in sockets().items() if before.get(fd) != inode}


class Abortable(Protocol):
    """Something that carries collectives and can be aborted."""

    def abort(self) -> None:
        """Fail everything in flight on this rank, and on the others where possible. From any thread."""


class Forkable(Abortable, Protocol):
    """Something that a forked child inherits and must give up."""

    def forked(self) -> None:
        """Give up everything in a child of the rank's process: other ranks must not see it outlive the rank."""


class Connections(Abortable):
    """The connections of one process group.

    ``of_group`` returns whether a connection is the group's, given its two addresses, this side's first.
    """

    def __init__(self, candidates: Sockets, of_group: Callable[[Address, Address], bool] = lambda *_: True) -> None:
        self._candidates = candidates
        self._of_group = of_group

    @classmethod
    def since(cls, before: Sockets, group: dist.ProcessGroup, listeners: Sequence[Address] = ()) -> Connections:
        """Find the connections of a new group; collective over it. There are none if it has no Gloo backend.

        ``before`` is an earlier result of :func:`sockets`. ``listeners`` are addresses where Gloo already listened
        then.
        """
        if "gloo" not in str(dist.get_backend_config(group)):
            return cls({})
        fresh = since(before)
        own = listeners or listening(fresh)
        peers = exchange(own, group, torch.device("cpu"))
        known = {tuple(each) for rank, every in enumerate(peers) if rank != dist.get_rank(group) for each in every}
        return cls(fresh, lambda mine, other: mine in own or other in known)

    def abort(self) -> None:
        """End them in both directions; Gloo still closes their file descriptors. From any thread."""
        for ends, (fd, inode) in _ends(self._candidates).items():
            if self._of_group(*ends):
                with contextlib.suppress(OSError), _opened(fd, inode) as end:
                    end.shutdown(socket.SHUT_RDWR)


class Several(Abortable):
    """Several things that are aborted together, in order."""

    def __init__(self, parts: Sequence[Abortable]) -> None:
        self._parts = parts

    def abort(self) -> None:
        """See Abortable.abort."""
        for each in self._parts:
            each.abort()


def cut_to(addresses: Set[Address]) -> None:
    """End this process's connections to some addresses, in both directions. From any thread."""
    Connections(sockets(), lambda _, other: (other[0].removeprefix("::ffff:"), other[1]) in addresses).abort()


def cut_among(candidates: Sockets) -> None:
    """End the TCP connections among some sockets, in both directions. From any thread."""
    Connections(candidates).abort()


def answer(candidates: Sockets, size: int) -> None:
    """Connect to Gloo's listeners among some sockets, in place of peers that will never connect.

    Gloo gives up on a connection that it expects only after the group's timeout. Here it gets the connections that it
    expects, and they end at once.

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
    """Return the addresses at which some of these sockets listen."""
    addresses = []
    for fd, inode in candidates.items():
        with contextlib.suppress(OSError), _opened(fd, inode) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6) and _listens(end):
                host, port = end.getsockname()[:2]
                addresses.append((host, port))
    return addresses


def _listens(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _opened(fd: int, inode: int) -> socket.socket:
    """Return a duplicate of a socket. Raise OSError if its owner has closed it and the number was reused."""
    own = os.dup(fd)
    if os.stat(own).st_ino != inode:
        os.close(own)
        raise OSError(f"file descriptor {fd} belongs to another socket")
    return socket.socket(fileno=own)


def _ends(candidates: Sockets) -> dict[tuple[Address, Address], tuple[int, int]]:
    """Return the TCP connections among some sockets by their addresses, this side's first."""
    connections = {}
    for fd, inode in candidates.items():
        with contextlib.suppress(OSError), _opened(fd, inode) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                here, there = end.getsockname(), end.getpeername()
                connections[(here[0], here[1]), (there[0], there[1])] = fd, inode
    return connections
