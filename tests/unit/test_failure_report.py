"""What a user reads about a failed run, in a terminal and in a notebook."""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from spark_hvd.runner.outcome.collect import results
from spark_hvd.runner.outcome.endings import GROUPS, is_echo
from spark_hvd.runner.outcome.errors import RankFailedError, RunTimeoutError, StartTimeoutError
from spark_hvd.runner.outcome.next_step import next_step
from spark_hvd.runner.outcome.report import WIDTH, Where, failure_report, timeout_report
from spark_hvd.runner.outcome.rows import Failed, FailureKind, PickledOutcome
from spark_hvd.runner.watch.hang.verdict import HangVerdict, Kind
from spark_hvd.world.errors import CollectiveError, StalledError

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/u/train.py", line 31, in train
    x = batch["distance"]
        ~~~~~^^^^^^^^^^^^
  File "/opt/venv/lib/python3.11/site-packages/spark_hvd/torch/reduce.py", line 4, in allreduce
    raise KeyError
KeyError: 'distance'"""
STACK = 'Thread 0x1 (most recent call first):\n  File "/home/u/train.py", line {line} in train\n'
HANG = HangVerdict(
    Kind.HANG,
    "no progress for 62 s: ...",
    (1,),
    62.0,
    "no progress for 62 s: rank 0 waits\n  rank 0: in 'x'\n  stack of rank 1, outermost call first:\n    File",
)


def failed(rank: int, error: str = "KeyError: 'distance'", **fields: Any) -> Failed:
    return Failed(**{"rank": rank, "host": f"10.0.0.{rank}", "kind": FailureKind.EXCEPTION, "error": error, **fields})


def stopped(rank: int) -> Failed:
    return failed(rank, "stopped because rank 1 failed", kind=FailureKind.STOPPED)


@pytest.fixture
def _utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    monkeypatch.setattr("locale.getpreferredencoding", lambda do_setlocale: "utf-8")


@pytest.mark.usefixtures("_utf8")
def test_the_report_as_it_is() -> None:
    cause = failed(1, traceback=TRACEBACK, log_tail="epoch 0\nepoch 1", executor="3", gpus="0")
    echoes = [failed(rank, f"RuntimeError: Connection closed by peer [::1]:{rank}", echo=True) for rank in (3, 4)]
    text = failure_report(
        [cause, *echoes, stopped(0), stopped(2)], 5, where=Where({}, "http://driver:4040/stages/stage/?id=3&attempt=0")
    )
    rule = "─" * WIDTH
    assert text.splitlines() == [
        "rank 1 of 5 failed on host 10.0.0.1: KeyError: 'distance'",
        "── Traceback of rank 1 (host 10.0.0.1, executor 3, GPU 0) ".ljust(WIDTH, "─"),
        *TRACEBACK.splitlines()[:4],
        "  [1 frame of spark_hvd]",
        "KeyError: 'distance'",
        "── Last output of rank 1 ".ljust(WIDTH, "─"),
        "epoch 0",
        "epoch 1",
        "── The other ranks ".ljust(WIDTH, "─"),
        "ranks 0, 2: stopped because rank 1 failed",
        "ranks 3, 4: RuntimeError: Connection closed by peer [::1]:3 (because of the above)",
        "── More ".ljust(WIDTH, "─"),
        "Spark UI: http://driver:4040/stages/stage/?id=3&attempt=0",
        rule,
    ]


@pytest.mark.usefixtures("_utf8")
@pytest.mark.parametrize("where", ["stdout", "stderr", "locale"])
def test_rules_are_plain_where_this_program_cannot_write_others(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "─" in failure_report([failed(0)], 1)
    if where == "locale":
        monkeypatch.setattr("locale.getpreferredencoding", lambda do_setlocale: "latin-1")
    else:
        monkeypatch.setattr(sys, where, io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert failure_report([failed(0, traceback=TRACEBACK)], 1).isascii()


def test_lines_of_the_user_s_are_never_cut_and_ours_are_never_long() -> None:
    long = "x" * 300
    cause = failed(1, f"ValueError: {long}", traceback=f"Traceback\nValueError: {long}", log_tail=long)
    others = [failed(rank, f"ValueError: {long} {rank}") for rank in range(2, 9)]
    lines = failure_report([cause, *others], 9, where=Where({}, "")).splitlines()
    assert [line for line in lines if long in line] == [
        f"rank 1 of 9 failed on host 10.0.0.1: ValueError: {long}",
        f"ValueError: {long}",
        long,
    ]
    ours = lines[lines.index(long) + 1 :]
    assert max(map(len, ours)) <= WIDTH
    assert "x..." in "".join(ours)


def test_an_error_of_several_lines_has_its_first_in_the_first_line() -> None:
    cause = failed(1, "ValueError: one\ntwo", traceback="Traceback\nValueError: one\ntwo")
    assert failure_report([cause], 2).splitlines()[0].endswith("ValueError: one")
    assert "one\ntwo" in failure_report([failed(1, "ValueError: one\ntwo")], 2)


def test_report_says_when_other_ranks_had_returned_already() -> None:
    text = failure_report([failed(0, "CollectiveError: gone", echo=True)], size=2, finished=[1])
    assert "rank 1 had already returned from fn" in text


def test_a_rank_that_was_suspended_is_named() -> None:
    echo = failed(0, "CollectiveError: allreduce 'x' failed: rank 1 (on h) has ended without notice, or ...", echo=True)
    assert "failed on host 10.0.0.0: the process of rank 1 was there and did not answer: Coll" in failure_report(
        [echo, stopped(1)], 2
    )
    crashed = failed(1, "killed by SIGSEGV", kind=FailureKind.SIGNAL)
    assert "did not answer" not in failure_report([echo, crashed], 2)


def test_what_hung_is_in_the_report_and_in_the_error() -> None:
    with pytest.raises(RankFailedError) as caught:
        results(
            [PickledOutcome.failed(failed(0)), PickledOutcome.failed(stopped(1))],
            2,
            [0],
            None,
            HANG,
            lambda: Where({0: "7"}, ""),
        )
    assert "What the ranks did before" in str(caught.value)
    assert "stack of rank 1" in str(caught.value)
    assert "executor 7" in str(caught.value)
    assert caught.value.hang == HANG
    assert caught.value.first.executor == "7"


def test_a_timeout_shows_what_ranks_did_and_each_stack_once() -> None:
    running = [
        failed(
            rank,
            "still running",
            kind=FailureKind.TIMEOUT,
            traceback=STACK.format(line=9 if rank == 1 else 5),
            log_tail="epoch 1" if rank == 1 else "",
        )
        for rank in range(4)
    ]
    text = timeout_report(running, 5, 60.0, HANG)
    assert text.startswith("ranks 0-3 of 5 still running after timeout=60 s; all were stopped")
    assert "no progress for 62 s: rank 0 waits" in text
    assert "stack of rank 1" not in text, "the later ones are there"
    assert text.count('File "/home/u/train.py", line 5, in train') == 1
    assert "Stacks of ranks 0, 2, 3 on 10.0.0.0, 10.0.0.2, 10.0.0.3" in text
    assert text.index("line 9, in train") < text.index("Last output of rank 1")


@pytest.mark.parametrize(
    ("failure", "on_spark", "word"),
    [
        (failed(0, "the process was killed by SIGKILL", kind=FailureKind.SIGNAL), True, "memoryOverhead"),
        (failed(0, "the process was killed by SIGKILL", kind=FailureKind.SIGNAL), False, "smaller batch"),
        (failed(0, "the process was killed by SIGSEGV", kind=FailureKind.SIGNAL), True, "versions"),
        (failed(0, "the process was killed by SIGBUS", kind=FailureKind.SIGNAL), True, "/dev/shm"),
        (failed(0, "the process was killed by SIGTERM", kind=FailureKind.SIGNAL), True, ""),
        (failed(0, "the process exited with code 7", kind=FailureKind.EXIT, exitcode=7), True, "os._exit"),
        (failed(0, "ModuleNotFoundError: No module named 'mine'"), True, "--py-files"),
        (failed(0, "ModuleNotFoundError: No module named 'mine'"), False, "PYTHONPATH"),
        (failed(0, "FileNotFoundError: 'data.csv'"), True, "all hosts"),
        (failed(0, "FileNotFoundError: 'data.csv'", executor="driver"), True, ""),
        (failed(0, "torch.OutOfMemoryError: CUDA out of memory. Tried to"), True, "smaller batch"),
        (failed(0, "RuntimeError: CUDA error: device-side assert triggered"), True, "CUDA_LAUNCH_BLOCKING"),
        (failed(0, "AcceleratorError: CUDA error: invalid device ordinal"), True, "set_device"),
        (failed(0, "AssertionError: Invalid device id"), False, "set_device"),
        (failed(0, "RuntimeError: No CUDA GPUs are available"), True, "gpus_per_proc=1"),
        (failed(0, "OSError: [Errno 24] Too many open files"), True, "ulimit"),
        (
            failed(0, "ValueError: You set `devices=1` and `num_nodes=1` in Lightning, but"),
            True,
            "devices=hvd.local_size",
        ),
        (failed(0, "MisconfigurationException: You requested gpu: [0, 1]\n But"), True, "LOCAL_RANK"),
        (failed(0, "RuntimeError: Connection closed by peer", echo=True), True, "network"),
        (failed(0, "CollectiveError: ... Duplicate GPU detected : rank 0 and", echo=True), False, "current device"),
        (failed(0), True, ""),
        (failed(0, "still running", kind=FailureKind.TIMEOUT), True, ""),
    ],
)
def test_a_next_step_is_named_where_there_is_one(failure: Failed, on_spark: bool, word: str) -> None:
    text = next_step(failure, on_spark=on_spark)
    assert word in text
    assert bool(text) == bool(word)
    assert ("Next step" in failure_report([failure], 1, where=Where() if on_spark else None)) == bool(word)


ERRORS: list[Callable[[], Exception]] = [
    lambda: RankFailedError(failure_report([failed(1, traceback=TRACEBACK)], 2), (failed(1),)),
    lambda: RunTimeoutError("still running", ()),
    lambda: StartTimeoutError("not up"),
]


@pytest.mark.parametrize("make", ERRORS)
def test_a_notebook_shows_the_message_and_the_user_s_line_alone(
    make: Callable[[], Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    shell = InteractiveShell.instance()
    try:
        shell.push({"boom": make(), "results": results, "pickle": pickle})
        shell.run_cell("def work():\n    raise boom from KeyError('x')\n\nwork()")
        shown = capsys.readouterr().out
    finally:
        InteractiveShell.clear_instance()
    error = make()
    assert f"{type(error).__name__}: {str(error).splitlines()[0]}" in shown
    assert "Cell, line 4, in <module>" in shown
    assert "    work()" in shown
    assert "site-packages/IPython" not in shown
    assert len(shown.splitlines()) <= len(str(error).splitlines()) + 6


def test_our_frames_are_not_shown_in_a_notebook() -> None:
    with pytest.raises(RankFailedError) as caught:
        results([PickledOutcome.failed(failed(0))], 1, [0], None)
    shown = caught.value._render_traceback_()
    assert "results([PickledOutcome.failed(failed(0))], 1, [0], None)" in "\n".join(shown)
    assert "raise error from" not in "\n".join(shown)
    assert "raise error from" in "".join(traceback.format_exception(caught.value)), "Python's own stays whole"


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_what_only_reports_the_loss_of_a_peer() -> None:
    lost, own = CollectiveError("allreduce 'x' failed"), ValueError("no such column")
    closed = "[gloo] Connection closed by peer [127.0.0.1]:1"
    for error in (lost, StalledError("late"), RuntimeError(closed), ValueError(f"Gloo: {closed}"), caused(own, lost)):
        assert is_echo(error), error
    alone = ValueError("no such column")
    for error in (alone, ValueError("connection closed by peer"), RuntimeError("out of memory"), caused(alone, alone)):
        assert not is_echo(error), error
    if GROUPS:
        assert is_echo(GROUPS("both", [lost, RuntimeError(closed)]))
        assert not is_echo(GROUPS("one", [lost, alone]))
