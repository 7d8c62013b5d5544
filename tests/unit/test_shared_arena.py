"""Arenas are mapped only where they are what the other rank means, and leave no descriptor behind."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from spark_hvd.transport.host.arena import SharedArena
from spark_hvd.transport.host.shared_memory import sum_share
from spark_hvd.transport.torch_private import TCPStore
from tests.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]
CLONE_NEWPID, CLONE_NEWNS = 0x20000000, 0x00020000
SAME = 200


def in_a_namespace_of_its_own() -> tuple[int, bool, list[float]]:
    """In a rank: make an arena in a child that is process 1, and map that of the other rank.

    Returns:
        The child's process ID, whether it has mapped the arenas, and what its own holds.
    """
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60))
    reader, writer = os.pipe()
    assert ctypes.CDLL(None).unshare(CLONE_NEWPID | CLONE_NEWNS) == 0
    if child := os.fork():
        os.close(writer)
        os.waitpid(child, 0)
        with open(reader) as file:
            pid, mapped, held = json.load(file)
        if rank == 1:
            store.set("ended", "")
        else:  # the store is this rank's
            store.wait(["ended"])
        return pid, mapped, held
    try:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
        numbers = itertools.count()

        def exchange(fact: object) -> list[Any]:
            number = next(numbers)
            store.set(f"{number} of {rank}", json.dumps(fact))
            return [json.loads(store.get(f"{number} of {each}")) for each in range(2)]

        while os.open(os.devnull, os.O_RDONLY) < SAME:  # both arenas have the next descriptor
            pass
        arena = SharedArena([(8, torch.float32)])
        arena.buffers[0].fill_(rank + 1.0)
        mapped = arena.map_all(rank, exchange)
        exchange(None)
        if mapped is not None:
            sum_share(mapped[0], rank)
            exchange(None)
        os.write(writer, json.dumps([os.getpid(), mapped is not None, arena.buffers[0].tolist()]).encode())
    finally:
        os._exit(0)


def test_ranks_in_two_pid_namespaces_do_not_take_each_other_s_memory_for_their_own() -> None:
    """Both are process 1 with the same descriptor: what the numbers name in one namespace is another's memory."""
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a pid namespace (unshare --pid)")
    with ranks(2, join=False) as world:
        assert world.run(in_a_namespace_of_its_own) == [(1, False, [rank + 1.0] * 8) for rank in range(2)]


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
