"""Processes that a rank forks, and that end in any way: its world stays intact, and they cannot use it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.runner import run_elastic_local, run_local
from spark_hvd.world.errors import NotInitializedError
from tests.ranks import ranks

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def exit_code(pid: int) -> int:
    """Return the exit code of a forked process, which must not hang."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the forked child does not end")


def summed() -> float:
    return float(hvd.allreduce(torch.ones(1), op=hvd.Sum))


def ends_without_output(close: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        close()
        return 0
    code = exit_code(pid)
    close()
    return code


def forget_output() -> None:
    sys.stdout = sys.stderr = None  # type: ignore[assignment]


def close_output() -> None:
    sys.stdout.close()
    sys.stderr.close()


def test_processes_without_output_end_as_others_do() -> None:
    for close in (forget_output, close_output):
        assert run_local(ends_without_output, (close,), num_proc=1, verbose=0) == [0]


def child_of_a_rank(rank: int, step: Callable[[], None], handle: Any) -> None:
    """What a forked child may and may not do."""
    assert (hvd.rank(), hvd.size(), hvd.is_initialized()) == (rank, 2, True)
    hvd.init()
    text = f"this process was forked from rank {rank}"
    for use in (summed, lambda: hvd.broadcast_object(1), step, hvd.barrier):
        with pytest.raises(NotInitializedError, match=text):
            use()
    with pytest.raises(hvd.CollectiveError, match=text):
        handle.wait()
    hvd.shutdown()


@pytest.mark.slow
def test_a_child_that_ends_as_programs_do() -> None:
    def fn() -> list[float]:
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

        def step() -> None:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        handle = hvd.allreduce_async(torch.ones(1), name=f"of rank {hvd.rank()}")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child_of_a_rank(hvd.rank(), step, handle)
                code = 0
            finally:
                sys.stderr.flush()
                ctypes.pythonapi.Py_Exit(code)  # exit handlers and destructors run
        assert exit_code(pid) == 0
        step()
        return [summed() for _ in range(3)]

    with ranks(2) as world:
        assert world.run(fn) == [[2.0] * 3] * 2
        assert world.run(hvd.shutdown) == [None, None]


def leave() -> None:
    sys.exit(3)


def fail() -> None:
    raise ValueError("of the child")


ENDS: list[tuple[Callable[[], Any], int]] = [(leave, 3), (fail, 1), (hvd.shutdown, 0)]


def fork_each_way() -> list[int] | str:
    """Fork children that return from fn."""
    codes = []
    for end, _ in ENDS:
        pid = os.fork()
        if pid == 0:
            end()
            return "of the child"
        codes.append(exit_code(pid))
    worker = multiprocessing.get_context("fork").Process(target=hvd.rank)
    worker.start()
    worker.join(30)
    loader = torch.utils.data.DataLoader([0, 1, 2], num_workers=1, collate_fn=lambda _: hvd.rank())
    assert list(loader) == [hvd.rank()] * 3
    assert summed() == 2
    return [*codes, worker.exitcode or 0]


CODES = [*(code for _, code in ENDS), 0]


def test_children_of_fn() -> None:
    assert run_local(fork_each_way, num_proc=2, timeout=60, verbose=0) == [CODES] * 2


def test_children_of_an_elastic_fn() -> None:
    def fn() -> Any:
        hvd.init()
        state: Any = hvd.elastic.ObjectState(step=0)

        @hvd.elastic.run
        def train(state: Any) -> Any:
            codes = fork_each_way()
            if codes != "of the child":
                state.commit()
                assert summed() == 2
            return codes

        return train(state)

    assert run_elastic_local(fn, num_proc=2, timeout=60, verbose=0) == [CODES] * 2
