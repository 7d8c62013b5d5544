"""CI fails if a failed test also fails when it is run again, alone, or if a test may not have run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / ".ci" / "run"
MAKE = """#!/bin/sh
for target; do
    if [ -e "$target.printed" ]; then
        cp failed .pytest_cache/v/cache/lastfailed
        cat "$target.printed"
        exit 2
    fi
done
"""
PYTHON = f"""#!/bin/sh
[ "$1" = - ] && exec {sys.executable} -
echo "once more"
exit "$(cat status)"
"""
CLOSING = "=== 1 failed, 24 passed in 216.68s (0:03:36) ==="
HOSTS, OTHERS = "tests/multihost/test_faults.py::test_a", "tests/unit/test_ci.py::test_b"


def ended(target: str, closing: str = CLOSING, status: int = 1) -> dict[str, str]:
    """Return make's output if pytest ends this way."""
    return {target: f"{closing}\nmake: *** [Makefile:61: {target}] Error {status}\n"}


@pytest.mark.parametrize(
    ("printed", "failed", "status", "expected"),
    [
        ({}, [], 0, (0, False)),
        (ended("slow-alone"), [HOSTS], 0, (0, True)),
        (ended("slow-alone"), [HOSTS], 1, (1, True)),
        (ended("slow-alone") | ended("all-together", "4 passed, 1 error in 9.1s"), [HOSTS, OTHERS], 0, (0, True)),
        (ended("all-together"), [OTHERS, HOSTS, "c"], 0, (0, True)),
        (ended("all-together"), [OTHERS, HOSTS, "c", "d"], 0, (1, False)),
        (ended("all-together"), [], 0, (1, False)),
        # Some tests may not have run, whatever the cache says about the others.
        (ended("slow-alone", status=2) | ended("all-together"), [OTHERS], 0, (1, False)),
        (ended("slow-alone", "bringing up nodes...", 1) | ended("all-together"), [OTHERS], 0, (1, False)),
        # A closing line of pytest within a test's output is not that of this run.
        (ended("all-together", f"{CLOSING}\n\n\nKilled", 1), [OTHERS], 0, (1, False)),
        (ended("slow-alone", "Killed", 137) | ended("all-together"), [OTHERS], 0, (1, False)),
        ({"slow-alone": "make: *** [Makefile:116: build/spark.jsa] Error 1\n"}, [OTHERS], 0, (1, False)),
        (ended("ahead", "WARNING -  Doc file contains a link", 2), [], 0, (1, False)),
        (ended("lint", "E501 Line too long"), [], 0, (1, False)),
    ],
)
def test_what_fails(
    printed: dict[str, str], failed: list[str], status: int, expected: tuple[int, bool], tmp_path: Path
) -> None:
    """Check the status of CI, and whether it has run the failed tests again."""
    files = {
        "make": MAKE,
        ".venv/bin/python": PYTHON,
        "status": str(status),
        "failed": json.dumps(dict.fromkeys(failed, True)),
        ".pytest_cache/v/cache/lastfailed": json.dumps({"of an earlier run": True}),
        **{f"{target}.printed": text for target, text in printed.items()},
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    shutil.copytree(RUN.parent, tmp_path / ".ci")
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "once more\n" in done.stdout) == expected, done.stdout + done.stderr
