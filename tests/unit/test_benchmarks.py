"""Benchmarks declare their arguments; their output becomes a picture; one that fails does not stop the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import bars

GOOD = '''"""A good one.

More of it.
"""

import sys

MINUTES = 0.1

if __name__ == "__main__":
    print("| what | ms |\\n|---|---|\\n| a | 1.5 |")
    sys.exit(len(sys.argv) - 1)
'''


@pytest.mark.parametrize("program", command.programs(), ids=lambda program: program.name)
def test_every_benchmark_says_what_it_is_and_takes(program: command.Program) -> None:
    assert program.about
    assert program.minutes is not None, f"benchmarks/{program.name}.py: expected MINUTES = about how many it takes"


def test_all_are_listed_with_the_sum() -> None:
    every = [
        command.Program("a", "First.", 2.5, needs_root=False),
        command.Program("b", "Second.", None, needs_root=False),
        command.Program("c", "Third.", 0, needs_root=False),
    ]
    told = command.listing(every)
    assert "| a | 2.5 | First. |" in told
    assert "| b | ? | Second. |" in told
    assert "| c | 0 | Third. (measures nothing: not among all) |" in told
    assert told.endswith("\n2 of 3: about 2 minutes, and 1 that do not say. Needs a quiet machine.")


def test_hosts_of_namespaces_need_root_and_others_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    program = command.Program("a", "First.", 1, needs_root=True)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert program.left_out == "needs root"
    monkeypatch.setattr("os.path.exists", lambda path: path != "/dev/nvidiactl")
    assert command.Program("d", "Fourth.", 1, needs_root=False, needs_gpu=True).left_out == "needs a GPU"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert program.left_out == ""


def test_a_new_file_is_found_and_one_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    package, out = tmp_path / "measures", tmp_path / "out"
    package.mkdir()
    (package / "bad.py").write_text(f"MINUTES = 1\n{GOOD.replace('len(sys.argv) - 1', '3')}")
    (package / "good.py").write_text(GOOD)
    (package / "shared.py").write_text("MINUTES = 1\n")
    monkeypatch.setattr(command, "FOLDER", package)
    monkeypatch.setattr(command, "__package__", "measures")
    every = command.programs(package)
    assert [(each.name, each.about, each.minutes) for each in every] == [("bad", "", 0.1), ("good", "A good one.", 0.1)]
    assert command.run_all(every, out) == 1
    printed = capfd.readouterr().out
    assert printed.index("== bad") < printed.index("== good")
    assert printed.endswith("\nFailed: bad (exit status 3)\n")
    assert {path.name for path in out.iterdir()} == {"bad.txt", "good.txt", "good.png"}
    assert (out / "good.txt").read_text() == "| what | ms |\n|---|---|\n| a | 1.5 |\n"
    assert (out / "good.png").read_bytes()[:4] == b"\x89PNG"
    assert command.run_all(every[1:], out) == 0


def test_a_name_that_no_benchmark_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["nonsense"]) == 2
    assert "nonsense: expected all, or one of allreduce, " in capsys.readouterr().err


def test_tables_are_read_from_what_is_printed() -> None:
    text = (
        "Words, and more.\n| a | b |\n|---|---:|\n| x | 1 |\n\nhosts,bytes\n2,4\n2,8\n# rate 1, hosts\n| c |\n|---|\n"
    )
    assert bars.tables(text) == [[["a", "b"], ["x", "1"]], [["hosts", "bytes"], ["2", "4"], ["2", "8"]]]


@pytest.mark.parametrize(
    ("cell", "value"),
    [("1,024", 1024), ("-13 %", -13), ("0.5", 0.5), ("1.0 x", 1), ("3.2 ms", 3.2), ("1e-05", 1e-5), ("0.1-0.3", None)],
)
def test_a_cell(cell: str, value: float | None) -> None:
    assert bars.number(cell) == value


def test_without_numbers_there_is_no_picture(tmp_path: Path) -> None:
    assert not bars.draw("| a | b |\n|---|---|\n| x | y |\n", tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
