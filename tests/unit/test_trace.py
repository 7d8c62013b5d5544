"""Recording loses nothing, whichever thread records; the file is in Chrome's trace-event format, complete or not."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from spark_hvd.timeline import recorder as trace
from spark_hvd.timeline.recorder import Event, Recorder, TraceWriter

HOSTS = ["alpha", "alpha", "beta"]


def written(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a complete file, after a check of the format's rules for each."""
    entries: list[dict[str, Any]] = json.loads(path.read_text())
    threads: set[tuple[int, int]] = set()
    processes: set[int] = set()
    for entry in entries:
        assert isinstance(entry["name"], str)
        assert type(entry["pid"]) is int
        assert type(entry["tid"]) is int
        assert entry["ts"] >= 0
        if entry["ph"] == "M":
            processes |= {entry["pid"]} if entry["name"] == "process_name" else set()
            threads |= {(entry["pid"], entry["tid"])} if entry["name"] == "thread_name" else set()
        elif entry["ph"] == "X":
            assert entry["dur"] >= 0
        else:
            assert (entry["ph"], entry["s"]) == ("i", "t")
        if entry["ph"] != "M":  # its row and its rank are introduced before it
            assert entry["pid"] in processes
            assert (entry["pid"], entry["tid"]) in threads
    return entries


def events_in(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["ph"] != "M"]


# ---- recorder -----------------------------------------------------------------------------------------------------


def test_a_batch_is_shipped_when_it_is_full() -> None:
    shipped: list[list[Event]] = []
    recorder = Recorder(shipped.append, batch=2)
    recorder.span("grad", trace.GLOO_ALLREDUCE, 10, 20, bytes=4096)
    assert shipped == []
    recorder.instant("grad", trace.RANK_READY, 5, rank=1)
    assert shipped == [
        [["X", "grad", "GLOO_ALLREDUCE", 10, 20, {"bytes": 4096}], ["i", "grad", "RANK_READY", 5, {"rank": 1}]]
    ]
    recorder.span("step", trace.WAIT, 1, 2)
    recorder.flush()
    recorder.flush()
    assert shipped[1:] == [[["X", "step", "WAIT", 1, 2, None]]]


def test_events_survive_json() -> None:
    shipped: list[list[Event]] = []
    recorder = Recorder(shipped.append)
    recorder.span("grad", "ALLREDUCE", 10, 20, shape=[3, 4], dtype="float32")
    recorder.instant("cycle", trace.CYCLE_START, 12)
    recorder.flush()
    assert json.loads(json.dumps(shipped)) == shipped


def test_cycles_are_marked_on_demand() -> None:
    assert not Recorder(lambda batch: None).mark_cycles
    assert Recorder(lambda batch: None, mark_cycles=True).mark_cycles


