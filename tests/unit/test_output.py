"""Lines out of bytes, and lines with their rank in front."""

from __future__ import annotations

import io

from spark_hvd.runner.supervise.output import LineCutter, Tail
from spark_hvd.runner.watch.display.lines import LineWriter, OutputQueue


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


def test_each_line_has_its_rank_before_it_and_streams_stay_apart() -> None:
    out, err = io.StringIO(), io.StringIO()
    writer = LineWriter(out, err)
    writer.write(0, "out", "a\nb")
    writer.write(11, "err", "c")
    writer.write(-1, "err", "a note")
    assert out.getvalue() == "[0] a\n[0] b\n"
    assert err.getvalue() == "[11] c\na note\n"


def test_a_missing_stream_takes_nothing() -> None:
    LineWriter(None, None).write(0, "out", "a")


def test_a_queue_says_how_much_it_had_to_drop() -> None:
    queue = OutputQueue()
    block = "\n".join(["y" * 1023] * 1024)
    for _ in range(40):
        queue.put(0, "out", block)
    note, *kept = queue.take()
    lines = sum(text.count("\n") + 1 for _, _, text in kept)
    assert note == (-1, "err", f"({40 * 1024 - lines} lines of the ranks came faster than they could be shown)")
    assert 0 < lines < 40 * 1024
    assert not list(queue.take())
