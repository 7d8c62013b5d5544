"""Ranks count who has reached which point, wake sleeping ones, and notice dead ones; both run in one process here."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spark_hvd.transport.host import pipes, synchronization
from spark_hvd.transport.host.arena import SharedArena
from spark_hvd.transport.host.pipes import BOARD, Pipes, SyncPoint
from spark_hvd.transport.host.synchronization import Fence


def two(timeout: float = 30.0) -> tuple[Pipes, Pipes]:
    ends = [os.pipe(), os.pipe()]
    for reading, writing in ends:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
    (from_zero, to_one), (from_one, to_zero) = ends
    boards = [memoryview(array("q", [0] * BOARD)) for _ in ends]
    return (
        Pipes([4, 7], {1: from_one}, {1: to_one}, boards, timeout),
        Pipes([4, 7], {0: from_zero}, {0: to_zero}, boards, timeout),
    )


def in_a_thread(call: Callable[[], Any]) -> Callable[[], BaseException | None]:
    """Start a call; return a function that waits for its end and returns the error."""
    errors: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)
        else:
            errors.append(None)

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> BaseException | None:
        thread.join(30)
        return errors[0]

    return end


def test_kinds_of_points_are_counted_by_themselves() -> None:
    zero, one = two()
    assert [one.send(SyncPoint.FILLED), one.send(SyncPoint.SUMMED), one.send(SyncPoint.FILLED)] == [1, 1, 2]
    assert zero.arrived(SyncPoint.FILLED, 2)
    assert zero.arrived(SyncPoint.SUMMED, 1)
    assert not zero.arrived(SyncPoint.SUMMED, 2)
    assert not one.arrived(SyncPoint.FILLED, 1)


def test_waiting_ends_when_the_last_has_come() -> None:
    zero, one = two()
    end = in_a_thread(lambda: zero.wait(SyncPoint.SUMMED, 2))
    one.send(SyncPoint.SUMMED)
    one.send(SyncPoint.FILLED)  # wakes it, too
    one.send(SyncPoint.SUMMED)
    assert end() is None


def test_who_sleeps_is_woken_by_the_last_alone() -> None:
    """Of three: if each arriving rank sent a byte, n ranks would send n²."""
    ends = {(here, there): os.pipe() for here in range(3) for there in range(3) if here != there}
    for pair in ends.values():
        for end in pair:
            os.set_blocking(end, False)
    boards = [memoryview(array("q", [0] * BOARD)) for _ in range(3)]
    zero, one, two = (
        Pipes(
            [0, 1, 2],
            {there: ends[there, here][0] for there in range(3) if there != here},
            {there: ends[here, there][1] for there in range(3) if there != here},
            boards,
            30.0,
        )
        for here in range(3)
    )
    end = in_a_thread(lambda: zero.wait(SyncPoint.FILLED, 1))  # it has not arrived itself
    until = time.monotonic() + 30
    while not boards[0][BOARD - 1] and time.monotonic() < until:
        time.sleep(0.001)
    one.send(SyncPoint.FILLED)
    with pytest.raises(BlockingIOError):
        os.read(ends[1, 0][0], 1)
    two.send(SyncPoint.FILLED)
    assert end() is None
    two.wait(SyncPoint.SUMMED, 0)


def test_who_has_gone_is_an_error_only_where_somebody_needs_him() -> None:
    zero, one = two()
    one.send(SyncPoint.FILLED)
    end = in_a_thread(lambda: zero.wait(SyncPoint.FILLED, 2))
    one.abort()
    assert str(end()) == "the connection to rank 7 has ended"
    zero.wait(SyncPoint.FILLED, 1)
    with pytest.raises(RuntimeError, match="this rank has left the world"):
        one.send(SyncPoint.FILLED)
    del one
    zero.send(SyncPoint.FILLED)  # no rank to wake
    with pytest.raises(RuntimeError, match="the connection to rank 7 has ended"):
        zero.wait(SyncPoint.FILLED, 2)


def test_another_thread_frees_who_waits() -> None:
    zero, _one = two()
    end = in_a_thread(lambda: zero.wait(SyncPoint.FILLED, 1))
    zero.abort()
    zero.abort()
    assert str(end()) == "this rank has left the world"


def test_waiting_has_an_end() -> None:
    zero, _one = two(timeout=0.05)
    with pytest.raises(RuntimeError, match=r"timed out after 0.05 s of waiting for ranks \[7\]"):
        zero.wait(SyncPoint.FILLED, 1)


def test_ranks_that_come_at_any_time_never_miss_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that checks, falls asleep or is woken just when the other arrives."""

    def meet(pipes: Pipes, pause: float) -> None:
        for number in range(3000):
            times = pipes.send(SyncPoint.FILLED)
            if number % 7 == 0:
                time.sleep(pause)
            pipes.wait(SyncPoint.FILLED, times)

    monkeypatch.setattr(pipes, "_LOOK_SECONDS", 60.0)  # only a byte wakes it
    started = time.monotonic()
    ends = [
        in_a_thread(lambda each=each, pause=pause: meet(each, pause))
        for each, pause in zip(two(), (0, 2e-4), strict=True)
    ]
    assert [end() for end in ends] == [None, None]
    assert time.monotonic() - started < 30