def test_ten_threads_lose_nothing() -> None:
    shipped: list[list[Event]] = []
    at_once: list[int] = []
    shipping = 0

    def ship(batch: list[Event]) -> None:
        nonlocal shipping
        shipping += 1
        at_once.append(shipping)
        time.sleep(0.0005)  # so that others find a full list meanwhile
        shipped.append(batch)
        shipping -= 1

    recorder = Recorder(ship, batch=64)
    count, start = 3000, threading.Barrier(11)

    def record(thread: int) -> None:
        start.wait()
        for number in range(count):
            recorder.span(f"thread {thread}", "ALLREDUCE", number, number + 1)

    threads = [threading.Thread(target=record, args=[thread]) for thread in range(10)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    try:
        for thread in threads:
            thread.start()
        start.wait()
        while any(thread.is_alive() for thread in threads):
            recorder.flush()
    finally:
        sys.setswitchinterval(interval)
    recorder.flush()
    assert set(at_once) == {1}
    seen: dict[str, list[int]] = defaultdict(list)
    for event in (event for batch in shipped for event in batch):
        seen[event[1]].append(event[3])
    assert seen == {f"thread {thread}": list(range(count)) for thread in range(10)}


def test_an_event_recorded_while_shipping_is_kept() -> None:
    shipped: list[list[Event]] = []

    def ship(batch: list[Event]) -> None:
        shipped.append(batch)
        if len(shipped) == 1:
            recorder.span("engine", "OTHER", 3, 4)  # must not wait for itself, although the list is full again

    recorder = Recorder(ship, batch=1)
    recorder.span("grad", "ALLREDUCE", 1, 2)
    recorder.flush()
    assert [event[1] for batch in shipped for event in batch] == ["grad", "engine"]


# ---- writer -------------------------------------------------------------------------------------------------------


def test_ranks_are_processes_and_rows_are_threads(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json", HOSTS)
    writer.add(
        0,
        [["X", "bucket 0", trace.BUCKET_FILL, 1000, 2000, None], ["X", "fc.weight", "ALLREDUCE", 1500, 1501, None]],
        0,
    )
    writer.add(2, [["X", "bucket 0", trace.BUCKET_FILL, 1100, 2000, {"bytes": 8}]], 0)
    writer.add(0, [["i", "cycle", trace.CYCLE_START, 2500, None], ["X", "bucket 0", trace.WAIT, 2100, 2200, None]], 0)
    writer.close()
    entries = written(tmp_path / "trace.json")
    about = defaultdict(list)
    for entry in entries:
        if entry["ph"] == "M":
            about[entry["name"]].append((entry["pid"], *entry["args"].values()))
    assert about["process_name"] == [(0, "rank 0 (alpha)"), (1, "rank 1 (alpha)"), (2, "rank 2 (beta)")]
    assert about["process_sort_index"] == [(0, 0), (1, 1), (2, 2)]
    assert about["thread_name"] == [(0, "bucket 0"), (0, "fc.weight"), (2, "bucket 0"), (0, "cycle")]
    places = [place for _, place in about["thread_sort_index"]]
    assert places == sorted(set(places))
    assert len({entry["tid"] for entry in events_in(entries)}) == 4
    assert events_in(entries)[2]["args"] == {"bytes": 8}


def test_times_are_microseconds_from_the_first_event_on(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json", HOSTS)
    writer.add(0, [["X", "a", "P", 5_000_789, 5_001_790, None], ["X", "a", "Q", 5_000_000, 9_000_000, None]], 0)
    writer.close()
    first, second = events_in(written(tmp_path / "trace.json"))
    assert (first["ts"], first["dur"]) == (0.789, 1.001)
    assert (second["ts"], second["dur"]) == (0, 4000)


def test_nanoseconds_survive_a_week(tmp_path: Path) -> None:
    week = 7 * 24 * 3600 * 10**9
    writer = TraceWriter(tmp_path / "trace.json", HOSTS)
    writer.add(0, [["i", "a", "P", 1, None], ["X", "a", "P", week + 2, week + 5, None]], 0)
    writer.close()
    assert f'"ts":{week // 1000}.001,"dur":0.003' in (tmp_path / "trace.json").read_text()


def test_clocks_are_brought_together(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json", HOSTS)
    writer.add(1, [["X", "a", "P", 77_000, 78_000, None], ["i", "a", "R", 77_500, None]], -70_000)
    writer.add(0, [["X", "a", "P", 8_000, 9_000, None]], 0)
    writer.close()
    assert [event["ts"] for event in events_in(written(tmp_path / "trace.json"))] == [0, 0.5, 1]


def test_zero_is_no_later_than_the_start_of_the_recording(tmp_path: Path) -> None:
    before = time.monotonic_ns()
    writer = TraceWriter(tmp_path / "trace.json", HOSTS)
    made = time.monotonic_ns()
    late = made + 10**9
    writer.add(0, [["i", "a", "late", late, None]], 0)
    writer.add(1, [["i", "a", "early", made, None], ["X", "step", "STEP", before - 500, late, None]], 0)
    writer.close()
    first, early, cut = events_in(written(tmp_path / "trace.json"))
    assert first["ts"] >= 1e6 > early["ts"] >= 0
    assert (cut["ts"], cut["dur"]) == (0, first["ts"])  # Perfetto drops events before zero


def test_a_file_that_is_not_closed_lacks_only_its_bracket(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    writer = TraceWriter(path, HOSTS)
    json.loads(path.read_text() + "]")
    for number in range(3):
        writer.add(0, [["X", "a", "P", number, number + 1, None]], 0)
        assert len(events_in(json.loads(path.read_text() + "]"))) == number + 1
    writer.close()
    writer.close()
    assert len(events_in(written(path))) == 3
    with pytest.raises(ValueError, match="closed"):
        writer.add(0, [["i", "a", "P", 1, None]], 0)


def test_a_trace_without_events_is_valid_and_a_rank_may_have_none(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json", HOSTS)
    writer.add(1, [], 0)
    writer.close()
    assert events_in(written(tmp_path / "trace.json")) == []


def test_any_name_and_any_argument(tmp_path: Path) -> None:
    name = 'a "b"\\\n\u00e9\ud800'
    writer = TraceWriter(tmp_path / "trace.json", [name])
    writer.add(0, [["X", name, name, 0, 1, {"path": Path("x"), name: name}]], 0)
    writer.close()
    *_, row, _, event = written(tmp_path / "trace.json")
    assert row["args"]["name"] == name
    assert event["name"] == name
    assert event["args"] == {"path": "x", name: name}


def test_threads_may_add_at_once(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json", [""] * 8)

    def add(rank: int) -> None:
        for number in range(50):
            writer.add(rank, [["X", f"row {number % 5}", "P", number, number + 1, None]] * 3, 0)

    threads = [threading.Thread(target=add, args=[rank]) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    entries = written(tmp_path / "trace.json")
    assert len(events_in(entries)) == 8 * 50 * 3
    assert sum(entry["name"] == "thread_name" for entry in entries) == 8 * 5


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; create it"):
        TraceWriter(tmp_path / "nowhere" / "trace.json", HOSTS)
    with pytest.raises(NotADirectoryError, match="file is not a folder"):
        TraceWriter(tmp_path / "file" / "trace.json", HOSTS)
    with pytest.raises(IsADirectoryError, match="name a file"):
        TraceWriter(tmp_path, HOSTS)


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root is refused nothing

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="no permission to write it in"):
        TraceWriter(tmp_path / "trace.json", HOSTS)


def test_phases_are_horovods_words() -> None:
    assert trace.negotiate_phase("allgather") == "NEGOTIATE_ALLGATHER"
    assert trace.wire_phase("gloo", "allreduce") == trace.GLOO_ALLREDUCE
    assert trace.wire_phase("nccl", "allreduce") == trace.NCCL_ALLREDUCE
    assert trace.wire_phase("gloo", "broadcast") == "GLOO_BCAST"
