"""Stacks and tracebacks in which unhelpful frames are folded."""

from __future__ import annotations

import faulthandler
import linecache
import os
import tempfile
import traceback
from pathlib import Path

import pytest

import spark_hvd
from spark_hvd.runner.tracebacks import folded, grouped, library_of, place, threads, trim_traceback
from spark_hvd.world.vitals import Vitals

SITE = "/opt/venv/lib/python3.11/site-packages"
STACKS = f"""\
Thread 0x00007f1111111111 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f2222222222 [reader] (most recent call first):
  File "/home/u/reader.py", line 7 in fetch

Current thread 0x00007f3333333333 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "{SITE}/spark_hvd/collectives/handle.py", line 90 in wait
  File "{SITE}/spark_hvd/torch/reduce.py", line 40 in allreduce
  File "/home/u/train.py", line 31 in average
  File "{SITE}/torch/nn/modules/module.py", line 1500 in _call_impl
  File "{SITE}/torch/nn/modules/module.py", line 1490 in _wrapped_call_impl
  File "/home/u/train.py", line 60 in train
"""


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/home/u/train.py", ""),
        ("/home/u/runner/train.py", ""),
        ("/tmp/ipykernel_77/123.py", ""),
        ("<stdin>", ""),
        (f"{SITE}/torch/nn/modules/module.py", "torch"),
        (f"{SITE}/spark_hvd/runner/rank/main.py", "spark_hvd"),
        (f"{SITE}/spark_hvd/runner/watch/hang/states.py", "spark_hvd"),
        ("/elsewhere/src/spark_hvd/collectives/queue.py", "spark_hvd"),
        (str(Path(spark_hvd.__file__).parents[1] / "runner" / "child.py"), "spark_hvd"),
        ("/usr/lib/python3.11/threading.py", "Python"),
        ("<frozen runpy>", "Python"),
    ],
)
def test_whose_a_file_is(file: str, library: str) -> None:
    assert library_of(file) == library


def test_the_user_s_frames_stay_and_others_are_a_line() -> None:
    assert folded(STACKS) == [
        'File "/home/u/train.py", line 60, in train',
        "[2 frames of torch, module.py, line 1500, in _call_impl]",
        'File "/home/u/train.py", line 31, in average',
        "[2 frames of spark_hvd, handle.py, line 90, in wait]",
        "[1 frame of Python, threading.py, line 331, in wait]",
        "another thread:",
        'File "/home/u/reader.py", line 7, in fetch',
    ]
    assert place(STACKS) == "train.py, line 31, in average"


def test_a_thread_of_libraries_alone_shows_its_innermost_frames() -> None:
    text = "Thread 0x1f (most recent call first):\n" + "".join(
        f'  File "{SITE}/torch/a.py", line {n} in f{n}\n' for n in range(50)
    )
    assert folded(text)[-1] == f'File "{SITE}/torch/a.py", line 0, in f0'
    assert len(folded(text)) == 6
    assert place(text) == "a.py, line 0, in f0"


def test_source_is_shown_where_it_can_be_read() -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)  # here
        file.seek(0)
        text = file.read()
    assert threads(text)[-1][0].file == __file__
    line = place(text)
    assert line.startswith(f"{os.path.basename(__file__)}, line ")
    assert line.endswith("in test_source_is_shown_where_it_can_be_read: faulthandler.dump_traceback(file)  # here")


def test_ranks_with_the_same_stacks_come_together() -> None:
    idle = 'Thread 0x1 (most recent call first):\n  File "/home/u/t.py", line 3 in idle\n'
    groups = grouped({0: STACKS, 1: idle, 2: STACKS.replace("0x00007f1", "0x00007e1"), 3: "", 4: "unreadable"})
    assert [ranks for ranks, _ in groups] == [[0, 2], [1], [4]]
    assert groups[2][1] == ["unreadable"]


def test_a_traceback_keeps_what_is_the_user_s_to_the_letter() -> None:
    text = f"""\
Traceback (most recent call last):
  File "/home/u/train.py", line 31, in train
    x = batch["distance"]
        ~~~~~^^^^^^^^^^^^
  File "{SITE}/pandas/frame.py", line 9, in __getitem__
    raise KeyError(key)
KeyError: 'distance'"""
    assert trim_traceback(text) == text


def test_our_frames_and_torch_s_plumbing_are_a_line() -> None:
    text = f"""\
Traceback (most recent call last):
  File "{SITE}/spark_hvd/estimators/training/train.py", line 5, in train
    loop()
  File "{SITE}/spark_hvd/estimators/torch/loop.py", line 7, in loop
    model(x)
  File "{SITE}/torch/nn/modules/module.py", line 1, in _wrapped_call_impl
    return self._call_impl(*args)
  File "/home/u/model.py", line 3, in forward
    return hvd.allreduce(x)
  File "{SITE}/spark_hvd/torch/reduce.py", line 40, in allreduce
    return handle.wait()
spark_hvd.MismatchError: allreduce 'x': no

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/u/model.py", line 9, in f
    raise ValueError("two\\nlines")
ValueError: two
    lines"""
    assert trim_traceback(text).splitlines() == [
        "Traceback (most recent call last):",
        "  [2 frames of spark_hvd]",
        "  [1 frame of torch]",
        '  File "/home/u/model.py", line 3, in forward',
        "    return hvd.allreduce(x)",
        "  [1 frame of spark_hvd]",
        "spark_hvd.MismatchError: allreduce 'x': no",
        *text.splitlines()[12:],
    ]


def test_a_cause_without_frames_that_says_the_same_is_left_out() -> None:
    chain = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    last = 'Traceback (most recent call last):\n  File "/home/u/t.py", line 3, in f\n    g()\nLost: gone'
    assert trim_traceback(f"Lost: gone{chain}{last}") == last
    assert trim_traceback(f"Other: gone{chain}{last}") == f"Other: gone{chain}{last}"
    where = f"{SITE}/spark_hvd/transport/host/pipes.py"
    ours = f'Traceback (most recent call last):\n  File "{where}", line 3, in f\n    g()\n'
    assert trim_traceback(f"{ours}OSError: gone{chain}{last}") == last
    assert trim_traceback(f"{ours}OSError: why{chain}{last}").endswith(f"OSError: why{chain}{last}")
    users = last.replace("Lost", "OSError")
    assert trim_traceback(f"{users}{chain}{last}") == f"{users}{chain}{last}"


def test_a_traceback_of_ours_alone_stays_whole() -> None:
    try:
        Vitals.from_message({"pending": 5})
    except TypeError:
        frames = traceback.format_exc().splitlines()
    ours = [frames[0], *frames[3:]]
    assert trim_traceback("\n".join(ours)) == "\n".join(ours)


def test_lines_of_a_cell_are_those_that_this_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "/tmp/ipykernel_77/123.py"
    monkeypatch.setitem(linecache.cache, cell, (20, None, ["def fragile():\n", "    return 1 / 0\n"], cell))
    text = "Traceback (most recent call last):\n{}ZeroDivisionError: division by zero"
    frame = f'  File "{cell}", line 2, in fragile\n'
    assert trim_traceback(text.format(frame)) == text.format(f"{frame}    return 1 / 0\n")
    assert trim_traceback(text.format(f"{frame}    its own\n")) == text.format(f"{frame}    its own\n")
