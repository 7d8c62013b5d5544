"""A rank's store asks no DNS for the names of its peers: hosts made of a mount namespace, and a DNS that counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

AGAIN_AND_AGAIN = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
# In a process of its own, as what is tested lasts; the DNS counts questions and answers none.
PROGRAM = """
import socket, sys, threading
from datetime import timedelta
from torch.distributed import TCPStore
from spark_hvd.transport.lookups import without_lookups

dns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
dns.bind(("127.0.0.53", 53))
asked = []
def count():
    while True:
        asked.append(dns.recv(512))
threading.Thread(target=count, daemon=True).start()
if sys.argv[1] == "without":
    without_lookups()
store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
print(len(asked))
try:
    socket.getaddrinfo("example.test", 80)  # the user's own questions are asked
except socket.gaierror:
    print(len(asked) > 0)
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> list[str]:
    """A command before a command that runs it where the DNS is one of ours."""
    config = tmp_path / "resolv.conf"
    config.write_text("nameserver 127.0.0.53\noptions timeout:1 attempts:1\n")
    by = ["unshare", "--mount", "sh", "-c", f'mount --bind {config} /etc/resolv.conf && exec "$@"', "sh"]
    tried = subprocess.run([*by, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"not permitted here: {tried.stderr}")
    return by


@pytest.mark.skipif(AGAIN_AND_AGAIN, reason="before 2.9 torch looks names up whether or not a look-up has failed")
@pytest.mark.parametrize(("way", "questions"), [("without", 0), ("with", 1)])
def test_a_store_asks_for_no_names(elsewhere: list[str], way: str, questions: int) -> None:
    done = subprocess.run([*elsewhere, sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(questions), "True"], done.stderr
    assert ("cannot be retrieved" in done.stderr) is (way == "with")
