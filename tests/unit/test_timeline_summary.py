"""Figures of a trace: unions and not sums, who was late, files that break off, and what the command says."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_hvd.timeline import describe, main, read_trace
from spark_hvd.timeline.events import Instant, NotATraceError, ParsedTrace, PhaseKind, Span, kind_of, parse_trace
from spark_hvd.timeline.recorder import Event, Recorder, TraceWriter
from spark_hvd.timeline.summary import Straggler, common, length, summarize, union

MS = 10**6

INTERVALS = st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 9)).map(lambda pair: (pair[0], sum(pair))))


def cells(intervals: Sequence[tuple[int, int]]) -> set[int]:
    return {cell for start, end in intervals for cell in range(start, end)}


@given(INTERVALS)
def test_union(intervals: list[tuple[int, int]]) -> None:
    merged = union(intervals)
    assert cells(merged) == cells(intervals)
    assert all(start < end for start, end in merged)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))
    assert length(intervals) == len(cells(intervals))


@given(INTERVALS, INTERVALS)
def test_common(ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> None:
    found = common(ours, theirs)
    assert cells(found) == cells(ours) & cells(theirs)
    assert union(found) == found


def trace_of(*spans: tuple[int, str, str, int, int], ready: Sequence[tuple[int, str, int, int]] = ()) -> ParsedTrace:
    """Spans are (rank, row, phase, start, end) in ms; `ready` are RANK_READY as (recorder, row, rank, at)."""
    marks = [Instant(by, row, "RANK_READY", at * MS, {"rank": rank}) for by, row, rank, at in ready]
    found = [Span(rank, row, phase, start * MS, end * MS) for rank, row, phase, start, end in spans]
    return ParsedTrace(found, marks, {0: "rank 0 (alpha)"}, False)


# ---- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "activity"),
    [
        ("NEGOTIATE_ALLREDUCE", PhaseKind.NEGOTIATE),
        ("NEGOTIATE_BARRIER", PhaseKind.NEGOTIATE),
        ("MEMCPY_IN_FUSION_BUFFER", PhaseKind.PACK),
        ("BUCKET_FILL", PhaseKind.PACK),
        ("GLOO_ALLREDUCE", PhaseKind.WIRE),
        ("NCCL_BCAST", PhaseKind.WIRE),
        ("MPI_ADASUM_ALLREDUCE", PhaseKind.WIRE),
        ("SHARED_MEMORY", PhaseKind.WIRE),
        ("ALLREDUCE", PhaseKind.OPERATION),
        ("my phase", PhaseKind.OTHER),
    ],
)
def test_activities(phase: str, activity: PhaseKind) -> None:
    assert kind_of(phase) is activity


def test_times_are_unions() -> None:
    summary = summarize(
        trace_of(
            (0, "step", "STEP", 0, 50),
            (0, "step", "STEP", 50, 100),
            (0, "bucket 0", "BUCKET_FILL", 10, 12),
            (0, "bucket 0", "GLOO_ALLREDUCE", 12, 30),
            (0, "bucket 1", "GLOO_ALLREDUCE", 20, 40),
            (0, "step", "WAIT", 35, 41),
            (0, "late", "WAIT", 95, 110),
            (0, "late", "NEGOTIATE_ALLREDUCE", 100, 104),
            (0, "later", "NEGOTIATE_ALLREDUCE", 102, 106),
            (0, "late", "QUEUE", 104, 105),
            (1, "step", "WAIT", 0, 7),
        )
    )
    zero, one = summary.ranks
    assert (zero.name, one.name) == ("rank 0 (alpha)", "rank 1")
    assert zero.traced_ms == 110
    assert (zero.negotiation_ms, zero.queue_ms, zero.pack_ms) == (6, 1, 2)
    assert (zero.wire_ms, zero.wait_ms) == (28, 21)
    assert (zero.steps, zero.step_ms) == (2, 100)
    assert (zero.exposed_ms, zero.overlapped_ms) == (6 + 5, 35 - 12)
    assert (one.traced_ms, one.wait_ms, one.steps, one.exposed_ms) == (7, 7, 0, 0)


def test_an_instant_alone_counts_as_traced() -> None:
    summary = summarize(ParsedTrace([], [Instant(3, "cycle", "CYCLE_START", 2 * MS, {})], {}, False))
    assert [(rank.rank, rank.traced_ms) for rank in summary.ranks] == [(3, 0)]
    assert "rank 3" in describe(summary)


def test_the_largest_rows() -> None:
    spans = [(rank, f"t{row:02}", "GLOO_ALLREDUCE", 0, row + 2 * rank) for row in range(12) for rank in range(2)]
    again = [(0, "t03", "GLOO_ALLREDUCE", 1, 2), (0, "t03", "NCCL_ALLREDUCE", 200, 300)]
    top = summarize(trace_of(*spans, *again)).top_wire
    assert [row.row for row in top] == ["t03"] + [f"t{row:02}" for row in range(11, 2, -1) if row != 3] + ["t02"]
    assert (top[0].times, top[0].ms) == (3, (103 + 5) / 2)


# ---- who was last -------------------------------------------------------------------------------------------------


def negotiation(rank: int, start: int, end: int, row: str = "grad") -> tuple[int, str, str, int, int]:
    return rank, row, "NEGOTIATE_ALLREDUCE", start, end


def test_the_coordinator_says_who_is_ready() -> None:
    ready = [(0, "grad", 0, 1), (0, "grad", 1, 7), (0, "grad", 2, 3)]
    ready += [(0, "grad", 0, 20), (0, "grad", 1, 25), (0, "grad", 2, 21)]
    summary = summarize(trace_of(negotiation(0, 1, 8), negotiation(0, 20, 26), ready=ready))
    assert summary.stragglers == [Straggler(1, 2, 2, 4 + 4)]
    assert summary.row_stragglers == {"grad": Straggler(1, 2, 2, 8)}


def test_every_rank_says_that_it_is_ready() -> None:
    spans = [negotiation(0, 1, 9), negotiation(1, 4, 9), negotiation(0, 20, 26), negotiation(1, 18, 26)]
    assert summarize(trace_of(*spans)).stragglers == [Straggler(0, 1, 2, 2), Straggler(1, 1, 2, 3)]
    ready = [(0, "grad", 0, 1), (1, "grad", 1, 4), (0, "grad", 0, 20), (1, "grad", 1, 18)]
    assert summarize(trace_of(*spans, ready=ready)).stragglers == summarize(trace_of(*spans)).stragglers


def test_a_rank_that_is_ready_twice_was_ready_the_first_time() -> None:
    ready = [(0, "grad", 0, 1), (0, "grad", 0, 9), (0, "grad", 1, 5)]
    assert summarize(trace_of(negotiation(0, 1, 10), ready=ready)).stragglers == [Straggler(1, 1, 1, 4)]


def test_clocks_may_be_a_little_apart() -> None:
    spans = [negotiation(0, 1, 9), negotiation(0, 101, 109), negotiation(0, 201, 209)]
    ready = [(0, "grad", 0, at + 1) for at in (0, 100, 200)] + [(1, "grad", 1, at + 10) for at in (0, 100, 200)]
    assert summarize(trace_of(*spans, ready=ready)).stragglers == [Straggler(1, 3, 3, 27)]


def test_a_quick_rank_may_be_in_the_next_negotiation_already() -> None:
    spans = [negotiation(0, 0, 10), negotiation(1, 5, 14), negotiation(0, 12, 30), negotiation(1, 20, 30)]
    assert summarize(trace_of(*spans)).stragglers == [Straggler(1, 2, 2, 5 + 8)]


def test_nobody_is_last_in_a_tie_or_alone() -> None:
    assert summarize(trace_of(negotiation(0, 1, 9), negotiation(1, 1, 9), negotiation(0, 50, 60))).stragglers == []


def test_a_rank_that_is_late_for_two_tensors_at_once_is_late_once() -> None:
    spans = [negotiation(rank, start + 4 * rank, 20, row) for rank in range(2) for row, start in [("a", 0), ("b", 3)]]
    assert summarize(trace_of(*spans)).stragglers == [Straggler(1, 2, 2, 7)]


def test_overall_and_by_tensor() -> None:
    spans = []
    for start in range(0, 300, 100):
        spans += [negotiation(0, start, start + 9, "a"), negotiation(1, start + 1, start + 9, "a")]
    for start in range(0, 500, 100):
        spans += [negotiation(0, start + 2, start + 9, "b"), negotiation(1, start, start + 9, "b")]
    summary = summarize(trace_of(*spans))
    assert [(one.rank, one.last, one.of) for one in summary.stragglers] == [(0, 5, 8), (1, 3, 8)]
    assert {row: one.rank for row, one in summary.row_stragglers.items()} == {"a": 1, "b": 0}
    assert [row.row for row in summary.top_negotiation] == ["b", "a"]


def test_buckets_have_a_straggler_without_negotiation() -> None:
    wire = [
        (rank, "bucket 0", phase, start + 3 * rank, start + 20)
        for rank in range(3)
        for start, phase in [(0, "SHARED_MEMORY"), (50, "SHARED_MEMORY")]
    ]
    named = [
        negotiation(0, 0, 5),
        negotiation(1, 1, 5),
        (0, "grad", "GLOO_ALLREDUCE", 9, 11),
        (1, "grad", "GLOO_ALLREDUCE", 5, 11),
    ]
    summary = summarize(trace_of(*wire, *named))
    assert summary.bucket_stragglers == [Straggler(2, 2, 2, 6)]
    assert summary.stragglers == [Straggler(1, 1, 1, 1)]
    assert summary.row_stragglers["bucket 0"].rank == 2


# ---- files --------------------------------------------------------------------------------------------------------


def write(path: Path, *ranks: Sequence[Event], offsets: Sequence[int] = (0, 0, 0, 0), close: bool = True) -> Path:
    writer = TraceWriter(path, [f"host{rank}" for rank in range(len(ranks))])
    for rank, events in enumerate(ranks):
        recorder = Recorder(lambda batch, rank=rank: writer.add(rank, batch, offsets[rank]), batch=3)  # type: ignore[misc]
        for event in events:
            if event[0] == "X":
                recorder.span(*event[1:5], **event[5] or {})
            else:
                recorder.instant(*event[1:4], **event[4] or {})
        recorder.flush()
    if close:
        writer.close()
    return path


def some_step(late: int = 0) -> list[Event]:
    at = 10**9
    return [
        ["i", "loss", "RANK_READY", at + late, {"rank": 1 if late else 0}],
        ["X", "loss", "NEGOTIATE_ALLREDUCE", at + late, at + 5 * MS, None],
        ["X", "loss", "GLOO_ALLREDUCE", at + 5 * MS, at + 7 * MS, None],
        ["X", "step", "WAIT", at + 6 * MS, at + 7 * MS, None],
        ["X", "step", "STEP", at, at + 10 * MS, None],
    ]


ROWS = st.sampled_from(["a", "b", 'c "d"'])
PHASES = st.sampled_from(["STEP", "WAIT"])
EVENTS = st.lists(st.tuples(ROWS, PHASES, st.integers(0, 10**12), st.integers(0, 10**9)), max_size=8)


@given(first=EVENTS, second=EVENTS, offset=st.integers(-(10**12), 10**12))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    first: list[tuple[str, str, int, int]],
    second: list[tuple[str, str, int, int]],
    offset: int,
) -> None:
    # The other rank's clock is `offset` behind rank 0's; negative readings are fine for the purpose.
    events = [["X", row, phase, start, start + lasts, None] for row, phase, start, lasts in first]
    others = [["X", row, phase, start - offset, start - offset + lasts, None] for row, phase, start, lasts in second]
    zero = [["i", "zero", "ZERO", 0, None]]
    path = write(tmp_path_factory.mktemp("trace") / "t.json", zero + events, others, offsets=[0, offset])
    read = read_trace(path)
    expected = [Span(0, row, phase, start, start + lasts) for row, phase, start, lasts in first]
    expected += [Span(1, row, phase, start, start + lasts) for row, phase, start, lasts in second]
    assert read.spans == expected
    assert read.names == {0: "rank 0 (host0)", 1: "rank 1 (host1)"}
    assert not read.truncated


def test_a_file_may_end_anywhere(tmp_path: Path) -> None:
    text = write(tmp_path / "t.json", some_step(), some_step(late=MS)).read_text()
    whole = parse_trace(text)
    first = text.index('"ph":"i"')
    first = text.index("\n", first) - 1  # the end of the first event
    with pytest.raises(NotATraceError, match="no events"):
        parse_trace(text[: first - 1])
    most = 0
    for end in range(first, len(text.rstrip())):
        part = parse_trace(text[:end])
        count = len(part.spans) + len(part.instants)
        assert part.truncated
        assert part.spans == whole.spans[: len(part.spans)]
        assert count >= max(most, 1)
        most = count
        summarize(part)
    assert most == len(whole.spans) + len(whole.instants) == 10


def test_other_forms_of_the_format() -> None:
    event = {"ph": "X", "name": "ALLREDUCE", "pid": 1, "tid": 7, "ts": 12, "dur": 2.5, "cat": "x"}
    for text in (json.dumps([event]), json.dumps({"traceEvents": [event]}), json.dumps([event])[:-1] + " ,\n"):
        assert parse_trace(text).spans == [Span(1, "7", "ALLREDUCE", 0, 2500)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"hello", "no JSON array"),
        (b"[hello", "no JSON array"),
        (b'{"a": 1}', "no array of trace events"),
        (b"3", "no array of trace events"),
        (b"[1, 2]", "none of ours"),
        (b'[{"a": 1}]', "none of ours"),
        (b'[{"ph": "X", "pid": 0, "tid": 1, "ts": 0, "name": "no end"}]', "none of ours"),
        (b'[{"ph": "i", "pid": "x", "tid": 1, "ts": 0, "name": "no rank"}]', "none of ours"),
        (b'[{"ph": "i", "pid": 0, "tid": 1, "ts": NaN, "name": "no time"}]', "none of ours"),
        (b'[{"ph": "B", "pid": 0, "ts": 0}]', "no events: no spans (X) and no instants (i), only entries of kind B"),
        (b"[]", "no events"),
        (b"[\n", "no events"),
        (b"", "no events"),
        (b"\xff\xfe\x00", "no text"),
    ],
)
def test_files_of_no_use(content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    assert main(["summary", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {path} cannot be used: ")
    assert said in printed.err


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(tmp_path / "none.json")]) == 1
    assert capsys.readouterr().err == f"error: cannot read {tmp_path / 'none.json'}: No such file or directory\n"
    assert main(["summary", str(tmp_path)]) == 1
    assert "Is a directory" in capsys.readouterr().err


# ---- the command --------------------------------------------------------------------------------------------------


def test_summary_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "t.json", some_step(), some_step(late=3 * MS), close=False)
    assert main(["summary", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("The file ends early")
    for said in (
        "rank 0 (host0) 10.0 5.0 50 % 0.0 0 % 0.0 0 % 2.0 20 % 1.0 10 %",
        "rank 0 (host0) 1 10.00 1.0 10 % 1.0 10 %",
        "rank 1 (host1) 1 1 3.0",
        "2.0 1 rank 1 (1 of 1) loss",
        "3.5 1 rank 1 (1 of 1) loss",
    ):
        assert said in printed


def test_summary_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "t.json", some_step(), some_step(late=3 * MS))
    assert main(["summary", str(path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert not figures["truncated"]
    assert [rank["negotiation_ms"] for rank in figures["ranks"]] == [5, 2]
    assert figures["stragglers"] == [{"rank": 1, "last": 1, "of": 1, "late_ms": 3}]
    assert figures["top_wire"] == [{"row": "loss", "times": 1, "ms": 2}]


def test_run_as_a_module_without_what_it_does_not_need(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", some_step())
    program = f"""if True:
        import runpy, sys
        sys.argv = ["timeline", "summary", {str(path)!r}]
        try:
            runpy.run_module("spark_hvd.timeline", run_name="__main__")
        except SystemExit as end:
            assert end.code == 0
        assert not {{"matplotlib", "torch", "pyspark"}} & sys.modules.keys()
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 0 (host0)" in done.stdout


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "t.json", some_step(), some_step(late=3 * MS))
    picture = tmp_path / "t.png"
    assert main(["plot", str(path), "--out", str(picture)]) == 0
    whole = picture.read_bytes()
    assert whole.startswith(b"\x89PNG")
    assert main(["plot", str(path), "--out", str(picture), "--from-ms", "5", "--to-ms", "6.5"]) == 0
    assert picture.read_bytes() not in (b"", whole)
    assert main(["plot", str(path), "--out", str(tmp_path / "t.svg")]) == 0
    assert "GLOO_ALLREDUCE" in (tmp_path / "t.svg").read_text()


def test_a_plot_that_cannot_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "t.json", some_step())
    for out, window, said in [
        ("t.png", ["--from-ms", "50"], "nothing happened"),
        ("t.png", ["--from-ms", "5", "--to-ms", "2"], "nothing happened between 5 and 2 ms"),
        ("nowhere/t.png", [], "No such file"),
        ("t.xyz", [], "xyz"),
    ]:
        assert main(["plot", str(path), "--out", str(tmp_path / out), *window]) == 1
        assert said in capsys.readouterr().err


def test_plot_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "t.json", some_step())
    monkeypatch.delitem(sys.modules, "spark_hvd.timeline.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    assert main(["plot", str(path), "--out", str(tmp_path / "t.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
