"""Worlds that come and go with their named lanes: nothing stays behind, nothing hangs, nothing old is used."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from torch.distributed import distributed_c10d

import spark_hvd.torch as hvd
from spark_hvd import context
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def two() -> Iterator[Ranks]:
    with ranks(2, forked=True, timeout=20) as world:
        yield world


@pytest.fixture
def three() -> Iterator[Ranks]:
    with ranks(3, forked=True, timeout=20) as world:
        yield world


def some_collectives() -> None:
    rank, size = hvd.rank(), hvd.size()
    for _ in range(3):
        handles = [hvd.allreduce_async(torch.full((10,), 1.0 + rank), op=hvd.Sum, name=name) for name in "abc"]
        assert all(handle.wait()[0] == size * (size + 1) / 2 for handle in handles)
    assert hvd.allgather(torch.full((rank,), rank), name="g").tolist() == [r for r in range(size) for _ in range(r)]
    assert hvd.allreduce(torch.ones(10), op=hvd.Adasum, name="adasum").tolist() == [1.0] * 10
    assert hvd.allreduce(torch.ones(1 << 19), op=hvd.Sum, name="large")[-1] == size
    hvd.barrier()


def possessions() -> dict[str, int]:
    """What this process holds on to."""
    gc.collect()
    kinds = [os.readlink(path) for path in _descriptors()]
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(kinds),
        "sockets": sum(kind.startswith("socket:") for kind in kinds),
        "contexts": sum(
            type(thing).__name__ == "Context" and "zmq" in type(thing).__module__ for thing in gc.get_objects()
        ),
        "process groups": len(distributed_c10d._world.pg_map),
        "lanes": sum(type(thing).__name__ in ("Lane", "Engine") for thing in gc.get_objects()),
        "memory mappings": sum("memfd:spark_hvd" in line for line in open("/proc/self/maps")),
    }


def _descriptors() -> list[str]:
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [path for path in paths if os.path.lexists(path)]


def settled(wanted: dict[str, int]) -> dict[str, int]:
    """What this process holds on to, once what ends in the background has ended."""
    deadline = time.monotonic() + 5
    while (found := possessions()) != wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def test_a_hundred_worlds_leave_nothing(two: Ranks) -> None:
    def fn() -> tuple[dict[str, int], dict[str, int], int]:
        for life in range(100):
            hvd.shutdown()
            hvd.init()
            some_collectives()
            if life == 19:
                before, memory = possessions(), psutil.Process().memory_info().rss
        return before, settled(before), psutil.Process().memory_info().rss - memory

    for before, after, grown in two.run(fn):
        assert after == before
        assert grown < 16 << 20


def test_process_sets_leave_nothing(three: Ranks) -> None:
    def fn() -> tuple[dict[str, int], dict[str, int]]:
        for life in range(12):
            hvd.shutdown()
            hvd.init(process_sets=[hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])])
            added = hvd.add_process_set([1, 2])
            if added.included():
                assert hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=added, name="x").tolist() == [2.0] * 3
            if life % 2:
                assert hvd.remove_process_set(added)
            some_collectives()
            if life == 3:
                before = possessions()
        return before, settled(before)

    for before, after in three.run(fn):
        assert after == before


def test_worlds_that_nobody_uses(two: Ranks) -> None:
    def fn() -> float:
        began = time.monotonic()
        for _ in range(40):
            hvd.shutdown()
            hvd.init()
        some_collectives()
        return time.monotonic() - began

    assert max(two.run(fn)) < 20


@pytest.mark.parametrize("elements", [10, 1 << 22])
def test_shutdown_with_work_in_flight(two: Ranks, elements: int) -> None:
    def fn() -> tuple[float, dict[str, int], dict[str, int]]:
        some_collectives()
        before = possessions()
        for turn in range(4):
            tensors = [torch.ones(elements) for _ in range(6)]
            ops = [hvd.Sum, hvd.Adasum] if turn % 2 else [hvd.Sum]
            handles = [
                hvd.allreduce_async_(tensor, op=ops[number % len(ops)], name=f"{turn} {number}")
                for number, tensor in enumerate(tensors)
            ]
            if hvd.rank() == turn % 2:  # what only one is ready for
                handles.append(hvd.allreduce_async(torch.ones(3), name="mine alone"))
            handles[0].poll()
            time.sleep(0.003 * (turn % 3) * (1 + hvd.rank()))
            began = time.monotonic()
            hvd.shutdown()
            seconds = time.monotonic() - began
            for handle in handles:
                try:
                    result = handle.wait(1.0)
                except hvd.CollectiveError as error:
                    assert "shutdown() was called on this rank" in str(error) or "has left the world" in str(error)
                else:
                    assert bool((result == (1 if handle.request.op == "ADASUM" else 2)).all())
            hvd.init()
            some_collectives()
        del handles, handle, result
        return seconds, before, settled(before)

    for seconds, before, after in two.run(fn):
        assert seconds < 3
        assert after == before


def test_shutdown_while_other_threads_call(two: Ranks) -> None:
    def fn() -> list[str]:
        ends: list[str] = []

        def calls(thread: int) -> None:
            try:
                while True:
                    hvd.allreduce(torch.ones(5), name=f"of thread {thread}")
            except Exception as error:
                ends.append(type(error).__name__)

        for turn in range(10):
            threads = [threading.Thread(target=calls, args=[thread]) for thread in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(0.05 + 0.01 * turn * hvd.rank())
            hvd.shutdown()
            for thread in threads:
                thread.join(5)
                assert not thread.is_alive()
            hvd.init()
        some_collectives()
        return ends

    for ends in two.run(fn):
        assert len(ends) == 40
        assert set(ends) <= {"CollectiveError", "NotInitializedError"}


def test_stale_process_sets(three: Ranks) -> None:
    def fn() -> None:
        old = hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[old])
        assert old.process_set_id == 1
        handle = hvd.allreduce_async(torch.ones(1), name="x", process_set=old) if old.included() else None
        if handle is not None:
            assert handle.wait().tolist() == [1.0]
        hvd.shutdown()
        assert old.process_set_id is None
        hvd.init()
        for call in (
            lambda: hvd.allreduce(torch.ones(1), process_set=old),
            lambda: hvd.barrier(process_set=old),
            lambda: hvd.broadcast(torch.ones(1), 0, process_set=old),
        ):
            with pytest.raises(
                ValueError, match=r"ranks=\[0, 2\]\) is not registered in this world; call hvd.add_proc"
            ):
                call()
        assert not hvd.remove_process_set(old)
        hvd.add_process_set(old)  # as good as new
        if old.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="x", process_set=old).tolist() == [2.0]
        some_collectives()

    three.run(fn)


def test_process_sets_given_to_init(three: Ranks) -> None:
    def fn() -> None:
        hvd.shutdown()
        first, second = hvd.ProcessSet([2, 0]), hvd.ProcessSet([1, 2])
        hvd.init(process_sets=[first, second])
        assert [first.process_set_id, second.process_set_id] == [1, 2]
        assert [first.rank(), second.rank()] == [[0, None], [None, 0], [1, 1]][hvd.rank()]
        for one in (first, second):
            if one.included():
                assert hvd.allgather_object(hvd.rank(), process_set=one) == one.ranks
        hvd.shutdown()
        with pytest.raises(hvd.MismatchError, match=r"process_sets\[0\].*rank 1 adds"):
            hvd.init(process_sets=[hvd.ProcessSet([0, 1] if hvd_rank() != 1 else [1, 2])])
        some_collectives()

    three.run(fn)


def hvd_rank() -> int:
    """Before init()."""
    assert context._joined is not None
    return context._joined.world.me.rank


def test_parts_of_a_world(three: Ranks) -> None:
    def fn() -> list[Any]:
        rank = hvd.rank()
        for wrong, match in (([3], "ranks from 0 to 2"), ([(rank + 1) % 3], f"does not have this rank, {rank}")):
            with pytest.raises(ValueError, match=match):
                hvd.init(comm=wrong)
        before = possessions()
        hvd.init(comm=[2, 0] if rank != 1 else [1])
        places = [hvd.rank(), hvd.size()]
        for _ in range(3):
            some_collectives()
            places.append(hvd.allgather_object(rank))
            hvd.shutdown()
            hvd.init()
        after = possessions()
        assert all(after[kind] <= count for kind, count in before.items()), (before, after)
        return places

    assert three.run(fn) == [[0, 2, *[[0, 2]] * 3], [0, 1, *[[1]] * 3], [1, 2, *[[0, 2]] * 3]]


def test_idle_ranks_rest(three: Ranks) -> None:
    def fn() -> float:
        hvd.add_process_set([0, 2])
        hvd.add_process_set([1, 2])
        some_collectives()
        least = 3.0
        for _ in range(3):
            before = time.process_time()  # of all threads, user and system; other processes do not count
            time.sleep(3.0)
            least = min(least, time.process_time() - before)
            if least < 0.03:
                break
        hvd.barrier()
        return least

    assert max(three.run(fn)) < 0.03


def test_forked_children_do_no_harm(two: Ranks) -> None:
    def fn() -> int:
        some_collectives()
        under_way = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="under way")
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                ctypes.pythonapi.Py_Exit(0)  # as a program ends, exit handlers included
            os._exit(1)
        deadline = time.monotonic() + 5
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, 9)
        assert under_way.wait().tolist() == [2.0] * 3
        some_collectives()
        return os.waitstatus_to_exitcode(ended[1]) if ended[0] else -99

    assert two.run(fn) == [0, 0]
