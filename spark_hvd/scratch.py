"""Temporary folders that do not outlive a killed owner for long: others on the host find them by their locks.

The owner holds a lock on the folder, which the kernel takes away with the process, however that ends. A folder without
one is nobody's; no process id has to be right, also not in another container that shares the folder above. Where locks
are refused, to whoever sweeps as well, a folder goes with its owner only if that ends in order.
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
_MOST_SWEEPS = 100
"""Maximum number of folders to create until no other process sweeps one at once; two in a row are rare."""
_swept: set[str] = set()
_locks: set[int] = set()


class Scratch:
    """A new folder; the first one that a process makes in a place removes what others left there.

    ``purpose`` is a word for its name. ``parent`` is the folder to make it in; None: this process' temporary directory.

    Attributes:
        path: The folder. It is deleted by :meth:`close`, with this object, and with the process.

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
    """Return the folder for temporary files that :mod:`tempfile` chooses, given the environment ``env``."""
    found = (env.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    return next((path for path in found if path and os.path.isdir(path)), tempfile.gettempdir())


def local_directory(env: Mapping[str, str]) -> str:
    """Return a Spark task's folder for data, given its environment ``env``: Spark's own, which Spark deletes."""
    given = env.get("SPARK_LOCAL_DIRS", "").split(",")
    return next((path for path in given if path and os.path.isdir(path)), temporary_directory(env))


def _make(parent: str, purpose: str) -> tuple[str, int | None]:
    """Return a new folder and its lock; None if a file system or a sandbox has no locks, so that nobody sweeps."""
    for _ in range(_MOST_SWEEPS):
        path = tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=parent)
        try:
            lock = _opened(path)
        except FileNotFoundError:  # a sweep was quicker
            continue
        except OSError:  # it cannot be used, for example because a file server changed its owner
            with contextlib.suppress(OSError):
                os.rmdir(path)
            raise
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a sweep has it
            os.close(lock)
            continue
        except OSError:
            os.close(lock)
            return path, None
        if _is_at(lock, path):
            _locks.add(lock)
            return path, lock
        os.close(lock)
    raise OSError(
        f"{parent}: {_MOST_SWEEPS} new folders, {PREFIX}{purpose}-*, were removed as soon as they were made. Expected "
        "that they stay. Next: see which program removes them, or set TMPDIR to another folder"
    )


def _lock(path: str) -> int | None:
    """Return a lock on an existing folder; None if another process has it, it is not ours, or there are no locks."""
    try:
        fd = _opened(path)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_uid == os.geteuid() and _is_at(fd, path):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _opened(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _is_at(fd: int, path: str) -> bool:
    """Return whether the open folder still has this path."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove(path: str, lock: int | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked process has the folder's object, but its end is not the folder's
        return
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        _locks.discard(lock)
        os.close(lock)


def _forget() -> None:
    """Forget the folder in a forked process, which may live longer than the owner."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_forget)
