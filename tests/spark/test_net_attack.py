"""A run continues, with correct sums, while strangers send garbage to all of its listeners."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

import spark_hvd
from spark_hvd.runner import run_local
from spark_hvd.runner.channel.private_sockets import SocketFolder
from tests.conftest import fork_servers, ranks_alive, start_session, wait_until

cloudpickle.register_pickle_by_value(sys.modules[__name__])
HALF_OPEN = 40
SENT = [
    bytes(range(256)) * 32,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x00" * 64,
    b"\xff" + b"\x00" * 8 + b"\x7f",  # the first bytes of ZeroMQ
    b"null",
    *(struct.pack(form, length) + b"[" for form in (">I", "<I") for length in (1, 1 << 30, 0xFFFFFFFF)),
    *(struct.pack(form, length) + b"[" for form in (">Q", "<Q") for length in (1 << 30, 1 << 40, (1 << 64) - 1)),
]


def train(folder: str) -> int:
    """Check sums until some time after the attack."""
    import torch

    import spark_hvd.torch as hvd

    steps, left = 0, -1
    while left:
        mine = torch.arange(5000.0) + (hvd.rank() + 1) * (steps % 7)
        everyones = hvd.allreduce(mine, op=hvd.Sum, name="sum")
        ranks = hvd.size() * (hvd.size() + 1) // 2
        assert torch.equal(everyones, hvd.size() * torch.arange(5000.0) + ranks * (steps % 7)), steps
        if steps % 10 == 0:
            assert hvd.broadcast_object(("step", steps) if hvd.rank() == 0 else None) == ("step", steps)
        Path(folder, f"rank-{hvd.rank()}").touch()
        over = hvd.allreduce(torch.tensor(float(Path(folder, "attacked").exists())), op=hvd.Sum, name="over")
        left = left - 1 if left > 0 else 50 if over else -1
        steps += 1
        time.sleep(0.002)
    hvd.add_process_set([0, 1])  # opens new connections
    return steps


class Attack(threading.Thread):
    """Connects to all listeners of this process and its descendants, once the ranks train."""

    def __init__(self, folder: Path, ranks: int) -> None:
        super().__init__(daemon=True)
        self._folder, self._ranks = folder, ranks
        self.tcp: set[tuple[str, int]] = set()
        self.unix: set[str] = set()
        self.error: BaseException | None = None

    def run(self) -> None:
        held: list[socket.socket] = []
        try:
            wait_until(lambda: len(list(self._folder.glob("rank-*"))) == self._ranks, 100.0)
            self._look()
            for connect in [*map(_to_port, self.tcp), *map(_to_file, self.unix)]:
                held += [connect() for _ in range(HALF_OPEN)]
                for sent in SENT:
                    for _ in range(3):
                        held.append(connect())
                        with contextlib.suppress(OSError):
                            held[-1].sendall(sent)
                        held.append(connect())
                        with contextlib.suppress(OSError):
                            held[-1].sendall(sent)
                            held[-1].shutdown(socket.SHUT_WR)
                        held.pop().close()
        except BaseException as error:
            self.error = error
        (self._folder / "attacked").touch()
        wait_until(lambda: (self._folder / "over").exists(), 100.0)
        for connection in held:
            connection.close()

    def _look(self) -> None:
        ours = [psutil.Process(), *fork_servers(), *ranks_alive()]
        for process in ours:
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    self.tcp.add((each.laddr.ip, each.laddr.port))
        self.tcp -= _of_spark()
        with SocketFolder.named(f"spark_hvd-{os.geteuid()}") as folder:
            for name in os.listdir(folder.path):
                connection = folder.connect(name)
                if connection is not None:
                    with connection:
                        pid, _, _ = struct.unpack(
                            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                        )
                    if pid in {process.pid for process in ours}:
                        self.unix.add(os.path.join(folder.path, name))


def _to_port(address: tuple[str, int]) -> Callable[[], socket.socket]:
    return lambda: socket.create_connection(address, 5)


def _to_file(path: str) -> Callable[[], socket.socket]:
    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        connection.settimeout(5)
        return connection

    return connect


def _of_spark() -> set[tuple[str, int]]:
    """Return where PySpark itself listens in the driver: its accumulator server serves one client at a time."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    return set() if context is None else {tuple(context._accumulatorServer.server_address)}  # type: ignore[arg-type]


@pytest.fixture
def attack(tmp_path: Path) -> Iterator[Attack]:
    found = Attack(tmp_path, 3)
    found.start()
    yield found
    (tmp_path / "attacked").touch()
    (tmp_path / "over").touch()
    found.join(30)
    assert not found.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "on Spark"])
def test_a_run_under_attack(where: str, attack: Attack, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    arguments: dict[str, Any] = {"args": (str(tmp_path),), "num_proc": 3, "timeout": 120.0}
    if where == "here":
        result = run_local(train, **arguments)
    else:
        request.getfixturevalue("three_slots")
        result = spark_hvd.run(train, **arguments)
    assert attack.error is None
    assert len(attack.tcp) >= 3 + 1, "the hub, the store, and what each rank listens on"
    assert len(attack.unix) >= 1, "the fork server"
    assert min(result) > 50
    assert run_local(len, args=("again",), num_proc=2) == [5, 5], "the next run has its fork server"


@pytest.fixture
def three_slots() -> Any:
    session = start_session("local[3]")
    yield session
    session.stop()
