"""Measures the cost of tests: ``python -m tests.cost [--slow] [arguments of pytest]`` runs them and prints a table.

CPU time includes the process that runs a test and all processes below it, such as ranks, JVMs and executors, even if
their parent has ended. Their work after a test counts for the next test. A test with little CPU time waits for
deadlines or for a core.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections import Counter
from collections.abc import Generator
from typing import Any

import psutil
import pytest

LINES = 10
_PR_SET_CHILD_SUBREAPER = 36

_seconds: Counter[str] = Counter()
_cpu: Counter[str] = Counter()
_cpu_before = 0.0


def _cpu_now() -> float:
    used = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            used += sum(child.cpu_times()[:4])
    return used


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Report the cost of a test to the process that prints the table. This runs where the test runs."""
    global _cpu_before
    report = yield
    report.cpu = 0.0
    if call.when == "teardown":
        now = _cpu_now()
        report.cpu = max(0.0, now - _cpu_before)  # what a process that nobody waited for has used is lost
        _cpu_before = now
    return report


def pytest_collection_finish() -> None:
    """Discard the cost before the first test."""
    global _cpu_before
    # A JVM outlives the program that has started it: it becomes a child of this process, and can be asked at its end.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _cpu_before = _cpu_now()


def pytest_runtest_logreport(report: Any) -> None:
    """Add up the setup, call and teardown of a test."""
    _seconds[report.nodeid] += report.duration
    _cpu[report.nodeid] += report.cpu


def table(seconds: Counter[str], cpu: Counter[str], lines: int = LINES) -> list[str]:
    """Return the most expensive files, then the most expensive tests.

    Args:
        seconds: Name of a test -> wall time, including its setup and teardown.
        cpu: Name of a test -> CPU seconds, including the processes below.
        lines: Number of lines for each.
    """
    by_file: Counter[str] = Counter()
    cpu_by_file: Counter[str] = Counter()
    for test in seconds:
        file = test.partition("::")[0]
        by_file[file] += seconds[test]
        cpu_by_file[file] += cpu[test]
    head = f"{'CPU':>8} {'seconds':>8}"

    def rows(used: Counter[str], wall: Counter[str]) -> list[str]:
        return [f"{cpu:8.1f} {wall[name]:8.1f}  {name}" for name, cpu in used.most_common(lines)]

    total, used = sum(seconds.values()), sum(cpu.values())
    return [
        f"{head}  file",
        *rows(cpu_by_file, by_file),
        f"{head}  test",
        *rows(cpu, seconds),
        f"{used:8.1f} {total:8.1f}  all {len(seconds)} tests",
    ]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table."""
    lines = int(os.environ.get("COST_LINES", LINES))
    terminalreporter.section("cost")
    for line in table(_seconds, _cpu, lines):
        terminalreporter.write_line(line)


def main(arguments: list[str]) -> int:
    """Run pytest with this module as a plugin, on the default set or, with --slow first, on the slow set."""
    marks = "not slow and not gpu and not night"
    if arguments[:1] == ["--slow"]:
        marks, arguments = "slow and not gpu and not night", arguments[1:]
    return int(pytest.main(["-p", "tests.cost", "-m", marks, *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
