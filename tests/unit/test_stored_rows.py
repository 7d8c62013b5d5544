"""Rows that were written for an elastic run are removed when it ends or, if it was killed, by the next run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from spark_hvd.runner.launch.data import run_data_of
from spark_hvd.runner.launch.stored import stored

PROGRAM = """
import os, signal, sys
import pyarrow as pa
from spark_hvd.runner.launch.data import run_data_of
from spark_hvd.runner.launch.stored import stored
with stored(run_data_of({"train": pa.table({"x": [1, 2]})}), sys.argv[1]):
    print("written", flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow  # by day: what a killed process left, in tests/contract/test_scratch.py
def test_rows_of_a_killed_program_go_with_the_next_run(tmp_path: Path) -> None:
    elsewhere = tmp_path / "run_data-elsewhere"
    elsewhere.mkdir()
    owner = {"where": ["another machine", "pid:[1]"], "pid": 1, "born": 0.0}
    (elsewhere / "owner.json").write_text(json.dumps(owner))
    sets = run_data_of({"train": pa.table({"x": [1, 2]})})
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with stored(sets, str(tmp_path)):  # the other run is alive
            assert len([*tmp_path.iterdir()]) == 3
        other.communicate()
    assert len([*tmp_path.iterdir()]) == 2
    with stored(sets, str(tmp_path)):
        assert len([*tmp_path.iterdir()]) == 2
    assert [*tmp_path.iterdir()] == [elsewhere]
