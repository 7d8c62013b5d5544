"""Pipes between ranks count who has come to which point, and tell who has gone; here both ends are in one process."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_hvd.transport.pipes import Pipes, SyncPoint


def two(timeout: float = 30.0) -> tuple[Pipes, Pipes]:
    ends = [os.pipe(), os.pipe()]
    for reading, writing in ends:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
    (from_zero, to_one), (from_one, to_zero) = ends
    return Pipes([4, 7], {1: from_one}, {1: to_one}, timeout), Pipes([4, 7], {0: from_zero}, {0: to_zero}, timeout)


def in_a_thread(call: Callable[[], Any]) -> Callable[[], BaseException | None]:
    """Start a call; returns what waits for its end and gives the error."""
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
    with pytest.raises(RuntimeError, match="the connection to rank 7 has ended"):
        zero.send(SyncPoint.FILLED)


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
    for _ in range(4096):
        zero.send(SyncPoint.FILLED)
    with pytest.raises(RuntimeError, match=r"timed out after 0.05 s of waiting for rank 7 to read"):
        zero.send(SyncPoint.FILLED)


def test_full_pipes_block_nobody_for_good() -> None:
    def busy(pipes: Pipes) -> None:
        for _ in range(10_000):
            pipes.send(SyncPoint.FILLED)
        pipes.wait(SyncPoint.FILLED, 10_000)

    pair = two()
    ends = [in_a_thread(lambda pipes=pipes: busy(pipes)) for pipes in pair]
    assert [end() for end in ends] == [None, None]


@pytest.mark.parametrize("fault", ["inode", "number", "process"])
def test_what_is_not_the_other_s_pipe_is_not_used(fault: str) -> None:
    """As in another container, where the numbers mean something else."""
    reading, writing = os.pipe()
    inode = os.fstat(reading).st_ino
    theirs = {
        "inode": [os.getpid(), {"0": [reading, inode + 1]}],
        "number": [os.getpid(), {"0": [1 << 20, inode]}],
        "process": [1 << 30, {"0": [reading, inode]}],
    }[fault]

    def exchange(fact: Any) -> list[Any]:
        return [fact, theirs if isinstance(fact, list) else True]

    before = os.listdir("/proc/self/fd")
    assert Pipes.open([0, 1], 0, 1.0, exchange) is None
    assert set(os.listdir("/proc/self/fd")) <= set(before)  # what earlier tests left may be closed meanwhile
    theirs[:] = [os.getpid(), {"0": [reading, inode]}]
    opened = Pipes.open([0, 1], 0, 1.0, exchange)
    assert opened is not None
    os.write(writing, bytes([SyncPoint.FILLED]))
    opened.wait(SyncPoint.FILLED, 1)
    assert len([fd for fd in before if Path(f"/proc/self/fd/{fd}").exists()]) == len(before) - 1  # the listing's own
    del opened
    assert set(os.listdir("/proc/self/fd")) <= set(before)  # what earlier tests left may be closed meanwhile
    os.close(reading)
    os.close(writing)
