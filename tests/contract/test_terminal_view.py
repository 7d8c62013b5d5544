"""The table on a real pseudo-terminal: what a user sees, and the state in which it leaves the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyte
import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = r"""
import logging, os, sys, time
from spark_hvd.runner.watch.display.choose import make_display
from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.vitals import Vitals

def record(rank, size, second):
    return Vitals(
        rank=rank, size=size, generation=0, clock=float(second), entered=second, stage="train", epoch=0, epochs=4,
        step=second, steps=50, total_steps=second, samples=32 * second,
        watched_seconds=float(second), data_seconds=0.1 * second,
        comm_seconds=(0.05 if rank == 1 else 0.4) * second, metrics={"loss": 1 / second}, cpu_seconds=float(second),
        memory_bytes=600 << 20,
    )

logging.basicConfig(format="%(message)s")
end = sys.argv[1]
display, view, size = make_display("auto", 1, None, None), RunView("train on 4 ranks", 4, 0.0), 4
try:
    for second in range(1, 41):
        for rank in range(size):
            view.take(record(rank, size, second), float(second))
        display.show(view, float(second))
        display.lines(second % 4, "out", f"line {second} of the ranks")
        if second == 10:
            print("printed by the program")
            logging.getLogger("somebody").warning("logged by the program")
        if second == 20:
            display.lines(2, "err", "\x1b[31mred\x1b[0m, \x1b[5A\x1b[2Kand no way up\a")
            display.lines(3, "out", "long: " + "0123456789" * 20)
    view.mark("the run hangs: rank 1 never entered allreduce 'loss'")
    display.show(view, 41.0)
    if end == "interrupt":
        print("waiting", flush=True)
        time.sleep(60)
    if end == "error":
        raise OSError("something else went wrong")
except BaseException as error:
    display.end(None)
    print(type(error).__name__)
else:
    display.end(view.summary(41.0))
    display.end(view.summary(41.0))
    print("the program goes on")
"""

REAL = r"""
import spark_hvd

def train():
    import time
    import torch
    import spark_hvd.torch as hvd

    for step in hvd.progress(range(30), epoch=0, epochs=1, loss=lambda: 0.25):
        time.sleep(0.05)
        hvd.allreduce(torch.ones(1), name="x")
    print("done")

