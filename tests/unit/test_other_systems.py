"""A driver on systems other than Linux: it works without what they lack; starting ranks there raises an error."""

from __future__ import annotations

import subprocess
import sys

ELSEWHERE = """
import os, platform, signal, socket
del signal.SIGPWR, os.sched_getaffinity, os.memfd_create, os.pipe2, socket.SO_PEERCRED
platform.system = lambda: "Darwin"
import spark_hvd
from spark_hvd.runner.diagnosis.probe import _cores
"""


def said(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", ELSEWHERE + program], capture_output=True, text=True, timeout=250)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def test_a_driver_elsewhere_has_all_launchers() -> None:
    assert said("print(spark_hvd.run, spark_hvd.run_elastic, spark_hvd.doctor, _cores() > 0)").endswith("True")


def test_ranks_elsewhere_are_refused_before_anything_is_started() -> None:
    for launcher in ("run_local", "run_elastic_local"):
        error = said(f"spark_hvd.{launcher}(print)")
        assert error.startswith(
            "spark_hvd.runner.supervise.processes.ForkServerError: ranks need Linux, this is Darwin"
        ), error


def test_windows_is_named() -> None:
    error = said("os.name = 'nt'; spark_hvd.run_elastic")
    assert error.startswith("ImportError: spark_hvd.run_elastic needs Linux, or macOS for the driver"), error
