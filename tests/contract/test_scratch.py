"""Temporary folders of killed processes are removed, and those of living ones stay."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import spark_hvd.torch as hvd
from spark_hvd import run_local, scratch
from spark_hvd.estimators.lightning.loop import RunFiles
from spark_hvd.estimators.training.checkpoint import Checkpoints
from spark_hvd.runner.outcome.errors import RankFailedError
from spark_hvd.scratch import Scratch, sweep
from spark_hvd.store import Store
from tests.conftest import wait_until


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory, empty, of this process and those that it starts. No test leaves a file in it open."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    monkeypatch.undo()
    open_files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert [path for path in open_files if path.startswith(str(folder))] == []


OWNER = """
import os, sys
from spark_hvd.scratch import Scratch
from spark_hvd.store import Store
scratch = Scratch("test")
open(os.path.join(scratch.path, "file"), "w").close()
with Store.create("memory://x").writing("memory://x/y") as file:  # staged, as for every store that is remote
    if os.fork() == 0:  # a daemon, which lives longer
        os.setsid()
        print(os.getpid(), flush=True)
        sys.stdin.read()
        os._exit(0)
    os.wait()
"""


@pytest.fixture
def owner(temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with two folders, and a child that it forked."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as it:
        assert it.stdout is not None
        child = int(it.stdout.readline())
        yield it
        os.kill(child, signal.SIGKILL)
        it.kill()


def test_the_next_start_removes_what_a_killed_process_left(temporary: Path, owner: subprocess.Popen[str]) -> None:
    left = set(temporary.iterdir())
    assert len(left) == 2
    (temporary / "spark_hvd-of somebody else").mkdir()
    (temporary / f"{scratch.PREFIX}link").symlink_to(temporary / "spark_hvd-of somebody else")
    others = set(temporary.iterdir()) - left
    with Scratch("mine") as path:
        assert set(temporary.iterdir()) == left | others | {Path(path)}
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    scratch._swept.clear()  # as in a new process
    with Scratch("mine") as path:
        assert set(temporary.iterdir()) == others | {Path(path)}
        Scratch("more").close()
    assert set(temporary.iterdir()) == others


def test_new_folders_are_safe_from_those_who_sweep(temporary: Path) -> None:
    ended = threading.Event()

    def go_on() -> None:
        while not ended.is_set():
            sweep(str(temporary))

    threads = [threading.Thread(target=go_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            with Scratch("a") as path:
                Path(path, "file").write_text("x")
                assert Path(path, "file").read_text() == "x"
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert list(temporary.iterdir()) == []


def test_a_forked_process_that_ends_takes_no_folder_along(temporary: Path) -> None:
    folder = Scratch("a")
    if (child := os.fork()) == 0:
        folder.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.path.isdir(folder.path)
    folder.close()
    assert not os.path.exists(folder.path)


def die(store: Store, path: str) -> None:
    hvd.init()
    files = RunFiles(Checkpoints(store, "r"), resumed=False)
    Path(files.root, "model.ckpt").write_text("x")
    if hvd.rank() == 0:
        Path(path).write_text(files.root)
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()


def test_the_folder_of_a_killed_rank_goes_at_once(temporary: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="SIGKILL"):
        run_local(die, (Store.create(tmp_path / "store"), str(tmp_path / "path")), num_proc=2)
    folder = Path((tmp_path / "path").read_text())
    assert folder.parent == temporary
    wait_until(lambda: not folder.exists())


def test_ranks_use_the_temporary_directory_of_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":  # both come from one fork server
        (tmp_path / name).mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        assert run_local(tempfile.gettempdir, num_proc=1) == [str(tmp_path / name)]
    monkeypatch.delenv("TMPDIR")
    run_local(os.getpid, num_proc=1)  # at its end the server looks for the rank's leftovers
    monkeypatch.setenv("TMPDIR", str(tmp_path / "a"))
    assert run_local(tempfile.gettempdir, num_proc=1) == [str(tmp_path / "a")]


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM])
def test_a_folder_without_a_lock_where_locks_are_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refused(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refused)
    with Scratch("test", str(temporary)) as folder:
        sweep(str(temporary))  # it has no lock either, so it cannot know
        assert [folder] == [str(path) for path in temporary.iterdir()]
    assert not [*temporary.iterdir()]


def test_a_folder_that_is_somebody_elses(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # as if a file server decided who owns files
    with Scratch("test", str(temporary)) as folder:
        assert [folder] == [str(path) for path in temporary.iterdir()]
    assert not [*temporary.iterdir()]


def test_folders_that_are_always_swept_at_once(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> None:
        raise BlockingIOError(errno.EWOULDBLOCK, "somebody has it")

    monkeypatch.setattr(fcntl, "flock", busy)
    with pytest.raises(OSError, match=r"100 new folders, spark_hvd-scratch-test-\*, were removed .* set TMPDIR"):
        Scratch("test", str(temporary))


def test_a_folder_that_cannot_be_opened(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: str, *_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(PermissionError, match="spark_hvd-scratch-test-"):
        Scratch("test", str(temporary))
    monkeypatch.undo()
    assert not [*temporary.iterdir()]
