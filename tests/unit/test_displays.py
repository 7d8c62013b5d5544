"""Which display a run gets, what each of them writes, and what happens when one fails."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from spark_hvd.runner.config import CHOICES, RunConfig
from spark_hvd.runner.launch.arguments import adapted
from spark_hvd.runner.watch.display.choose import make_display
from spark_hvd.runner.watch.display.lines import JsonDisplay, LineWriter, PlainDisplay
from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.vitals import Vitals
from tests.trained_ranks import record, trained


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")


Capture = pytest.CaptureFixture[str]


# ---- the choice ------------------------------------------------------------------------------------------------------


def kind(progress: str, stdout: Any = None) -> str:
    display: Any = make_display(progress, 1, stdout, None)
    inner = display._display
    return type(getattr(inner, "_display", inner)).__name__


@pytest.mark.parametrize(
    ("terminal", "term", "chosen"),
    [(True, "xterm-256color", "TableDisplay"), (True, "dumb", "PlainDisplay"), (False, "xterm", "PlainDisplay")],
)
def test_auto_is_the_table_on_a_terminal(
    terminal: bool, term: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    assert kind("auto") == chosen
    assert kind("auto", io.StringIO()) == chosen


def test_auto_is_plain_in_a_shell_command_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-color")
    monkeypatch.setenv("JPY_PARENT_PID", "4711")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert kind("auto") == "PlainDisplay"


def test_auto_is_the_notebook_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))  # type: ignore[arg-type]
    assert kind("auto") == "NotebookDisplay"
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace(), raising=False)
    assert kind("auto") == "PlainDisplay"


def test_what_is_asked_for_is_what_one_gets() -> None:
    names = {"table": "TableDisplay", "plain": "PlainDisplay", "json": "JsonDisplay", "off": "LinesDisplay"}
    for progress, name in names.items():
        assert kind(progress) == name
    assert set(names) | {"auto", "notebook"} == set(CHOICES)


def test_a_wrong_name_is_an_error_that_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"progress='tabel': expected one of 'auto', 'table', .*'off'"):
        RunConfig(progress="tabel")
    with pytest.raises(ValueError, match="does not run in a notebook"):
        adapted(RunConfig(progress="notebook"))


@pytest.mark.parametrize("progress", ["auto", "table", "plain", "json", "off"])
def test_with_verbose_0_only_streams_that_were_given_are_written_to(progress: str, capsys: Capture) -> None:
    given = io.StringIO()
    display = make_display(progress, 0, given, None)
    display.lines(0, "out", "a")
    display.lines(0, "err", "b")
    view = trained()
    for second in range(100):
        display.show(view, float(second))
    display.end(view.summary(40.0))
    assert given.getvalue() == "[0] a\n"
    assert capsys.readouterr() == ("", "")


# ---- plain lines -----------------------------------------------------------------------------------------------------


def test_plain_lines_come_every_interval() -> None:
    out, notes, view = io.StringIO(), io.StringIO(), trained()
    display = PlainDisplay(LineWriter(out, out), LineWriter(None, notes), interval=30.0)
    shown = []
    for quarter in range(400):
        display.show(view, 1000 + quarter / 4)
        if notes.getvalue().count("\n") > len(shown):
            shown.append(quarter / 4)
    assert shown == [30.0, 60.0, 90.0]
    assert out.getvalue() == ""


def test_a_plain_line_tells_it_all(capsys: Capture) -> None:
    display, view = make_display("plain", 1, None, None), trained()
    display.lines(1, "out", "one\ntwo")
    display.show(view, 10.0)
    display.show(view, 40.0)
    display.end(view.summary(40.0))
    display.end(view.summary(40.0))
    out, err = capsys.readouterr()
    assert out == "[1] one\n[1] two\n"
    line, *summary = err.splitlines()
    assert line == (
        "train on 2 ranks: 40 s, epoch 1/4 step 40/50, loss 0.02500, 64.0 samples/s, data 10 %, communication 22 %, "
        "ETA 2 min 40 s, slowest rank 1: 1.58 times the median rank's own time a step"
    )
    assert summary == str(view.summary(40.0)).splitlines()


def test_plain_says_who_is_silent_and_that_ranks_changed() -> None:
    notes, view = io.StringIO(), trained(size=8)
    for rank in range(3):
        view.take(record(rank, 3, 41, generation=1), 41.0)
    view.take(record(2, 3, 45, generation=1), 45.0)
    display = PlainDisplay(LineWriter(None, None), LineWriter(None, notes), interval=0.0)
    display.show(view, 46.0)
    line = notes.getvalue()
    assert "rank 0 silent for 5 s, rank 1 silent for 5 s, 1 change of membership, now 3 ranks" in line
    assert "rank 2 silent" not in line


def test_a_short_run_that_tells_nothing_shows_nothing(capsys: Capture) -> None:
    display, view = make_display("plain", 1, None, None), RunView("train on 2 ranks", 2, 0.0)
    display.show(view, 0.0)
    display.show(view, 2.0)
    display.end(view.summary(2.0))
    assert capsys.readouterr() == ("", "")


def test_a_plain_line_that_would_tell_nothing_is_left_out() -> None:
    notes, view = io.StringIO(), RunView("train on 2 ranks", 2, 0.0)
    display = PlainDisplay(LineWriter(None, None), LineWriter(None, notes), interval=0.0)
    display.show(view, 31.0)
    for rank in range(2):
        view.take(Vitals(rank, 2, 0, 31.0, process=str(rank)), 31.0)
        view.take(Vitals(rank, 2, 0, 32.0, process=str(rank)), 32.0)
    display.show(view, 32.0)
    assert notes.getvalue() == "train on 2 ranks: 31 s, no reports from the ranks yet\n"


# ---- JSON lines ------------------------------------------------------------------------------------------------------


def test_json_lines_are_all_that_is_written(capsys: Capture) -> None:
    display, view = make_display("json", 1, None, None), trained(metrics={"loss": math.nan, "gap": -math.inf})
    display.lines(1, "out", 'say "hi"\nsecond')
    display.lines(0, "err", "größe")
    display.show(view, 40.0)
    display.show(view, 40.25)
    display.show(view, 41.0)
    display.end(view.summary(41.0))
    display.end(view.summary(41.0))
    out, err = capsys.readouterr()
    assert err == ""
    events = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["output", "output", "output", "progress", "summary"]
    assert [(event["rank"], event["stream"], event["text"]) for event in events[:3]] == [
        (1, "out", 'say "hi"'),
        (1, "out", "second"),
        (0, "err", "größe"),
    ]
    progress, summary = events[3:]
    assert progress["rows"][1]["metrics"] == {"loss": None, "gap": None}
    assert progress["rows"][1]["rank"] == 1
    assert progress["rows"][1]["skew"] == pytest.approx(0.95 / 0.6, rel=1e-5)
    assert progress["samples_per_second"] == pytest.approx(64)
    assert progress["remaining"] == {"seconds": pytest.approx(159), "whole": True}
    assert summary["steps"] == 40
    assert summary["metrics"] == {"loss": None, "gap": None}
    assert summary["efficiency"] == pytest.approx(0.675)
    assert all(event["time"] > 1.7e9 for event in events)


def test_the_time_of_an_event_is_exact() -> None:
    out = io.StringIO()
    JsonDisplay(out, clock=lambda: 1795312345.6789).lines(0, "out", "a")
    assert json.loads(out.getvalue())["time"] == 1795312345.679


def test_json_goes_to_the_stream_that_was_given(capsys: Capture) -> None:
    out, err = io.StringIO(), io.StringIO()
    display = make_display("json", 1, out, err)
    display.lines(0, "out", "a")
    display.lines(0, "err", "b")
    assert json.loads(out.getvalue())["text"] == "a"
    assert err.getvalue() == "[0] b\n"
    assert capsys.readouterr() == ("", "")


# ---- streams, and errors of them -------------------------------------------------------------------------------------


def test_ranks_go_to_the_streams_given_and_our_lines_to_stderr(capsys: Capture) -> None:
    out, err = io.StringIO(), io.StringIO()
    display, view = make_display("plain", 1, out, err), trained()
    display.lines(0, "out", "a")
    display.lines(0, "err", "b")
    display.end(view.summary(40.0))
    assert (out.getvalue(), err.getvalue()) == ("[0] a\n", "[0] b\n")
    assert capsys.readouterr() == ("", f"{view.summary(40.0)}\n")


@pytest.mark.parametrize("progress", ["auto", "table", "plain", "json", "off"])
def test_an_error_of_a_stream_that_was_given_is_raised(progress: str) -> None:
    display = make_display(progress, 1, Broken(), None)
    with pytest.raises(BrokenPipeError):
        display.lines(0, "out", "a")
    with pytest.raises(BrokenPipeError):
        make_display(progress, 0, Broken(), None).lines(0, "out", "a")


@pytest.mark.parametrize("progress", ["plain", "json", "off"])
def test_an_error_of_our_own_streams_is_said_once(
    progress: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stdout", Broken())
    display, view = make_display(progress, 1, None, None), trained()
    with caplog.at_level(logging.WARNING):
        for second in range(5):
            display.lines(0, "out", "a")
            display.show(view, 40.0 + 30 * second)
        display.end(view.summary(41.0))
    said = [entry.message for entry in caplog.records if "can no longer be shown (nobody reads)" in entry.message]
    assert len(said) in (1, 2)
    assert len(said) == len(set(said))


def test_a_display_that_fails_leaves_the_output(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    display, view = make_display("plain", 1, None, None), trained()
    display.show(view, 0.0)
    monkeypatch.setattr(view, "snapshot", lambda now: 1 / 0)
    display.show(view, 40.0)
    display.lines(0, "out", "still here")
    display.show(view, 80.0)
    display.end(view.summary(80.0))
    assert capsys.readouterr().out == "[0] still here\n"
    assert [entry.message for entry in caplog.records] == [
        "the run can no longer be shown (division by zero); it continues"
    ]
