"""Temporary folders that do not outlive a killed owner for long: others on the host find them by their locks.

The owner holds a lock on the folder, which the kernel takes away with the process, however that ends. A folder without
one is nobody's; no process id has to be right, also not in another container that shares the folder above.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping

PREFIX = "spark_hvd-scratch-"
_swept: set[str] = set()
_locks: set[int] = set()


class Scratch:
    """A new folder; the first one that a process makes in a place removes what others left there.

    Args:
        purpose: A word for its name.
        parent: The folder to make it in; None for this process' temporary directory.

    Attributes:
        path: Of the folder. It goes with :meth:`close`, with this object, and with the process.

    Raises:
        OSError: There is no room for it.
    """

    def __init__(self, purpose: str, parent: str | None = None) -> None:
        parent = parent or tempfile.gettempdir()
        if parent not in _swept:
            _swept.add(parent)
            sweep(parent)
        self.path, lock = _make(parent, purpose)
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Delete the folder with all that is in it. Errors are ignored."""
        self._end()

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep(parent: str) -> None:
    """Delete the folders in ``parent`` whose owners have gone, so far as they are this user's."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            path = os.path.join(parent, name)
            if name.startswith(PREFIX) and (lock := _lock(path)) is not None:
                _remove(path, lock, os.getpid())


def temporary_directory(env: Mapping[str, str]) -> str:
    """Where a process with the environment ``env`` puts its temporary files, as :mod:`tempfile` chooses."""
    found = (env.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    return next((path for path in found if path and os.path.isdir(path)), tempfile.gettempdir())


def local_directory(env: Mapping[str, str]) -> str:
    """Where a Spark task with the environment ``env`` has room for data: Spark's own folder, which goes with it."""
    given = env.get("SPARK_LOCAL_DIRS", "").split(",")
    return next((path for path in given if path and os.path.isdir(path)), temporary_directory(env))


def _make(parent: str, purpose: str) -> tuple[str, int]:
    while True:
        path = tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=parent)
        if (lock := _lock(path)) is not None:  # else a sweep was quicker, and has it now
            _locks.add(lock)
            return path, lock


def _lock(path: str) -> int | None:
    """A lock on a folder that is there; None where another has it, or it is not ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        info = os.fstat(fd)
        if info.st_uid == os.geteuid() and os.path.samestat(info, os.lstat(path)):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _remove(path: str, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked process has the folder's object, but its end is not the folder's
        return
    shutil.rmtree(path, ignore_errors=True)
    _locks.discard(lock)
    os.close(lock)


def _forget() -> None:
    """Forget the folder in a forked process, which may live longer than the owner."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_forget)
