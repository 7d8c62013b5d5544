"""The facts of this machine, and packages and stores that crash, hang or refuse, in processes of their own."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from spark_hvd.runner.diagnosis import probe as doctor_probe
from spark_hvd.runner.diagnosis.facts import (
    FirstOnHost,
    clean_store,
    disk,
    facts_from_json,
    host_key,
    look,
    packages,
    try_store,
)

PROBE = Path(doctor_probe.__file__).read_text()


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_this_machine() -> None:
    facts = look(PROBE, [])
    assert facts_from_json(asdict(facts)) == facts
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
    names = ("crashing", "leaving", "chatty", "broken", "not_there_at_all", "json")
    found = packages(PROBE, names, 30)
    assert found["crashing"].error == "importing it crashed (SIGSEGV)"
    assert found["leaving"].error == "importing it ended with code 3"
    assert found["chatty"].version == "1.2"
    assert not found["broken"].missing, "it is there, what it needs is not"
    assert found["not_there_at_all"].missing
    assert found["json"].version


def test_an_import_that_hangs_ends_at_its_time(modules: Path) -> None:
    (modules / "hanging.py").write_text("import subprocess; subprocess.run(['sleep', '60'])")
    start = time.monotonic()
    found = packages(PROBE, ("hanging", "json"), 1)
    assert time.monotonic() - start < 60, "before what hangs would have ended"
    assert "took more than 1 s" in str(found["hanging"].error)
    assert "not tried" in str(found["json"].error)


def arguments(url: Path, name: str, expect: str | None = None, *, leave: bool = False) -> dict[str, object]:
    return {"url": str(url), "options": {}, "folder": ".trial", "name": name, "expect": expect, "leave": leave}


def test_a_store_is_tried_shared_and_left_as_it_was(tmp_path: Path) -> None:
    url, other = tmp_path / "store", tmp_path / "other"
    driver = try_store(PROBE, arguments(url, "driver", leave=True), 30)
    assert (driver.failed_step, driver.existed) == (None, False)
    assert try_store(PROBE, arguments(url, "a", "driver"), 30).shared is True
    assert try_store(PROBE, arguments(other, "b", "driver"), 30).shared is False
    assert clean_store(PROBE, {"url": str(url), "options": {}, "folder": ".trial", "existed": False}, 30) is None
    assert not url.exists()


def test_a_store_that_refuses_says_at_which_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trial = try_store(PROBE, arguments(tmp_path / "file" / "below", "a"), 30)
    assert trial.failed_step == "create a directory"
    assert "NotADirectoryError" in str(trial.error)
    trial = try_store(PROBE, {**arguments(tmp_path, "a"), "url": "nowhere://x"}, 30)
    assert trial.failed_step == "open"


def test_one_process_of_a_host_looks() -> None:
    first, second = FirstOnHost("spark_hvd-test"), FirstOnHost("spark_hvd-test")
    assert (first.held, second.held) == (True, False)
    first.release()
    second.release()
    third = FirstOnHost("spark_hvd-test")
    assert third.held
    third.release()


def test_a_directory_that_is_not_there() -> None:
    assert "No such file" in str(disk("/nowhere/at/all").error)
