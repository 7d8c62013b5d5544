"""Entering and leaving a world: alone, under torchrun, with the user's own process group, many times."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import zmq

import spark_hvd.torch as hvd
from spark_hvd.context import global_state
from spark_hvd.context import init as context
from tests.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).resolve().parents[2]


def everything() -> tuple[Any, ...]:
    places = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    return (*places, hvd.is_homogeneous())


def reduced() -> float:
    return float(hvd.allreduce(torch.tensor(1.0 + hvd.rank()), op=hvd.Sum))


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.mark.parametrize(
    "call", [hvd.rank, hvd.size, hvd.is_homogeneous, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))]
)
def test_before_init(call: Any) -> None:
    assert not hvd.is_initialized()
    with pytest.raises(hvd.NotInitializedError, match=r"call hvd\.init\(\)"):
        call()


def test_alone() -> None:
    try:
        for _ in range(3):
            hvd.init()
            hvd.init()
            assert everything() == (0, 1, 0, 1, 0, 1, True)
            assert reduced() == 1.0
            assert dist.get_world_size() == 1  # DDP and others find their group
            hvd.shutdown()
            hvd.shutdown()
            assert not hvd.is_initialized()
            assert not dist.is_initialized()
    finally:
        hvd.shutdown()


def test_again_and_again() -> None:
    def fn() -> list[float]:
        sums = []
        for _ in range(5):
            hvd.shutdown()
            assert not hvd.is_initialized()
            hvd.init()
            hvd.init()
            sums.append(reduced())
        return sums

    with ranks(2) as world:
        assert world.run(fn) == [[3.0] * 5] * 2


def test_a_socket_that_is_never_reaped() -> None:
    def fn() -> float:
        # libzmq does this to us by itself, once in a hundred times on a busy machine; an open socket does it always.
        with global_state.current().engine._context.socket(zmq.PUSH):
            hvd.shutdown()
            hvd.init()
            return reduced()

    with ranks(2, timeout=10) as world:
        assert world.run(fn) == [3.0] * 2


def test_leaving_starts_no_thread() -> None:
    def fn() -> float:
        # As Python 3.12 does when the interpreter exits, which is when most programs leave their world.
        with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't create new thread")):
            hvd.shutdown()
        hvd.init()
        return reduced()

    with ranks(2, timeout=10) as world:
        assert world.run(fn) == [3.0] * 2


def test_joined_already() -> None:
    def fn() -> None:
        now = global_state.current()
        assert now.owns_default_group
        hvd.init()
        assert global_state.current() is now
        with pytest.raises(RuntimeError, match="of a world already"):
            context.join(now.world, now.kv)

    with ranks(1) as world:
        world.run(fn)


def test_plain_variables() -> None:
    def fn() -> tuple[Any, ...]:
        hvd.init()
        first = everything(), reduced()
        hvd.shutdown()
        hvd.init()
        return (*first, reduced())

    with ranks(2, join=False) as world:
        assert world.run(fn) == [((rank, 2, rank, 2, 0, 1, True), 3.0, 3.0) for rank in range(2)]


def test_own_process_group_is_used_and_kept() -> None:
    def fn() -> tuple[Any, ...]:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
        results = []
        for _ in range(2):
            hvd.init()
            assert not global_state.current().owns_default_group
            results.append(reduced())
            hvd.shutdown()
            assert dist.group.WORLD is group
        one = torch.ones(1)
        dist.all_reduce(one)
        dist.destroy_process_group()
        return (*results, float(one))

    with ranks(2, join=False) as world:
        assert world.run(fn) == [(3.0, 3.0, 2.0)] * 2


TORCHRUN_PROGRAM = """
import os, torch, torch.distributed as dist, spark_hvd.torch as hvd
hvd.init()
assert dist.is_initialized() and hvd.size() == 2
for name, value in dict(RANK=hvd.rank(), LOCAL_RANK=hvd.local_rank(), LOCAL_WORLD_SIZE=hvd.local_size()).items():
    assert int(os.environ[name]) == value, name
total = hvd.allreduce(torch.tensor(1.0 + hvd.rank()), op=hvd.Sum)
hvd.shutdown()
hvd.init()
again = hvd.allgather(torch.tensor([hvd.rank()]))
open(f"{os.environ['FOLDER']}/{hvd.rank()}", "w").write(f"{total.item()} {again.tolist()} {hvd.cross_size()}")
"""


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TORCHRUN_PROGRAM)
    done = python(
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "127.0.0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(program)),
        FOLDER=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["3.0 [0, 1] 1"] * 2


@pytest.mark.slow  # it loads torch
def test_exit_without_shutdown() -> None:
    done = python("-c", "import spark_hvd.torch as hvd; hvd.init(); print(hvd.size())")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_unreachable_rank_zero() -> None:
    def fn() -> str:
        from datetime import timedelta

        from spark_hvd.transport.torch_private import HashStore
        from spark_hvd.world.layout import World, WorldLayout

        kv = HashStore()
        kv.set_timeout(timedelta(seconds=1))
        me = WorldLayout.from_hosts(["127.0.0.1"] * 2).of_process(1)
        with pytest.raises(hvd.CollectiveError, match="rank 1 of 2 could not meet") as caught:
            context.join(World(me, None), kv)
        assert not hvd.is_initialized()
        return str(caught.value.__cause__ is not None)

    with ranks(1, join=False) as world:
        assert world.run(fn) == ["True"]
