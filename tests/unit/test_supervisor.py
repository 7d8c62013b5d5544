"""What a supervisor reports when several things happen at once."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from spark_hvd.runner.outcome.rows import Failed, FailureKind
from spark_hvd.runner.supervise import supervisor
from spark_hvd.runner.supervise.supervised import RankJob
from spark_hvd.world.layout import WorldLayout

ITS_OWN = {"type": "outcome", "ok": False, "kind": "exception", "error": "ValueError: its own", "echo": False}


class Rank:
    """Replaces SupervisedRank: a rank that fails while it is asked for its stacks."""

    exitcode = None

    def __init__(self, job: Any, server: Any, link: Any, poller: Any, on_frame: Callable[..., None], *_: Any) -> None:
        self._on_frame = on_frame

    def look(self, now: float) -> None:
        pass

    def await_stacks(self, seconds: float, meanwhile: Any) -> str:
        self._on_frame({**ITS_OWN, "traceback": ""}, memoryview(b""))
        return "stacks"

    def failed(self, place: Any, kind: FailureKind, error: str, trace: str, **more: Any) -> Failed:
        return Failed(place.rank, place.host, kind, error, trace)


@pytest.fixture
def told() -> list[str]:
    """The messages that the hub gets."""
    return []


@pytest.fixture
def supervision(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> Iterator[Any]:
    """The supervision of a rank whose time to start is over."""
    monkeypatch.setattr(supervisor, "SupervisedRank", Rank)
    spec: Any = SimpleNamespace(me=WorldLayout.from_hosts(["h"]).ranks[0], gpus=SimpleNamespace(assigned=None))
    with socket.socket() as end:
        link: Any = SimpleNamespace(socket=end, send=lambda type_, **fields: told.append(type_))
        server: Any = None
        yield supervisor._Supervision(RankJob(spec, {}, b"", 0.0, 1.0), link, server, None)


def test_its_own_error_is_kept_when_its_start_took_too_long(supervision: Any, told: list[str]) -> None:
    supervision._check_deadlines()
    assert supervision._failure.error == ITS_OWN["error"]
    assert told == ["ended"]


def test_its_own_error_is_kept_when_the_run_took_too_long(supervision: Any, told: list[str]) -> None:
    supervision._stop("timeout", None)
    assert supervision._failure.error == ITS_OWN["error"]
    assert told == ["ended"]


def test_a_proxy_is_not_started_where_mpi_has_failed(supervision: Any) -> None:
    supervision._on_message({"type": "proxy", "arguments": []})