def test_a_pipe_that_is_full_blocks_nobody() -> None:
    zero, one = two()
    one._mine[BOARD - 1] = 1  # one sleeps, and reads nothing
    for _ in range(10_000):
        zero.send(SyncPoint.FILLED)
    one.wait(SyncPoint.FILLED, 10_000)


def test_where_ranks_outnumber_cores_nobody_looks_without_sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(os, "sched_yield", lambda: pytest.fail("it looks"))
    zero, one = two()
    end = in_a_thread(lambda: zero.wait(SyncPoint.FILLED, 1))
    time.sleep(0.05)
    one.send(SyncPoint.FILLED)
    assert end() is None


@pytest.mark.parametrize("fault", ["inode", "number", "process"])
def test_what_is_not_the_other_s_pipe_is_not_used(fault: str) -> None:
    """As in another container, where the numbers have another meaning."""
    reading, writing = os.pipe()
    inode = os.fstat(reading).st_ino
    wrong = {
        "inode": [os.getpid(), reading, inode + 1],
        "number": [os.getpid(), 1 << 20, inode],
        "process": [1 << 30, reading, inode],
    }[fault]

    arena = SharedArena([(BOARD, torch.int64), (5, torch.int64)])
    offers = arena.buffers[1].numpy()
    offers[:3] = wrong

    def exchange(fact: Any) -> list[Any]:
        return [fact, True if isinstance(fact, bool) else [os.getpid(), arena._fd, arena._mark.hex()]]

    gc.collect()
    before = os.listdir("/proc/self/fd")
    assert Pipes.open([0, 1], 0, 1.0, exchange) is None
    assert set(os.listdir("/proc/self/fd")) <= set(before)  # what earlier tests left may be closed meanwhile
    offers[:3] = os.getpid(), reading, inode
    opened = Pipes.open([0, 1], 0, 1.0, exchange)
    assert opened is not None
    arena.buffers[0][SyncPoint.FILLED] = 1
    opened.wait(SyncPoint.FILLED, 1)
    assert len([fd for fd in before if Path(f"/proc/self/fd/{fd}").exists()]) >= len(before) - 1  # the listing's own
    del opened
    assert set(os.listdir("/proc/self/fd")) <= set(before)  # what earlier tests left may be closed meanwhile
    for fd in (reading, writing, arena._fd):
        os.close(fd)


@pytest.mark.parametrize("here", [True, False], ids=["here", "there"])
def test_a_kernel_that_refuses_memory_without_a_name(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks notice, and none waits at counters."""
    told: list[Any] = []

    def exchange(fact: Any) -> list[Any]:
        told.append(fact)
        return [fact, here]

    def refuse(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    if here:
        monkeypatch.setattr(os, "memfd_create", refuse)
    before = os.listdir("/proc/self/fd")
    assert Pipes.open([0, 1], 0, 1.0, exchange) is None
    assert told == [not here]
    gc.collect()  # a mapping has a descriptor, too
    assert set(os.listdir("/proc/self/fd")) <= set(before)


def test_a_flag_is_fenced_where_memory_is_weakly_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is written, and after all have been seen; on x86 neither costs anything."""
    zero, one = two()
    calls: list[str] = []
    monkeypatch.setattr(Fence, "__call__", lambda fence: calls.append("fence"))
    for ordered, expected in ((True, 0), (False, 1)):
        monkeypatch.setattr(synchronization, "ORDERED", ordered)
        fence = Fence()
        fence.release()
        fence.acquire()
        assert len(calls) == 2 * expected
    seen: list[Any] = []
    for rank, name in ((zero, "zero"), (one, "one")):
        board = rank._mine
        monkeypatch.setattr(rank._published, "release", lambda name=name, board=board: seen.append((name, board[0])))
        monkeypatch.setattr(rank._published, "acquire", lambda name=name: seen.append((name, "acquired")))
    point = next(iter(SyncPoint))
    assert zero.send(point) == 1
    assert not zero.arrived(point, 1)
    assert one.arrived(point, 1)
    assert seen == [("zero", 0), ("one", "acquired")]
    for each in (zero, one):
        each.abort()
