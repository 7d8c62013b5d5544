"""Worlds that a rank leaves as soon as it has joined, while connections between the ranks may still come up."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from typing import Any
from unittest import mock

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.engine.channel import CoordinatorSockets
from tests.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SLOW = 0.7
"""Seconds until the connection to the coordinator comes up: longer than any socket lingers."""


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def slowly(endpoint: str) -> str:
    """Return another address for an endpoint, at which every connection comes up slowly."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    listener = socket.create_server((host, 0))

    def lead() -> None:
        while True:
            near, _ = listener.accept()
            time.sleep(SLOW)
            far = socket.create_connection((host, int(port)))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=lead, daemon=True).start()
    return f"tcp://{host}:{listener.getsockname()[1]}"


def slow_to(connection: int) -> Any:
    """Slow down one of the two connections of each member."""
    make = CoordinatorSockets.__init__

    def made(self: CoordinatorSockets, *args: Any) -> None:
        make(self, *args)
        self.endpoints[connection] = slowly(self.endpoints[connection])

    return mock.patch.object(CoordinatorSockets, "__init__", made)


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("connection", [0, 1])
def test_a_rank_leaves_at_once(leaver: int, connection: int) -> None:
    def fn() -> str:
        hvd.shutdown()
        with slow_to(connection):
            hvd.init()
        if hvd.rank() == leaver:
            hvd.shutdown()
            return ""
        with pytest.raises(hvd.CollectiveError) as caught:
            hvd.allreduce(torch.ones(1))
        hvd.shutdown()
        return str(caught.value)

    with ranks(2) as world:
        texts = world.run(fn)
        assert f"rank {leaver} (on 127.0.0.1) has left the world" in texts[1 - leaver]


def test_all_leave_at_once() -> None:
    def fn() -> int:
        for _ in range(10):
            hvd.shutdown()
            hvd.init()
        return int(hvd.allreduce(torch.ones(1), op=hvd.Sum))

    with ranks(4, timeout=20) as world:
        assert world.run(fn) == [4] * 4
