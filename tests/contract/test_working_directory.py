"""Processes that we start import nothing from the program's working directory, but all that the program can import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark_hvd.runner.diagnosis.facts import PROGRAM
from spark_hvd.runner.diagnosis.probe import ask

ROOT = Path(__file__).parents[2]
SCRIPT = """
import beside
from spark_hvd.runner import run_local

def names():
    import beside, on_path, os
    return beside.NAME, on_path.NAME, os.getcwd()

print(run_local(names, num_proc=1, verbose=0))
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory where other users have put modules under the names of common ones."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in ("pickle", "json", "psutil", "torch", "fsspec", "socket"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'a').write('{name} ')\n")
    return folder


@pytest.mark.slow
def test_ranks_find_the_programs_modules_and_the_fork_server_no_others(shared: Path, tmp_path: Path) -> None:
    for folder, name in (("program", "beside"), ("library", "on_path")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text(f"NAME = {name!r}\n")
    (tmp_path / "program" / "train.py").write_text(SCRIPT)
    path = os.pathsep.join(["../library", os.path.relpath(ROOT, shared)])
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "program" / "train.py")],
        env={**os.environ, "PYTHONPATH": path},
        cwd=shared,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.stdout == f"[('beside', 'on_path', '{shared}')]\n", ran.stderr
    assert not (tmp_path / "planted").exists()


def test_the_doctors_probe_imports_none_of_it(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shared)
    (tmp_path / "own.py").write_text("__version__ = '7'")
    monkeypatch.setattr(sys, "path", [*sys.path, ".."])
    assert ask(PROGRAM, {"packages": ["own"]}, 60.0)["packages"]["own"]["version"] == "7"
    assert not (tmp_path / "planted").exists()


def test_petastorms_processes_import_none_of_it(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dill")
    from spark_hvd.estimators.petastorm.overlays import launch

    monkeypatch.chdir(shared)
    assert launch(print, "there").wait(60) == 0
    assert not (tmp_path / "planted").exists()
