"""Batches of collectives on one rank, over a network whose all-reduces end when the test says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from spark_hvd.collectives.execution import Work, single_result
from spark_hvd.collectives.fusion import Batch
from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.members import Members
from spark_hvd.collectives.messages import Entry, Request
from spark_hvd.collectives.runs import Runs

REQUEST = Request("allreduce", ["float32"], [[1]], "cpu", "SUM")


class Flight:
    """An all-reduce with a rank that contributes 10."""

    def __init__(self, wire: torch.Tensor) -> None:
        self.sent = wire.item()
        self._wire = wire

    def end(self) -> None:
        self._wire += 10
        self._ended()

    def wait(self) -> torch.Tensor:
        return self._wire

    def done(self) -> bool:
        return True

    def when_done(self, callback: Callable[[], None]) -> None:
        self._ended = callback


def test_a_rank_that_has_joined_contributes_a_call_once() -> None:
    """The others call a name again while its own call is still in flight here: the new call does not include it."""
    flights: list[Flight] = []
    network: Any = SimpleNamespace(
        size=2, rank=0, allreduce=lambda wire, op: flights.append(Flight(wire)) or flights[-1]
    )
    handle: Any = NamedHandle(None, "a", REQUEST, Work([torch.ones(1)], False, []), single_result)
    handle._queue = SimpleNamespace(finish=lambda handle, execution: execution.finish())
    handles = {"a": handle}
    tracing: Any = SimpleNamespace(recorder=None)
    runs = Runs(Members([0, 1], ["host"] * 2, 0, network), tracing, lambda ended: handles.clear(), print)
    runs.start([Batch([Entry("a", REQUEST)])], handles)
    runs.start([Batch([Entry("a", REQUEST, absent=[0])])], handles)
    assert [flight.sent for flight in flights] == [1, 0]
    flights[0].end()
    flights[1].end()
    assert handle.wait().item() == 11


def test_a_call_that_ends_while_its_name_is_called_again_is_not_started_again() -> None:
    """Between its end in flight and the release of its name, no decision may find it."""
    network: Any = SimpleNamespace(
        size=2, rank=0, allreduce=lambda wire, op: flights.append(Flight(wire)) or flights[-1]
    )
    flights: list[Flight] = []
    handle: Any = NamedHandle(None, "a", REQUEST, Work([torch.ones(1)], False, []), single_result)
    handles = {"a": handle}
    found: list[bool] = []
    tracing: Any = SimpleNamespace(recorder=None)

    def release(ended: Any) -> None:
        found.append(runs.has(handle))
        handles.clear()

    runs = Runs(Members([0, 1], ["host"] * 2, 0, network), tracing, release, print)
    runs.start([Batch([Entry("a", REQUEST)])], handles)
    flights[0].end()
    assert found == [True]
    assert not runs.has(handle)
