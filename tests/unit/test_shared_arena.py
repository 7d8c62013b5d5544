"""Arenas are mapped only where they are what the other rank means, and leave no descriptor behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spark_hvd.transport.host.shared_memory import SharedArena

ROOT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]
RANK = """
import json, os, sys
import torch
from spark_hvd.transport.host.shared_memory import SharedArena, sum_share

rank, connection = int(sys.argv[1]), os.fdopen(int(sys.argv[2]), "r+b", buffering=0)

def exchange(fact):
    connection.write(json.dumps(fact).encode() + b"\\n")
    theirs = json.loads(connection.readline())
    return [fact, theirs] if rank == 0 else [theirs, fact]

arena = SharedArena([(8, torch.float32)])
arena.buffers[0].fill_(rank + 1.0)
mapped = arena.map_all(rank, exchange)
exchange(None)
if mapped is not None:
    sum_share(mapped[0], rank)
    exchange(None)
print(os.getpid(), mapped is not None, arena.buffers[0].tolist())
"""


def two_ranks(*prefix: str) -> list[str]:
    """What two processes with an arena each print of it."""
    ends = socket.socketpair()
    processes = [
        subprocess.Popen(
            [*prefix, sys.executable, "-c", RANK, str(rank), str(end.fileno())],
            pass_fds=[end.fileno()],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for rank, end in enumerate(ends)
    ]
    for end in ends:
        end.close()
    return [process.communicate(timeout=60)[0].strip() for process in processes]


def test_ranks_in_two_pid_namespaces_do_not_take_each_other_s_memory_for_their_own() -> None:
    """Both are process 1 with the same descriptor: what the numbers name in one namespace is another's memory."""
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a pid namespace (unshare --pid)")
    assert two_ranks(*NAMESPACE) == [f"1 False {[rank + 1.0] * 8}" for rank in range(2)]


def test_an_exchange_that_fails_leaves_no_descriptor_open() -> None:
    def exchange(fact: Any) -> list[Any]:
        raise RuntimeError("the world broke while it formed")

    def arenas() -> int:
        links = (Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd"))
        return sum("memfd:spark_hvd" in os.readlink(link) for link in links if link.is_symlink())

    before = arenas()
    arena = SharedArena([(8, torch.float32)])
    with pytest.raises(RuntimeError, match="broke"):
        arena.map_all(0, exchange)
    del arena
    assert arenas() == before
