"""A rank's store does not query DNS for its peers' names: hosts are mount namespaces, and a DNS server counts."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch

from tests.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CLONE_NEWNS = 0x00020000
AGAIN_AND_AGAIN = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)


def asked_for(way: str, config: str) -> tuple[int, bool]:
    """In a process of its own, as what is tested lasts: make a store where the DNS counts questions and answers none.

    Returns:
        The number of the store's questions, and whether the user's own questions are asked.
    """
    import socket
    import threading
    from datetime import timedelta

    from spark_hvd.transport.lookups import without_lookups
    from spark_hvd.transport.torch_private import TCPStore

    assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", config, "/etc/resolv.conf"], check=True)
    dns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    dns.bind(("127.0.0.53", 53))
    asked: list[bytes] = []

    def count() -> None:
        while True:
            asked.append(dns.recv(512))

    threading.Thread(target=count, daemon=True).start()
    if way == "without":
        without_lookups()
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    of_the_store = len(asked)
    del store
    try:
        socket.getaddrinfo("example.test", 80)
    except socket.gaierror:
        return of_the_store, len(asked) > of_the_store
    raise AssertionError("a DNS that is silent has answered")


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A file that names our DNS."""
    file = tmp_path / "resolv.conf"
    file.write_text("nameserver 127.0.0.53\noptions timeout:1 attempts:1\n")
    bind = ["mount", "--bind", str(file), "/etc/resolv.conf"]
    tried = subprocess.run(["unshare", "--mount", *bind], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"not permitted here: {tried.stderr}")
    return str(file)


@pytest.mark.skipif(AGAIN_AND_AGAIN, reason="before 2.9 torch looks names up whether or not a look-up has failed")
@pytest.mark.parametrize(("way", "questions"), [("without", 0), ("with", 1)])
def test_a_store_asks_for_no_names(config: str, way: str, questions: int, capfd: pytest.CaptureFixture[str]) -> None:
    with ranks(1, join=False) as rank:
        assert rank.run(asked_for, way, config) == [(questions, True)]
    assert ("cannot be retrieved" in capfd.readouterr().err) is (way == "with")
