"""Lines out of bytes, and lines with their rank in front."""

from __future__ import annotations

import io

from spark_hvd.runner.output import LineCutter, Printer, Tail


def test_lines_are_cut_at_every_kind_of_line_end() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"one\ntwo\r\n 10%\r 20%\rpart") == ["one", "two", " 10%", " 20%"]
    assert cutter.feed(b"ial\n") == ["partial"]
    assert cutter.end() == []


def test_a_last_line_without_an_end_is_kept() -> None:
    cutter = LineCutter()
    assert cutter.feed("größe".encode()) == []
    assert cutter.end() == ["größe"]
    assert cutter.end() == []


def test_an_endless_line_does_not_fill_the_memory() -> None:
    cutter = LineCutter()
    assert len(cutter.feed(b"x" * 200_000)) == 1
    assert cutter.end() == []


def test_the_tail_keeps_the_last_lines() -> None:
    tail = Tail()
    tail.add([f"line {i}" for i in range(100)])
    assert str(tail).splitlines()[0] == "line 80"
    assert str(tail).endswith("line 99")


def test_printer_prefixes_each_line_and_keeps_streams_apart() -> None:
    out, err = io.StringIO(), io.StringIO()
    printer = Printer(out, err)
    printer.put(0, "out", "a\nb")
    printer.put(11, "err", "c")
    printer.flush()
    assert out.getvalue() == "[0] a\n[0] b\n"
    assert err.getvalue() == "[11] c\n"


def test_printer_says_how_much_it_had_to_drop() -> None:
    out, err = io.StringIO(), io.StringIO()
    printer = Printer(out, err)
    block = "\n".join(["y" * 1023] * 1024)
    for _ in range(40):
        printer.put(0, "out", block)
    printer.flush()
    kept = out.getvalue().count("\n")
    assert f"({40 * 1024 - kept} lines of the ranks came faster" in err.getvalue()
    assert 0 < kept < 40 * 1024


def test_a_missing_stream_takes_nothing() -> None:
    printer = Printer(None, None)
    printer.put(0, "out", "a")
    printer.flush()
