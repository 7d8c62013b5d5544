"""Steps by torch's profiler on request: when it starts and stops, and its result in a trace of all ranks."""

from __future__ import annotations

import base64
import gzip
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.context.profile import StepProfiler, events_of
from spark_hvd.runner.watch.display import trace as trace_module
from spark_hvd.runner.watch.display.trace import RankTraces
from spark_hvd.world.activity import activity


@pytest.fixture
def told() -> Iterator[list[dict[str, Any]]]:
    yield []
    assert activity.at_step is None
    activity.progress = None


def profiler_of(told: list[dict[str, Any]]) -> StepProfiler:
    return StepProfiler(lambda **fields: told.append(fields))


def steps_of(told: list[dict[str, Any]]) -> int:
    packed = b"".join(base64.b64decode(each["data"]) for each in told if each["parts"])
    events = json.loads(f"[{gzip.decompress(packed).decode()}]")
    assert {event["pid"] for event in events} == {0}
    assert any(event["name"] == "aten::add" for event in events)
    return sum(event["name"] == "step" and event["ph"] == "X" for event in events)


def train(bar: Any, steps: int) -> None:
    for _ in range(steps):
        torch.ones(2) + torch.ones(2)
        bar.step()


def test_steps_are_profiled_from_the_next_one_on(told: list[dict[str, Any]]) -> None:
    profiler, bar = profiler_of(told), hvd.progress(None)
    train(bar, 1)
    asking = threading.Thread(target=profiler.ask, args=(7, 3))
    asking.start()
    asking.join()
    assert [(each["number"], each["parts"], each["error"]) for each in told] == [(7, 0, None)]
    profiler.ask(8, 1)
    assert told.pop()["error"] == "it is still busy with a previous profile"
    train(bar, 10)
    profiler.end()
    assert activity.at_step is None
    assert steps_of(told) == 3


def test_a_function_that_ends_before_sends_what_there_is(told: list[dict[str, Any]]) -> None:
    profiler, bar = profiler_of(told), hvd.progress(None)
    profiler.ask(1, 100)
    train(bar, 3)
    profiler.end()
    assert steps_of(told) == 3
    profiler.ask(2, 1)
    profiler.end()
    assert told[-1] == {
        "number": 2, "part": 0, "parts": 0, "data": "", "error": "its function ended before another step"
    }  # fmt: skip


def test_a_profiler_of_the_user_is_left_alone(told: list[dict[str, Any]]) -> None:
    profiler, bar = profiler_of(told), hvd.progress(None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        profiler.ask(1, 1)
        train(bar, 3)
    assert told[-1]["error"] == "not profiled: RuntimeError: the program profiles itself at the moment"
    assert any(event.key == "aten::add" and event.count == 3 for event in theirs.key_averages())


def test_events_are_told_apart_by_rank_and_on_one_clock() -> None:
    trace = {
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 1.0, "args": {"name": "python"}},
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 1.0, "args": {"name": "python"}},
            {"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "ts": 1.0, "args": {"name": "python"}},
            {"ph": "X", "name": "aten::add", "pid": 77, "tid": 78, "ts": 5.25, "dur": 1.0},
            {"ph": "X", "name": "kernel", "pid": 1, "tid": 7, "ts": 6.0, "dur": 1.0},
            {"ph": "s", "name": "ac2g", "id": 5, "pid": 77, "tid": 78, "ts": 5.5},
            {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 1.0, "dur": 1.0},
            {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 9.0},
        ],
    }
    found = events_of(trace, 3, 4, "node-1", 77)
    assert [(event["ph"], event["pid"]) for event in found] == [
        ("M", 3000), ("M", 3001), ("X", 3000), ("X", 3001), ("s", 3000)
    ]  # fmt: skip
    assert [event["args"]["name"] for event in found[:2]] == ["rank 3 (node-1): CPU", "rank 3 (node-1): GPU 1"]
    assert found[2]["ts"] == 1_700_000_000_000_005.25
    assert found[4]["id"] == 23


def message(number: int = 1, part: int = 0, parts: int = 0, text: str = "", error: str | None = None) -> dict[str, Any]:
    data = base64.b64encode(gzip.compress(text.encode())).decode()
    return {"number": number, "part": part, "parts": parts, "data": data if parts else "", "error": error}


def test_a_trace_waits_for_those_who_were_heard() -> None:
    trace = RankTraces(1, range(4), 5)
    assert trace.status() == {"number": 1, "ready": False, "text": "profiling 5 steps of ranks 0-3 ..."}
    for rank in (0, 1, 2):
        trace.take(rank, message())
    trace.take(0, message(0, 0, 1, "{}"))  # from the earlier request
    assert not trace.some_done
    trace.take(0, message(1, 0, 1, '{"a": 0}'))
    trace.take(1, message(1, 0, 2, '{"a": 1},'))
    trace.take(2, message(error="torch's profiler: busy"))
    assert trace.some_done
    trace.give_up("does not answer", unheard=True)
    assert not trace.ended
    trace.take(1, message(1, 1, 2, '{"a": 2}'))
    assert trace.ready
    assert trace.status()["text"] == "rank 2: torch's profiler: busy; rank 3: does not answer"
    trace.take(3, message(1, 0, 1, "late"))
    assert json.loads(gzip.decompress(trace.body()))["traceEvents"] == [{"a": 0}, {"a": 1}, {"a": 2}]


def test_traces_that_are_too_large_together_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = RankTraces(1, range(2), 1)
    monkeypatch.setattr(trace_module, "_MOST_BYTES", len(base64.b64decode(message(1, 0, 1, "{}")["data"])))
    for rank in range(2):
        trace.take(rank, message(1, 0, 1, "{}"))
    assert trace.ready
    assert trace.status()["text"].startswith("rank 1: the traces of all ranks together are too large")


def test_parts_that_are_missing_make_no_trace() -> None:
    trace = RankTraces(1, [0], 1)
    trace.take(0, message(1, 1, 2, "x"))
    assert trace.ended
    assert not trace.ready
    assert trace.status()["text"] == "rank 0: its trace is incomplete: try again"


def test_who_asks_while_a_profile_ends_does_not_get_it(
    told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler, bar, stop = profiler_of(told), hvd.progress(None), torch.profiler.profile.stop

    def slow_stop(theirs: torch.profiler.profile) -> None:
        asking = threading.Thread(target=profiler.ask, args=(8, 1))
        asking.start()
        asking.join()
        stop(theirs)

    monkeypatch.setattr(torch.profiler.profile, "stop", slow_stop)
    profiler.ask(7, 2)
    train(bar, 10)
    profiler.end()
    assert [each["error"] for each in told if each["number"] == 8] == ["it is still busy with a previous profile"]
    assert steps_of([each for each in told if each["number"] == 7]) == 2
