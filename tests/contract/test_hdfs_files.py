"""Stores on HDFS without a server: files and clients of a stand-in have the limits of hdfs-native's.

`make matrix ROWS=stores` uses the real package and a server.
"""

from __future__ import annotations

import io
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd.store import Store


class Reader(io.RawIOBase):
    """Has no readinto, and its seek returns nothing."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._file.read(min(size, 1000) if size >= 0 else size)
        return data

    def seek(self, offset: int, whence: int = 0) -> None:  # type: ignore[override]
        self._file.seek(offset, whence)

    def tell(self) -> int:
        return int(self._file.tell())


class Writer(io.RawIOBase):
    """Has no position."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        return int(self._file.write(data))

    def close(self) -> None:
        self._file.close()


class HdfsFileSystem(LocalFileSystem):  # type: ignore[misc] # Any
    protocol = "hdfs"

    def __init__(self, host: str | None = None, port: int | None = None, **options: Any) -> None:
        super().__init__(auto_mkdir=True)
        self.client = object()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("hdfs://name:1")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        return {"host": "name", "port": 1}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        return Reader(file) if mode == "rb" else Writer(file)


HdfsFileSystem.__module__ = "hdfs_native.fsspec"
PACKAGE = {"hdfs_native": types.ModuleType("hdfs_native"), "hdfs_native.fsspec": types.ModuleType("hdfs_native.fsspec")}
PACKAGE["hdfs_native.fsspec"].HdfsFileSystem = HdfsFileSystem  # type: ignore[attr-defined]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, module in PACKAGE.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(_registry, "hdfs", HdfsFileSystem)
    monkeypatch.delitem(sys.modules, "spark_hvd.store.hdfs", raising=False)
    yield Store.create(f"hdfs://name:1{tmp_path}/store")
    sys.modules.pop("spark_hvd.store.hdfs", None)


def test_files_are_as_those_of_python(store: Store) -> None:
    path, rows = store.join("x.pt"), torch.arange(5000.0)
    with store.writing(path) as file:
        torch.save(rows, file)
    with store.open(path) as file:
        assert torch.equal(torch.load(file), rows)
        assert file.seek(-3, io.SEEK_END) == store.size(path) - 3
        assert (len(file.read(10)), file.tell()) == (3, store.size(path))
    with store.open(store.join("y"), "wb") as file:
        file.write(b"abc")
        assert file.tell() == 3
    assert store.read_bytes(store.join("y")) == b"abc"


def test_sharded_checkpoints(store: Store) -> None:
    hvd.init()
    try:
        model = nn.Linear(3, 2)
        weights = model.weight.tolist()
        hvd.checkpoint.save_sharded(store, model, state={"epoch": 1}, step=1)
        nn.init.zeros_(model.weight)
        saved = hvd.checkpoint.load_sharded(store, model)
        assert saved is not None
        assert (saved.state, model.weight.tolist()) == ({"epoch": 1}, weights)
    finally:
        hvd.shutdown()


FORKS = """
import os, sys, types
import fsspec
from fsspec.implementations.local import LocalFileSystem

class Client:  # waits in a child for threads that it does not have, forever: here it says so
    def __del__(self):
        print("destroyed", flush=True)

class HdfsFileSystem(LocalFileSystem):
    protocol = "hdfs"

    def __init__(self, **options):
        super().__init__(**options)
        self.client = Client()

    @staticmethod
    def _get_kwargs_from_urls(path):
        return {}

HdfsFileSystem.__module__ = "hdfs_native.fsspec"
package = types.ModuleType("hdfs_native.fsspec")
package.HdfsFileSystem = HdfsFileSystem
sys.modules |= {"hdfs_native": types.ModuleType("hdfs_native"), "hdfs_native.fsspec": package}
fsspec.register_implementation("hdfs", HdfsFileSystem, clobber=True)

from spark_hvd.store import Store

store = Store.create("hdfs://name:1/nowhere")
before = store.filesystem
if (child := os.fork()) == 0:
    assert store.filesystem is not before
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
print("forked")
"""


def test_a_forked_child_destroys_no_client() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=250)
    assert done.stdout.split() == ["forked"], done.stderr
