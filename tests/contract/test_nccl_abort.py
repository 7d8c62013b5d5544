"""The NCCL part of groups is aborted when a rank is gone. A stand-in records it: there is no NCCL here."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import spark_hvd.torch as hvd
from spark_hvd.collectives.execution import Work, single_result
from spark_hvd.collectives.members import Members
from spark_hvd.collectives.messages import Entry, Gone, Request, Run
from spark_hvd.collectives.queue import NegotiatedQueue
from spark_hvd.collectives.tracing import Tracing
from spark_hvd.context.global_state import current
from spark_hvd.transport.local import LocalCommunicator
from spark_hvd.transport.nccl import NcclGroups, abort
from tests.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class StandIn:
    """Replaces a group's ProcessGroupNCCL."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def abort(self) -> None:
        self._log.append(f"abort {self._name}")

    def _group_start(self) -> None:
        self._log.append(f"start {self._name}")

    def _group_end(self) -> None:
        self._log.append(f"end {self._name}")


def watch() -> list[str]:
    """Pretend that every group has NCCL, and record what happens to it."""
    log: list[str] = []
    nccl = current().queue.members.nccl
    assert nccl is not None
    assert nccl.backends == [], "real groups of Gloo have none"
    nccl._backend_of = lambda group: StandIn("world" if group is dist.group.WORLD else group.group_name, log)
    return log


def go_on() -> None:
    while True:
        hvd.allreduce(torch.ones(3), name="x")


def dies_or_leaves(end: str) -> list[str]:
    log = watch()
    current().new_group(0)  # as an optimizer does
    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL) if end == "killed" else hvd.shutdown()
        return []
    with pytest.raises(hvd.CollectiveError):
        go_on()
    deadline = time.monotonic() + (5 if end == "killed" else 1)  # an abort comes after half a second
    while "end world" not in log and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if thread.name == "spark_hvd-nccl-abort"]
    return log


def test_a_rank_that_dies() -> None:
    with ranks(2) as world:
        (survived, log), _ = world.outcomes(dies_or_leaves, "killed")
    assert survived, log
    assert (log[0], log[-1]) == ("start world", "end world")
    aborted = [line.removeprefix("abort ") for line in log[1:-1]]
    assert aborted[-1] == "world", "the newest group first"
    assert len(aborted) == len(set(aborted)) >= 3, f"the default group, the queue's, the one that was made: {aborted}"


def test_a_rank_that_leaves_in_order() -> None:
    with ranks(2) as world:
        assert world.run(dies_or_leaves, "left") == [[], []], "nothing waits for it on the device"


class QueueLink:
    """A link to no coordinator."""

    def __init__(self) -> None:
        self.asked: list[NegotiatedQueue] = []

    def peer_lost(self, queue: NegotiatedQueue) -> None:
        self.asked.append(queue)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.mark.parametrize(("done", "left_unfinished"), [(1, False), (0, True)])
def test_what_was_begun_without_the_one_that_left(done: int, left_unfinished: bool) -> None:
    log: list[str] = []
    nccl = NcclGroups(lambda: [None, dist.group.WORLD], lambda group: StandIn("world", log))
    link = QueueLink()
    members = Members([0, 1], ["a", "b"], 0, LocalCommunicator(), nccl=nccl)
    queue = NegotiatedQueue(members, link, Tracing(lambda: None), 1 << 20)
    handle = call(queue)
    queue.apply([Run([Entry("x", handle.request)])])
    queue.apply([Gone(1, "rank 1 has left the world", True, done)])
    assert (queue.left_unfinished, queue.peer_lost, link.asked == [queue]) == (left_unfinished, False, left_unfinished)
    assert float(handle.wait()) == 1.0, "it has ended on the host"


def call(queue: NegotiatedQueue) -> Any:
    tensor = torch.ones(())
    request = Request("allreduce", ["float32"], [[]], "cpu", op="SUM")
    return queue.submit("x", request, Work((tensor,), True, []), single_result)


def test_an_abort_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []

    class Broken(StandIn):
        def abort(self) -> None:
            raise RuntimeError("driver shutting down")

    abort([Broken("a", log)])
    abort([])
    assert log == ["start a", "end a"]
    assert "NCCL could not be aborted: driver shutting down" in caplog.text
