"""Foreign text reaches a terminal as plain text and colours: printed lines, names, verdicts, summaries, errors."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spark_hvd.runner.diagnosis.report import Finding, Level, Report
from spark_hvd.runner.terminal import harmless
from spark_hvd.runner.watch.display.lines import LineWriter
from tests.contract.test_terminal_view import look

NASTY = {
    "clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "title": "\x1b]0;owned\x1b\\",
    "link": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "8-bit link": "\x9d8;;http://evil.example\x9cclick",
    "clear": "\x1b[2J\x1b[H",
    "8-bit clear": "\x9b2J",
    "question": "\x1b[6n\x1b[c\x1bZ",
    "reset": "\x1bc",
    "charset": "\x1b(0",
    "device": "\x1bPq#0\x1b\\",
    "beep": "\a\b\b\b\r\v\f\0\x7f",
    "bidi": "\u202egnp.exe\u2066\u2069",
    "open": "\x1b]0;no end",
}
ALL = "".join(NASTY.values())
HARM = re.compile(r"\x1b(?!\[[0-9;:]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

PROGRAM = rf"""
import sys, traceback
from spark_hvd.runner import Reporting, run_local
from spark_hvd.runner.watch.display.choose import make_display
from spark_hvd.runner.watch.view import RunView
from spark_hvd.runner.outcome.errors import RankFailedError
from spark_hvd.world.vitals import Vitals

NASTY = {ALL!r}
for progress in ("plain", "table", "off"):
    display, view = make_display(progress, 1, None, None), RunView("train" + NASTY, 2, 0.0)
    for second in range(1, 40):
        for rank in range(2):
            view.take(Vitals(
                rank=rank, size=2, generation=0, clock=float(second), entered=second, stage="train" + NASTY,
                step=second, total_steps=second, samples=32 * second, data_seconds=0.1, comm_seconds=0.1,
                cpu_seconds=1.0, memory_bytes=1 << 20, metrics={{"loss" + NASTY: 0.5}},
            ), float(second))
        display.show(view, float(second))
    display.lines(0, "out", "\x1b[31mred\x1b[0m out of " + progress + NASTY)
    display.lines(1, "err", "err" + NASTY)
    display.lines(-1, "err", "note" + NASTY)
    view.mark("it hangs" + NASTY)
    display.show(view, 50.0)
    display.end(view.summary(50.0))

def fail():
    print(NASTY + "printed")  # what stands before a carriage return is drawn over
    raise ValueError("bad value: " + NASTY)

try:
    run_local(fail, num_proc=1, reporting=Reporting(progress="plain"))
except RankFailedError as error:
    print(error)
    print("raw:", error.first.error.count("\x1b") > 10)
"""


@pytest.mark.parametrize("name", NASTY)
def test_nothing_but_text_is_left(name: str) -> None:
    assert not HARM.search(harmless(f"a{NASTY[name]}b"))
    assert harmless(f"a{NASTY[name]}b").startswith("a")
    assert harmless(f"a{NASTY[name]}b").endswith("b")


def test_text_and_colors_stay() -> None:
    text = "naïve 日本語 שלום\tx\n\x1b[1;31mred\x1b[0m \x1b[38:2::1:2:3mtrue\x1b[m 100 %|████▏|"
    assert harmless(text) == text
    assert harmless(text, colors=False) == re.sub(r"\x1b\[[0-9;:]*m", "", text)


@given(st.text(st.sampled_from("\x1b\x9b\x9d\x90\\]P[0;8mJ\x07\x9c\r\n a\u202e")))
@example(ALL)
def test_no_combination_gets_through(text: str) -> None:
    assert not HARM.search(harmless(text))
    assert not re.search("[\x1b\x9b]", harmless(text, colors=False))


@pytest.mark.slow
def test_a_terminal_gets_text_only(tmp_path: Path) -> None:
    seen = look(tmp_path, "", 100, 40, source=PROGRAM)
    raw = seen.raw.decode()
    assert raw.count("red\x1b[0m out of ") == 3
    # The table itself moves the cursor and hides it.
    own = re.compile(r"\x1b\[(?:\d*[ABCDGK]|\?25[lh]|2K|1A)|\r")
    left = own.sub("", raw)
    assert not HARM.search(left), [left[max(0, m.start() - 40) : m.end() + 20] for m in HARM.finditer(left)]
    for wanted in ("loss", "it hangs", "note", "err", "bad value", "printed", "Traceback of rank 0"):
        assert wanted in raw, wanted
    assert "raw: True" in raw, "who asks the error itself gets what there was"


def test_files_get_what_was_printed() -> None:
    file = io.StringIO()
    LineWriter(file, file).write(1, "out", ALL)
    assert file.getvalue() == f"[1] {ALL}\n"


def test_the_doctors_report() -> None:
    report = Report("x" + ALL, (Finding("hosts", Level.ERROR, "host " + ALL, "do\nthis" + ALL),), 1.0)
    assert not HARM.search(str(report))
    assert "host" in str(report)
