"""The facts about this machine, and packages and stores that crash, hang or refuse, in separate processes."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from spark_hvd.runner.diagnosis.facts import PACKAGES, PROGRAM, HostFacts, Package, StoreTrial, packages_of
from spark_hvd.runner.diagnosis.probe import ask, disk, host_key


def imported(*names: str, seconds: float = 60.0) -> dict[str, Package]:
    return packages_of(ask(PROGRAM, {"packages": names}, seconds))


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_this_machine() -> None:
    facts = HostFacts.of(ask(PROGRAM, {"packages": PACKAGES, "dirs": []}, 100.0))
    assert facts.key == host_key()
    assert facts.executable == sys.executable
    assert facts.packages["torch"].version
    assert facts.packages["torch"].detail["gloo"]
    assert facts.cores >= 1
    assert 0 < facts.memory_free <= facts.memory


def test_imports_that_crash_hang_or_leave_do_not_take_the_others_along(modules: Path) -> None:
    (modules / "crashing.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    (modules / "leaving.py").write_text("import os; os._exit(3)")
    (modules / "chatty.py").write_text("print('{\"version\": 3}'); print('hello'); __version__ = '1.2'")
    (modules / "broken.py").write_text("import not_there_at_all")
    found = imported("crashing", "leaving", "chatty", "broken", "not_there_at_all", "json")
    assert found["crashing"].error == "importing it crashed (SIGSEGV)"
    assert found["leaving"].error == "importing it ended with code 3"
    assert found["chatty"].version == "1.2"
    assert not found["broken"].missing, "it is there, what it needs is not"
    assert found["not_there_at_all"].missing
    assert found["json"].version


def test_an_import_that_hangs_ends_at_its_time(modules: Path) -> None:
    (modules / "hanging.py").write_text("import subprocess; subprocess.run(['sleep', '60'])")
    start = time.monotonic()
    found = imported("hanging", "json", seconds=1)
    assert time.monotonic() - start < 60, "before what hangs would have ended"
    assert "took more than 1 s" in str(found["hanging"].error)
    assert "not tried" in str(found["json"].error)


def tried(url: Path | str, name: str, expect: str | None = None, *, leave: bool = False) -> StoreTrial:
    place: dict[str, Any] = {"url": str(url), "options": {}, "folder": ".trial"}
    answer = ask(PROGRAM, {"store": {**place, "name": name, "expect": expect, "leave": leave}}, 60)
    return StoreTrial(**answer["store"])


def test_a_store_is_tried_shared_and_left_as_it_was(tmp_path: Path) -> None:
    url, other = tmp_path / "store", tmp_path / "other"
    driver = tried(url, "driver", leave=True)
    assert (driver.failed_step, driver.existed) == (None, False)
    assert tried(url, "a", "driver").shared is True
    assert tried(other, "b", "driver").shared is False
    cleaning = {"url": str(url), "options": {}, "folder": ".trial", "remove_root": True}
    assert ask(PROGRAM, {"clean": cleaning}, 60) == {"clean": {"cleaned": True}}
    assert not url.exists()


def test_a_store_that_refuses_says_at_which_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trial = tried(tmp_path / "file" / "below", "a")
    assert trial.failed_step == "create a directory"
    assert "NotADirectoryError" in str(trial.error)
    assert tried("nowhere://x", "a").failed_step == "open"


def test_one_process_of_a_host_looks() -> None:
    asked = {"claim": "spark_hvd-test", "dirs": []}
    with socket.socket(socket.AF_UNIX) as first:
        first.bind("\0spark_hvd-test")
        assert ask(PROGRAM, asked, 60) == {}
    assert ask(PROGRAM, asked, 60)["key"] == host_key()


def test_a_program_that_breaks_is_an_error_and_not_an_exception() -> None:
    assert "ended with code 3" in ask("import sys; sys.exit(3)", {}, 60)["error"]


def test_a_directory_that_is_not_there() -> None:
    assert "No such file" in disk("/nowhere/at/all")["error"]
