"""Turns errors of file systems into a StoreError, which names the operation, the path, the reason and the next step."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from spark_hvd.store.needs import expected, to_install


class StoreError(RuntimeError):
    """A store cannot be reached, read or written, or holds something unexpected."""

    __module__ = "spark_hvd.store"


class CheckpointError(StoreError):
    """A checkpoint or saved model is damaged, belongs to another model, or was written by a newer spark_hvd."""

    __module__ = "spark_hvd.store"


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_LENGTH = 500
_UNREACHABLE = ("connect", "timeout", "timed out", "resolve", "unreachable")


@contextmanager
def explaining(verb: str, path: str) -> Iterator[None]:
    """Turn any error of a file system in the block into a StoreError. ``verb`` is the operation, such as "write"."""
    try:
        yield
    except StoreError:
        raise
    # The clients of object stores have their own exceptions (no credentials, no connection), besides OSError.
    except Exception as error:
        raise store_error(verb, path, error) from error


@contextmanager
def staged(temporary: str, path: str, commit: Callable[[], None]) -> Iterator[BinaryIO]:
    """Open a new local file ``temporary``. At the end of the block, close it, and let ``commit`` move it to its place.

    Afterwards, the file is always deleted. It only remains if this process is killed, and then it is not locked. Errors
    name ``path``. An error of the disk is raised as StoreError even if the block turned it into another exception, as
    torch.save does.
    """
    with explaining("write", path):
        raw = _CheckedFile(temporary, path)
    held = None
    try:
        with contextlib.suppress(OSError):  # no free descriptor, or no locks: then sweep() cannot lock it either
            held = os.dup(raw.fileno())  # keeps the lock between closing the file and renaming it
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            with io.BufferedWriter(raw) as file:
                yield file
        except Exception as error:
            if raw.failure is not None and error is not raw.failure:
                raise raw.failure from error
            raise
        commit()
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if held is not None:
            os.close(held)


class _CheckedFile(io.FileIO):
    """A new file that remembers why a write to it failed."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, "x")
        self.path = path
        self.failure: StoreError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = store_error("write", self.path, error)
            raise self.failure from error


def store_error(verb: str, path: str, cause: Exception) -> StoreError:
    """Return the StoreError for an operation that failed on ``path`` because of ``cause``. It names the next step."""
    text = " ".join(str(cause).split()) or "no details"
    if len(text) > _MAX_LENGTH:  # libhdfs lists every place where it looked for Java
        text = text[:_MAX_LENGTH] + " ..."
    return StoreError(f"cannot {verb} {path}: {type(cause).__name__}: {text}. {_next_step(path, cause)}")


def _next_step(path: str, cause: Exception) -> str:
    remote = "://" in path
    code = cause.errno if isinstance(cause, OSError) else None
    kind = type(cause).__name__
    if any(word in str(cause) for word in ("libjvm", "libhdfs")):
        needed = to_install(path) or to_install("hdfs://")  # viewfs:// and har:// also use libhdfs
        return f"Next: {needed}. Without that package, set JAVA_HOME, HADOOP_HOME and CLASSPATH there"
    if path.startswith("dbfs:") and kind == "TypeError":
        return (
            "There is no /dbfs here, the mount of Databricks' clusters. Expected a path of a volume there, "
            "/Volumes/<catalog>/<schema>/<volume>/...; from elsewhere, the URL of its bucket, or storage_options with "
            "instance and token"
        )
    if code in _FULL:
        return "Free space there, or choose another store"
    if code == errno.EROFS:
        return "The file system is mounted read-only: choose another store"
    if "Credential" in kind or "Auth" in kind:
        return _with_expected("Pass credentials in storage_options, or set them up on every host of the cluster", path)
    if isinstance(cause, PermissionError):
        if remote:
            return (
                "Check that the credentials in storage_options allow to list, read, write and delete there. Without "
                "s3:ListBucket, S3 reports a missing file as forbidden"
            )
        return "Check the owner and mode of the directory, for the user that runs Spark's processes"
    if isinstance(cause, FileNotFoundError):
        if remote:
            return "Check the name, and that the bucket, container or directory exists: it is not created automatically"
        return "Check the path, and that it is on a file system that all hosts share"
    if isinstance(cause, (NotADirectoryError, FileExistsError)):
        return "A part of the path is a file where a directory is expected: choose another path"
    if isinstance(cause, IsADirectoryError):
        return "It is a directory where a file is expected"
    if kind != "ValueError" and any(word in f"{kind} {cause}".lower() for word in _UNREACHABLE):
        return "Check the address (endpoint_url in storage_options) and the network of this host"
    return _with_expected("Check the path and storage_options", path)


def _with_expected(step: str, path: str) -> str:
    return ". ".join(filter(None, (step, expected(path))))
