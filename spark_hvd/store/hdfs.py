"""HDFS through hdfs-native, whose files become Python's own, and whose clients survive a fork."""

from __future__ import annotations

import ctypes
import io
from typing import Any

from hdfs_native.fsspec import HdfsFileSystem

_BUFFER = 1 << 16
"""Bytes of a file's buffer."""


class HdfsFiles(HdfsFileSystem):  # type: ignore[misc] # Any, where the package is missing
    """The file system of hdfs-native."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Never destroyed. fsspec's cache drops all file systems in a forked child, which would then wait forever for
        # threads of the client that it does not have.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.client))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if mode == "rb":
            return io.BufferedReader(_Read(file), _BUFFER)
        return io.BufferedWriter(_Written(file), _BUFFER) if mode == "wb" else file


class _Read(io.RawIOBase):
    """A file that reads into memory, and whose seek tells the position."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        data = self._file.read(len(memory))
        memory[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return bytes(self._file.read())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._file.seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            try:
                self._file.close()
            finally:
                super().close()


class _Written(io.RawIOBase):
    """A file that tells its position."""

    def __init__(self, file: Any) -> None:
        self._file, self._position = file, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count = int(self._file.write(data))
        self._position += count
        return count

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        if not self.closed:
            try:
                self._file.close()
            finally:
                super().close()
