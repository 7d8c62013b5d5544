"""Bytes split into lines, and lines prefixed with their rank."""

from __future__ import annotations

import io
import os
from unittest.mock import Mock

from spark_hvd.runner.supervise.output import LineCutter, RankOutput, Tail
from spark_hvd.runner.watch.display.lines import LineWriter, OutputQueue


def test_lines_are_cut_at_every_kind_of_line_end() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"one\n\ntwo\r") == ["one", ""]
    assert cutter.feed(b"\npart") == ["two"]
    assert cutter.feed(b"ial\n") == ["partial"]
    assert cutter.end() == []


def test_of_a_progress_bar_one_state_a_second_is_a_line() -> None:
    now = 0
    cutter = LineCutter(lambda: now / 10)
    told = []
    for percent in range(0, 101):
        told += cutter.feed(f"\r{percent}%".encode())
        now += 1
    assert told == [f"{percent}%" for percent in range(0, 101, 10)]
    assert cutter.feed(b"\r101%") == []
    assert cutter.feed(b"\n") == []
    assert cutter.feed(b"done\n\n") == ["101%", "done", ""]
    assert cutter.feed(b"\r7%") == []
    now += 10
    assert cutter.due() == ["7%"]
    assert cutter.feed(b"\n") == cutter.due() == cutter.end() == []
    assert cutter.feed(b"8%\r") == []
    assert cutter.end() == ["8%"]


def test_lines_beside_a_progress_bar_are_all_there() -> None:
    cutter = LineCutter(lambda: 0.0)
    assert cutter.feed(b"\r1%") == ["1%"]
    for number in range(3):  # as tqdm.write does
        assert cutter.feed(f"\r    \rline {number}\n\r2%".encode()) == [f"line {number}"]
    assert cutter.feed(b"\rall at once\nmore\n") == ["all at once", "more"]
    assert cutter.feed(b"\x1b[01;31m\x1b[Kmatch\x1b[m\x1b[K\n" * 2) == ["\x1b[01;31m\x1b[Kmatch\x1b[m\x1b[K"] * 2


def test_nested_progress_bars_leave_no_empty_lines_and_no_moves_of_the_cursor() -> None:
    now = 0.0
    cutter = LineCutter(lambda: now)
    assert cutter.feed(b"\router 0%") == ["outer 0%"]
    for percent in range(100):
        assert cutter.feed(f"\n\n\rinner {percent}%\x1b[A\x1b[A".encode()) == []
    now = 1.0
    assert cutter.due() == ["inner 99%"]
    assert cutter.feed(b"\r            \r") == []
    assert cutter.feed(b"\x1b[31mred\x1b[0m") == []
    assert cutter.end() == ["\x1b[31mred\x1b[0m"]


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
    assert note == (-1, "err", f"({40 * 1024 - lines} lines of the ranks arrived faster than they could be shown)")
    assert 0 < lines < 40 * 1024
    assert not list(queue.take())


def test_torch_s_word_of_addresses_without_names_is_not_passed_on() -> None:
    reading, writing = os.pipe()
    told: list[tuple[str, list[str]]] = []
    output = RankOutput({reading: "err"}, Mock(), lambda stream, lines: told.append((stream, lines)))
    word = (
        "[W1123 07:10:00.123456789 socket.cpp:764] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
    )
    os.write(writing, f"before\n{word}\nafter\n".encode())
    os.close(writing)
    while reading in output.fds:
        output.read(reading)
    os.close(reading)
    assert told == [("err", ["before", "after"])]