result = spark_hvd.run_local(train, num_proc=2)
print("of", result.summary.ranks, "ranks")
"""


@dataclass
class Seen:
    """What the terminal shows, and the bytes that were sent to it."""

    lines: list[str]
    raw: bytes
    cursor_hidden: bool
    modes_kept: bool

    def index(self, start: str) -> int:
        return next(number for number, line in enumerate(self.lines) if line.startswith(start))


def look(
    tmp_path: Path,
    end: str,
    columns: int = 100,
    rows: int = 30,
    environment: dict[str, str] | None = None,
    redirect: str = "",
    when: Callable[[bytes, int, int], bool] = lambda raw, master, pid: True,
    source: str = PROGRAM,
) -> Seen:
    """Run the program on its own terminal until it ends; `when` acts, and returns whether it has acted."""
    program = tmp_path / "program.py"
    program.write_text(source)
    pid, master = pty.fork()
    if pid == 0:
        os.environ.pop("NO_COLOR", None)
        os.environ.pop("JPY_PARENT_PID", None)
        os.environ.update({"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **(environment or {})})
        os.execv("/bin/sh", ["sh", "-c", f"sleep 0.1; exec '{sys.executable}' '{program}' {end} {redirect}"])
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    before, raw, done = termios.tcgetattr(master), b"", False
    after = before
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        done = done or when(raw, master, pid)
        try:
            raw += os.read(master, 65536)
        except OSError:  # the program has ended, and no process has the terminal open any more
            break
        after = termios.tcgetattr(master)
    os.waitpid(pid, 0)
    os.close(master)
    screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
    pyte.ByteStream(screen).feed(raw)
    above = ["".join(line[column].data for column in range(columns)) for line in screen.history.top]
    return Seen(
        [line.rstrip() for line in [*above, *screen.display]], raw, screen.cursor.hidden, modes_kept=before == after
    )


@pytest.mark.parametrize("columns", [40, 80])
def test_one_table_below_all_that_is_printed(columns: int, tmp_path: Path) -> None:
    seen = look(tmp_path, "end", columns)
    headings = [number for number, line in enumerate(seen.lines) if line.startswith("rank  ")]
    assert len(headings) == 1, "\n".join(seen.lines)
    printed, table = seen.lines[: headings[0] - 1], seen.lines[headings[0] - 1 :]
    assert [line for line in printed if line.startswith("[") and " line " in line] == [
        f"[{second % 4}] line {second} of the ranks" for second in range(1, 41)
    ]
    assert printed[10:12] == ["printed by the program", "logged by the program"]
    assert "[2] red, and no way up" in printed
    assert f"[3] long: {'0123456789' * 20}" in "".join(printed)
    assert table[0].startswith("train on 4 ranks   41 s")
    assert [line.split()[0] for line in table[2:6]] == ["0", "1", "2", "3"]
    assert "slowest" in table[3]
    if columns == 80:
        assert table.pop(6).split() == ["all", "128", "10", "%", "31", "%"]
    assert " ".join(table[6:8]).startswith("the run hangs: rank 1 never entered")
    assert "the program goes on" in table
    below = table[6 : table.index("the program goes on")]
    assert below.count("train on 4 ranks") == 1  # from the summary
    assert not seen.cursor_hidden
    assert seen.modes_kept


def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    def interrupt(raw: bytes, master: int, pid: int) -> bool:
        if b"waiting" not in raw:
            return False
        assert b"\x1b[?25l" in raw  # meanwhile the cursor is hidden
        os.write(master, b"\x03")
        return True

    seen = look(tmp_path, "interrupt", when=interrupt)
    assert seen.lines[seen.index("train on 4 ranks") + 1].startswith("rank  ")
    assert sum(line.startswith("rank  ") for line in seen.lines) == 1
    assert "KeyboardInterrupt" in seen.lines
    assert seen.index("KeyboardInterrupt") > seen.index("train on 4 ranks") + 6
    assert not seen.cursor_hidden
    assert seen.modes_kept


def test_an_error_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    seen = look(tmp_path, "error")
    assert "OSError" in seen.lines
    assert not seen.cursor_hidden
    assert seen.modes_kept


def test_what_ranks_print_can_be_piped_beside_the_table(tmp_path: Path) -> None:
    seen = look(tmp_path, "end", redirect=f"> {tmp_path}/out")
    assert sum(line.startswith("rank  ") for line in seen.lines) == 1
    assert "[2] red, and no way up" in seen.lines
    written = (tmp_path / "out").read_text().splitlines()
    assert [line for line in written if " line " in line] == [
        f"[{second % 4}] line {second} of the ranks" for second in range(1, 41)
    ]
    assert not any("\x1b" in line or line.startswith("train on") for line in written)


def test_colours_only_where_they_are_wanted(tmp_path: Path) -> None:
    colour = re.compile(rb"\x1b\[[0-9;]*3[0-9]m")
    assert colour.search(look(tmp_path, "end").raw)
    assert not colour.search(look(tmp_path, "end", environment={"NO_COLOR": "1"}).raw)


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    seen = look(tmp_path, "end", environment={"TERM": "dumb"})
    assert not any(line.startswith("rank  ") for line in seen.lines)
    assert sum(line.startswith("train on 4 ranks: ") for line in seen.lines) == 1
    assert b"\x1b[?25l" not in seen.raw


@pytest.mark.slow
def test_a_real_run(tmp_path: Path) -> None:
    seen = look(tmp_path, "", source=REAL)
    assert sum(line.startswith("rank  ") for line in seen.lines) == 1, "\n".join(seen.lines)
    table = seen.lines[seen.index("train on 2 ranks") :]
    assert [line.split()[:4] for line in table[2:4]] == [[f"{rank}", "1/1", "30/30", "0.2500"] for rank in range(2)]
    assert sorted(line for line in seen.lines if line.endswith(" done")) == ["[0] done", "[1] done"]
    assert "of 2 ranks" in table
    assert not seen.cursor_hidden
    assert seen.modes_kept
