"""HDFS by hdfs-native, with files that behave like Python's, and with clients that survive a fork."""

from __future__ import annotations

import ctypes
import io
from typing import Any

from hdfs_native.fsspec import HdfsFileSystem

_BUFFER = 1 << 16
"""Bytes of the buffer of a file."""


class HdfsFiles(HdfsFileSystem):  # type: ignore[misc] # it is Any if the package is missing
    """The file system of hdfs-native, with the fixes of this module."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Keep the client forever. In a forked child, fsspec's cache drops all file systems, and destroying the client
        # would wait forever for its threads, which do not exist in the child.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.client))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if mode == "rb":
            return io.BufferedReader(_Read(file), _BUFFER)
        return io.BufferedWriter(_Written(file), _BUFFER) if mode == "wb" else file


class _Wrapped(io.RawIOBase):
    def __init__(self, file: Any) -> None:
        self._file = file

    def close(self) -> None:
        if not self.closed:
            try:
                self._file.close()
            finally:
                super().close()


class _Read(_Wrapped):
    """Wraps a file so that it can read into memory, and so that seek returns the position."""

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


class _Written(_Wrapped):
    """Wraps a file so that it knows its position."""

    _position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count = int(self._file.write(data))
        self._position += count
        return count

    def tell(self) -> int:
        return self._position
