"""The class `Store`: paths, reading and writing, on any file system that fsspec supports."""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import os
import posixpath
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, BinaryIO, cast

import fsspec

from spark_hvd.scratch import Scratch
from spark_hvd.store.errors import StoreError, explaining, staged
from spark_hvd.store.paths import (
    OBJECT_STORES,
    check_protocol,
    complete,
    is_temporary,
    join,
    one_name,
    protocol_of,
    temporary_name,
)


@dataclass(frozen=True)
class Store:
    """The place for data, checkpoints and logs of a fit. Make one with :meth:`create`.

    Its pickle only has the URL and the options, so each process opens new connections. Methods take and return complete
    paths: "/data/x/y" or "s3://bucket/prefix/y".

    A file written by :meth:`writing` or :meth:`write_bytes` gets its name only when it is complete. Until then, and
    after a failure, the name has its old content or none. On HDFS, which cannot rename onto an existing file, the name
    briefly has no content while a file is replaced.

    Attributes:
        url: The complete root of the store, without a slash at the end; an absolute path on local file systems.
        storage_options: Options of the fsspec file system (``endpoint_url``, ``key``, ``secret``, ``anon`` ...).
            They may hold secrets, so the repr omits them.
        runs_path: Directory of the runs; None for ``<url>/runs``.
        train_path: Directory of the training data; None for one below ``<url>/intermediate_data``.
        val_path: Directory of the validation data; None for one below ``<url>/intermediate_data``.
    """

    __module__ = "spark_hvd.store"

    url: str
    storage_options: dict[str, Any] = field(default_factory=dict, repr=False, hash=False)
    runs_path: str | None = None
    train_path: str | None = None
    val_path: str | None = None

    @classmethod
    def create(
        cls,
        prefix_path: str | os.PathLike[str],
        *,
        runs_path: str | os.PathLike[str] | None = None,
        train_path: str | os.PathLike[str] | None = None,
        val_path: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Store:
        """Return a store at ``prefix_path``. Nothing is created or contacted; see :meth:`check_writable`.

        Args:
            prefix_path: A path, or a URL that fsspec knows: ``file://``, ``s3://`` (also as s3a, s3n), ``gs://``,
                ``abfs://``, ``hdfs://``, ``dbfs:/``, ``memory://``. Paths are made absolute and must be on a file
                system that all hosts share. ``dbfs:/x`` becomes ``/dbfs/x`` if Databricks mounts it.
            runs_path: Directory of the runs (checkpoints, logs) if not ``<prefix_path>/runs``.
            train_path: Directory of the training data if not one below ``<prefix_path>/intermediate_data``.
            val_path: Directory of the validation data, likewise.
            storage_options: Options of the fsspec file system.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: A path is empty, has no bucket, or is on another file system than ``prefix_path``.
            StoreError: The protocol is unknown, or its package is not installed.
        """
        if storage_options is not None and not isinstance(storage_options, Mapping):
            raise TypeError(f"storage_options={storage_options!r}: expected a mapping of option names to values")
        url = complete("prefix_path", prefix_path)
        paths = {"runs_path": runs_path, "train_path": train_path, "val_path": val_path}
        completed = {name: None if path is None else complete(name, path) for name, path in paths.items()}
        for name, path in completed.items():
            if path is not None and protocol_of(path) != protocol_of(url):
                raise ValueError(f"{name}={path!r} is on another file system than the store ({url}): expected the same")
        check_protocol(url)
        return cls(url, dict(storage_options or {}), **completed)

    # -- file systems

    @property
    def filesystem(self) -> Any:
        """The ``fsspec.AbstractFileSystem``. fsspec caches one per process and options, and drops it after a fork.

        Raises:
            StoreError: The file system cannot be made from ``storage_options``.
        """
        with explaining("open", self.url):
            # Cached listings would hide what other processes write.
            options = {"use_listings_cache": False} if protocol_of(self.url) in OBJECT_STORES else {}
            options |= self.storage_options
            if (kind := fsspec.get_filesystem_class(protocol_of(self.url))).__module__ == "hdfs_native.fsspec":
                from spark_hvd.store.hdfs import HdfsFiles

                return HdfsFiles(**{**kind._get_kwargs_from_urls(self.url), **options})
            return fsspec.core.url_to_fs(self.url, **options)[0]

    def inner_path(self, path: str) -> str:
        """Return ``path`` without the protocol, as fsspec's file systems take it."""
        return path if self.is_local else str(self.filesystem._strip_protocol(path))

    @property
    def is_shared(self) -> bool:
        """Whether other processes can see the files; False for ``memory://``."""
        return protocol_of(self.url) != "memory"

    @property
    def is_local(self) -> bool:
        """Whether the store is a folder of a file system that this host has mounted."""
        return protocol_of(self.url) == "file"

    @property
    def plain(self) -> Store:
        """The store that ranks get. A subclass with its own paths returns a plain Store."""
        return self

    @property
    def prepared(self) -> tuple[str | None, str | None]:
        """Paths of existing Parquet data for training and for validation; None if not set."""
        return self.train_path, self.val_path

    # -- layout

    def join(self, *parts: str) -> str:
        """Return the path of ``parts`` below :attr:`url`."""
        return join(self.url, *parts)

    def run_path(self, run_id: str) -> str:
        """Return the directory of a run."""
        return join(self.runs_path or self.join("runs"), one_name("run_id", run_id))

    def checkpoint_path(self, run_id: str, name: str = "last.ckpt") -> str:
        """Return the file of a run's checkpoint."""
        return join(self.run_path(run_id), one_name("name", name))

    def logs_path(self, run_id: str) -> str:
        """Return the directory of a run's logs."""
        return join(self.run_path(run_id), "logs")

    def data_path(self, key: str) -> str:
        """Return the directory of materialised data."""
        return self.join("intermediate_data", one_name("key", key))

    # -- reading

    def open(self, path: str, mode: str = "rb") -> IO[Any]:
        """Open a file as fsspec does. To write a file that others read, use :meth:`writing`.

        Raises:
            StoreError: The file cannot be opened. The open file raises the errors of its file system.
        """
        with explaining(f"open ({mode})", path):
            if self.is_local and "r" not in mode:
                os.makedirs(posixpath.dirname(path), exist_ok=True)
            return cast(IO[Any], self.filesystem.open(self.inner_path(path), mode))

    def read_bytes(self, path: str) -> bytes:
        """Return the whole content of a file.

        Raises:
            StoreError: The file does not exist or cannot be read.
        """
        with explaining("read", path):
            return bytes(self.filesystem.cat_file(self.inner_path(path)))

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists.

        Raises:
            StoreError: The store cannot be reached, or denies access.
        """
        return self._info(path) is not None

    def size(self, path: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            StoreError: The file does not exist or is a directory.
        """
        info = self._info(path)
        with explaining("get the size of", path):
            if info is None:
                raise FileNotFoundError("no such file")
            if info["type"] == "directory":
                raise IsADirectoryError("is a directory")
        return int(info["size"])

    def list(self, path: str, *, unfinished: bool = False) -> builtins.list[str]:
        """Return the sorted paths of the files and directories directly in a directory; [] if it does not exist.

        Args:
            path: The directory.
            unfinished: Also list files that are being written, and those whose writer was killed.

        Raises:
            StoreError: The directory cannot be listed.
        """
        inner = self.inner_path(path).rstrip("/")
        with explaining("list", path):
            try:
                entries = self.filesystem.ls(inner, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        inside = (entry.rstrip("/") for entry in entries)
        names = {posixpath.basename(entry) for entry in inside if posixpath.dirname(entry) == inner}
        # Object stores accept any text as a key. As file names, "." and ".." would lead elsewhere.
        return [join(path, name) for name in sorted(names - {".", ".."}) if unfinished or not is_temporary(name)]

    def version(self, path: str) -> str | None:
        """Return a text that changes whenever the file is written again; None if there is no file.

        Raises:
            StoreError: The store cannot be reached, or denies access.
        """
        if self._info(path) is None:
            return None
        with explaining("look at", path):
            return str(self.filesystem.ukey(self.inner_path(path)))

    def sweep(self, path: str) -> None:
        """Delete unfinished files directly in a local directory whose writers were killed, so that they are not locked.

        Errors are ignored. Remote stores are not swept, because they do not show whether a file is being written.
        """
        if not self.is_local:
            return
        with contextlib.suppress(OSError):
            for entry in os.scandir(path):
                if is_temporary(entry.name) and entry.is_file(follow_symlinks=False):
                    _remove_unless_locked(entry.path)

    def _info(self, path: str) -> dict[str, Any] | None:
        # fsspec's exists() would return False for any error.
        with explaining("look at", path):
            try:
                return dict(self.filesystem.info(self.inner_path(path)))
            except (FileNotFoundError, NotADirectoryError):
                return None

    # -- writing

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """Open a binary file on a local disk, which becomes ``path`` at the end of the block. Directories are created.

        If the block raises, ``path`` is unchanged and nothing is left behind. For remote stores, the file is written to
        this host's temporary directory, which needs enough space, and uploaded at the end.

        Raises:
            StoreError: The file cannot be written or uploaded. It replaces an exception that the block made of it.
        """
        if self.is_local:
            directory, name = posixpath.split(path)
            with explaining("write", path):
                os.makedirs(directory, exist_ok=True)
            temporary = posixpath.join(directory, temporary_name(name))
            with staged(temporary, path, lambda: _rename(temporary, path)) as file:
                yield file
        else:
            with explaining("write", path):
                scratch = Scratch("store")
            with scratch as directory:
                local = os.path.join(directory, "file")
                with staged(local, f"{path}, staged in {directory}", lambda: self._upload(local, path)) as file:
                    yield file

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file with this content, as :meth:`writing` does.

        Raises:
            StoreError: The file cannot be written.
        """
        with self.writing(path) as file:
            file.write(data)

    def delete(self, path: str) -> None:
        """Delete a file, or a directory with its contents, if it exists.

        Raises:
            ValueError: The path is not in this store.
            StoreError: The path cannot be deleted.
        """
        roots = [root for root in (self.url, self.runs_path, self.train_path, self.val_path) if root]
        if ".." in path.split("/") or not any(path == root or path.startswith(f"{root}/") for root in roots):
            raise ValueError(f"delete({path!r}): expected a path in the store, below {' or '.join(roots)}")
        with explaining("delete", path), contextlib.suppress(FileNotFoundError):
            self.filesystem.rm(self.inner_path(path), recursive=True)

    def check_writable(self) -> None:
        """Write, read and delete a tiny file, so that a fit fails before it starts instead of after an epoch.

        Raises:
            StoreError: One of these operations failed, or reading returned other bytes.
        """
        for root in dict.fromkeys((self.url, self.runs_path or self.url)):
            path, data = join(root, f"writable-{uuid.uuid4().hex}"), uuid.uuid4().bytes
            self.write_bytes(path, data)
            if self.read_bytes(path) != data:
                raise StoreError(f"cannot use {root}: reading a file returned other bytes than were written")
            self.delete(path)

    def _upload(self, local: str, path: str) -> None:
        filesystem, target = self.filesystem, self.inner_path(path)
        if protocol_of(self.url) in OBJECT_STORES:
            with explaining("write", path):
                filesystem.put_file(local, target)
            return
        directory, name = posixpath.split(target)
        temporary = posixpath.join(directory, temporary_name(name))
        try:
            with explaining("write", path):
                filesystem.put_file(local, temporary)
                options = {"overwrite": True} if protocol_of(self.url) == "hdfs" else {}  # as hdfs-native does
                _replace(filesystem, temporary, target, options)
        except BaseException:
            # fsspec's file systems may raise anything; report the first error
            with contextlib.suppress(Exception):
                filesystem.rm_file(temporary)
            raise


def _replace(filesystem: Any, temporary: str, target: str, options: Mapping[str, Any]) -> None:
    """Rename ``temporary`` to ``target``, even if ``target`` exists and the file system cannot replace it."""
    try:
        filesystem.mv(temporary, target, **options)
    except OSError:
        if not (filesystem.exists(temporary) and filesystem.isfile(target)):
            raise
    if not filesystem.exists(temporary):
        return
    # On HDFS, libhdfs raises an error, but WebHDFS does not. The old content is deleted after the new one has the name.
    old = posixpath.join(posixpath.dirname(target), temporary_name(posixpath.basename(target)))
    filesystem.mv(target, old)
    try:
        filesystem.mv(temporary, target)
    except BaseException:
        filesystem.mv(old, target)
        raise
    with contextlib.suppress(Exception):  # the new file is complete, even if the old one stays
        filesystem.rm_file(old)


def _remove_unless_locked(temporary: str) -> None:
    with contextlib.suppress(OSError), open(temporary, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(temporary)


def _rename(temporary: str, path: str) -> None:
    with explaining("write", path):
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # otherwise, a crash of the host may leave the new name without content
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
