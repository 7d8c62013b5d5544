"""Which executor a task belongs to, even if the daemon between them was killed."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from spark_hvd.runner.elastic.task import executor_of
from spark_hvd.runner.supervise.task import executor_pid

ARGUMENTS = ["java", "Executor", "--executor-id", "3", "--hostname", "127.0.0.1:7337"]


def java(pid: int, cwd: str, uid: int, arguments: list[str]) -> Any:
    told = {"pid": pid, "name": "java", "uids": SimpleNamespace(effective=uid), "cwd": cwd, "cmdline": arguments}
    return SimpleNamespace(info=told)


def test_an_orphaned_worker_finds_its_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    me, here = os.geteuid(), os.getcwd()
    monkeypatch.setattr(psutil.Process, "parents", lambda self: [])
    there = [
        java(1, "/elsewhere", me, ARGUMENTS),
        java(2, here, me + 1, ARGUMENTS),
        java(3, here, me, ["java", "Driver"]),
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda _: there)
    assert executor_pid() == os.getpid()
    there.append(java(77, here, me, ARGUMENTS))
    assert executor_pid() == 77
    there.append(java(78, here, me, ARGUMENTS))  # it may belong to either of two
    assert executor_pid() == os.getpid()


def test_the_name_is_spark_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: ARGUMENTS)
    assert executor_of(os.getpid()) == ("3", "127.0.0.1")
