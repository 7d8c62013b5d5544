"""Anything that waits while a world is formed is cut, even if the process at first has no file descriptor left."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from spark_hvd.transport.registry import ConnectionRegistry
from spark_hvd.world.errors import CollectiveError


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in taken:
            os.close(each)


def cut_without_descriptors(registry: ConnectionRegistry) -> None:
    with (
        registry.establishing(),
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
        server.accept()[0] as there,
    ):
        with no_descriptor_left():
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(0)
            registry.abort("rank 1 has left")
        for end in (here, there):
            end.settimeout(10)
            assert end.recv(1) == b""


def test_no_descriptor_is_left_when_it_is_cut() -> None:
    with pytest.raises(CollectiveError, match="rank 1 has left"):
        cut_without_descriptors(ConnectionRegistry(0, None, 2))
