"""Ctrl-C on the driver stops every rank, those that Spark has not started yet included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_hvd.runner import run
from spark_hvd.runner.launch import attempt as attempt_module
from spark_hvd.runner.launch.attend import Grace
from spark_hvd.runner.spark import job
from spark_hvd.runner.stopping import stopped_by
from tests.conftest import have_ended, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_leaks")
ROOT = Path(__file__).parents[2]


# A program that ends by Ctrl-C is by day in test_command_line.py.
@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.night)])
@pytest.mark.slow
def test_ctrl_c_stops_every_rank_and_so_does_the_end_of_the_program(end: signal.Signals, tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import os, sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from tests.conftest import LOCAL, ranks_alive, start_session
        import spark_hvd
        import spark_hvd.torch as hvd

        def fn(seconds):
            print("started", os.getpid(), flush=True)
            time.sleep(seconds)
            return hvd.rank()

        spark = start_session(LOCAL)
        try:
            spark_hvd.run(fn, (600,), num_proc=2)
        except KeyboardInterrupt:
            print("interrupted, ranks alive:", len(ranks_alive()), flush=True)
        print("then", spark_hvd.run(fn, (0,), num_proc=2), flush=True)
        spark_hvd.run(fn, (600,), num_proc=2)
    """)
    path = tmp_path / "script.py"
    path.write_text(script)
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT
        )
    assert process.stdout is not None
    lines: list[str] = []
    pids: list[int] = []
    for ranks, number in ((2, signal.SIGINT), (6, end)):  # in the first run, and in the third
        for line in process.stdout:
            lines.append(line.strip())
            if "] started " in line:
                pids.append(int(line.split()[-1]))
            if len(pids) == ranks:
                break
        # While ranks start, the driver asks Spark about them, and Python loses an exception that a signal handler
        # raises in a finalizer, such as that of what Py4J returned.
        time.sleep(1)
        os.kill(process.pid, number)
    assert process.wait(30) == -end, errors.read_text()
    assert "interrupted, ranks alive: 0" in lines
    assert "then [0, 1]" in lines
    wait_until(lambda: have_ended(pids))


def test_no_rank_starts_after_an_interrupt(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Spark plans a query, which it does here until the run is over, there is no job to cancel."""
    planning, planned, ended = threading.Event(), threading.Event(), threading.Event()
    collect = job.TaskJob._collect

    def collect_later(self: job.TaskJob) -> None:
        planning.set()
        planned.wait()
        try:
            collect(self)
        finally:
            ended.set()

    monkeypatch.setattr(job.TaskJob, "_collect", collect_later)
    monkeypatch.setattr(attempt_module, "_STOP_GRACE", Grace(0.1, 0.1, 0.1))
    with stopped_by(planning), pytest.raises(KeyboardInterrupt):
        run((tmp_path / "rank").touch, num_proc=2, spark=spark)
    planned.set()
    assert ended.wait(60)
    assert not (tmp_path / "rank").exists()
