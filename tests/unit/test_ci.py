"""CI fails if a part of it does, and runs all the others."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / ".ci" / "run"
MAKE = """#!/bin/sh
echo "$@" >>asked
case "$*" in
*"$(cat failing)"*)
    echo "E   AssertionError: 3 ranks"
    exit 2
    ;;
esac
echo "24 passed in 216.68s"
"""


@pytest.mark.parametrize("failing", ["nothing", "slow-alone", "all-together", "lint", "--smoke"])
def test_what_fails(failing: str, tmp_path: Path) -> None:
    shutil.copytree(RUN.parent, tmp_path / ".ci")
    (tmp_path / "failing").write_text(failing)
    (tmp_path / "make").write_text(MAKE)
    (tmp_path / "make").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (failing == "nothing"), done.stdout + done.stderr
    asked = (tmp_path / "asked").read_text()
    assert all(target in asked for target in ("slow-alone", "all-together", "ahead lint", "--smoke")), asked
    last = done.stdout.splitlines()[-1]
    if failing in ("slow-alone", "all-together", "lint"):  # which have logs
        assert last == "E   AssertionError: 3 ranks"
    if failing == "nothing":
        assert done.stdout.endswith("24 passed in 216.68s\n")
