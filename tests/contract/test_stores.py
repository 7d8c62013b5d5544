"""One contract for every kind of store, on real file systems, a real S3 server and other servers if they exist.

`make matrix ROWS=stores` installs servers of Google's and Azure's storage and of HDFS, and runs these tests with them.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from spark_hvd.data.parquet import dataset_of
from spark_hvd.data.readers.files import arrow_filesystem
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError
from spark_hvd.store.row_groups import RowGroupWriter
from tests import stores
from tests.stores import everything, scratch

s3, gs, abfs, hdfs = stores.s3, stores.gs, stores.abfs, stores.hdfs  # pytest looks for fixtures among a module's names
REMOTE = stores.remote()


class Unforgiving(MemoryFileSystem):
    """Does not rename onto an existing file, and reports no error, like WebHDFS."""

    protocol = "unforgiving"
    store: dict[str, Any] = {}  # noqa: RUF012 - as in the class above
    pseudo_dirs = [""]  # noqa: RUF012

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if not self.exists(path2):
            super().mv(path1, path2, **kwargs)


class Unwilling(MemoryFileSystem):
    """Refuses to rename a file onto another, as libhdfs and hdfs-native do."""

    protocol = "unwilling"
    store: dict[str, Any] = {}  # noqa: RUF012 - as in the class above
    pseudo_dirs = [""]  # noqa: RUF012

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.exists(path2):
            raise FileExistsError(f"rename destination {path2} already exists")
        super().mv(path1, path2, **kwargs)


class Losing(MemoryFileSystem):
    """Loses a file that should be renamed, as if another process deleted it."""

    protocol = "losing"
    store: dict[str, Any] = {}  # noqa: RUF012 - as in the class above
    pseudo_dirs = [""]  # noqa: RUF012

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.rm_file(path1)
        raise FileNotFoundError(path1)


class Keeping(MemoryFileSystem):
    """Neither renames onto a file nor deletes one."""

    protocol = "keeping"
    store: dict[str, Any] = {}  # noqa: RUF012 - as in the class above
    pseudo_dirs = [""]  # noqa: RUF012

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.exists(path2):
            raise FileExistsError(path2)
        self.pipe_file(path2, self.cat_file(path1))
        super().rm_file(path1)

    def rm_file(self, path: str) -> None:
        raise PermissionError(path)


fsspec.register_implementation("losing", Losing, clobber=True)
fsspec.register_implementation("keeping", Keeping, clobber=True)
fsspec.register_implementation("unforgiving", Unforgiving, clobber=True)
fsspec.register_implementation("unwilling", Unwilling, clobber=True)


@pytest.fixture(params=["local", "memory", "unforgiving", "unwilling", *REMOTE])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param in REMOTE:
        return stores.created(request.param, request.getfixturevalue(request.param))
    return Store.create(tmp_path / "store" if request.param == "local" else f"{request.param}://{uuid.uuid4().hex}")


def test_bytes_come_back(store: Store) -> None:
    path = store.join("deep", "er", "file.bin")
    assert not store.exists(path)
    assert not store.exists(store.url)
    for data in (b"first", b"", os.urandom(100_000), b"last"):
        store.write_bytes(path, data)
        assert store.read_bytes(path) == data
        assert store.size(path) == len(data)
        with store.open(path) as file:
            assert file.read() == data
    assert store.exists(path)
    assert store.exists(store.join("deep"))
    assert everything(store) == [store.inner_path(path)]


def test_a_new_content_that_was_lost_is_told() -> None:
    store = Store.create(f"losing://{uuid.uuid4().hex}")
    path = store.join("a")
    store.filesystem.pipe_file(store.inner_path(path), b"old")
    with pytest.raises(StoreError, match=r"cannot write losing://.*/a: FileNotFoundError"):
        store.write_bytes(path, b"new")
    assert store.read_bytes(path) == b"old"


def test_an_old_content_that_stays_is_no_failure() -> None:
    store = Store.create(f"keeping://{uuid.uuid4().hex}")
    path = store.join("a")
    for data in (b"old", b"new"):
        store.write_bytes(path, data)
    assert store.read_bytes(path) == b"new"
    assert store.list(store.url) == [path]


def test_list_gives_complete_paths_that_open(store: Store) -> None:
    assert store.list(store.url) == []
    for name in ("b.bin", "a.bin", "below/c.bin"):
        store.write_bytes(store.join("x", *name.split("/")), name.encode())
    x = store.join("x")
    assert store.list(x) == [f"{x}/a.bin", f"{x}/b.bin", f"{x}/below"]
    assert store.read_bytes(store.list(x)[1]) == b"b.bin"
    assert store.list(store.join("y")) == []
    assert store.list(f"{x}/a.bin") == []


def test_others_writes_are_seen_at_once(store: Store) -> None:
    store.write_bytes(store.join("a"), b"1")
    assert store.list(store.url) == [store.join("a")]
    # without the store, like another process
    other = fsspec.core.url_to_fs(store.url, **store.storage_options, skip_instance_cache=True)[0]
    other.pipe_file(store.inner_path(store.join("b")), b"2")
    assert store.list(store.url) == [store.join("a"), store.join("b")]
    assert store.exists(store.join("b"))
    other.rm_file(store.inner_path(store.join("a")))
    assert store.list(store.url) == [store.join("b")]


def test_delete_takes_files_and_directories_and_nothing(store: Store) -> None:
    for name in ("a", "d/b", "d/e/c"):
        store.write_bytes(store.join(*name.split("/")), b"x")
    store.delete(store.join("a"))
    assert store.list(store.url) == [store.join("d")]
    store.delete(store.join("d"))
    store.delete(store.join("d"))
    assert everything(store) == []


def test_delete_refuses_what_is_not_in_the_store(store: Store) -> None:
    neighbour = f"{store.url}2/file"
    for path in (neighbour, store.url.rpartition("/")[0], store.join("..", "x"), "", "relative"):
        with pytest.raises(ValueError, match="expected a path in the store, below"):
            store.delete(path)


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_block_that_raises_leaves_the_old_content_and_nothing_else(store: Store, old: bytes | None) -> None:
    path, before = store.join("run", "model.pt"), scratch()
    if old is not None:
        store.write_bytes(path, old)

    class Oops(Exception):
        pass

    with pytest.raises(Oops, match="as it was"), store.writing(path) as file:  # noqa: PT012
        file.write(os.urandom(1 << 20))
        file.flush()
        assert store.exists(path) == (old is not None)
        assert store.list(store.join("run")) == ([path] if old is not None else [])  # no temporary file is listed
        raise Oops("as it was")
    assert everything(store) == ([store.inner_path(path)] if old is not None else [])
    assert old is None or store.read_bytes(path) == old
    assert scratch() <= before


def test_the_file_takes_what_writers_do(store: Store) -> None:
    """torch.save, numpy, Parquet, and seeking back to fix a header."""
    table, tensor = pa.table({"a": [1, 2, 3]}), torch.arange(5.0)
    with store.writing(store.join("t.pt")) as file:
        torch.save({"t": tensor}, file)
    with store.writing(store.join("n.npy")) as file:
        np.save(file, tensor.numpy())
    with store.writing(store.join("p.parquet")) as file, pq.ParquetWriter(file, table.schema) as writer:
        writer.write_table(table)
    with store.writing(store.join("s.bin")) as file:
        file.write(b"????body")
        file.seek(0)
        file.write(b"head")
    with store.writing(store.join("c.bin")) as file:
        file.write(b"closed by the block")
        file.close()
    with store.open(store.join("t.pt")) as saved:
        assert torch.equal(torch.load(saved)["t"], tensor)
    with store.open(store.join("n.npy")) as saved:
        assert np.load(saved).tolist() == [0, 1, 2, 3, 4]
    read = pq.read_table(store.inner_path(store.join("p.parquet")), filesystem=arrow_filesystem(store))
    assert read == table
    assert store.read_bytes(store.join("s.bin")) == b"headbody"
    assert store.read_bytes(store.join("c.bin")) == b"closed by the block"


def test_arrow_writes_where_the_store_reads(store: Store) -> None:
    path = store.join("arrow", "part.parquet")
    filesystem = arrow_filesystem(store)
    filesystem.create_dir(store.inner_path(store.join("arrow")), recursive=True)
    pq.write_table(pa.table({"a": [7]}), store.inner_path(path), filesystem=filesystem)
    with store.open(path) as file:
        assert pq.read_table(file).to_pydict() == {"a": [7]}
    assert isinstance(filesystem, pa.fs.LocalFileSystem) == store.url.startswith("/")


def test_a_reader_sees_whole_files_only(store: Store) -> None:
    """Even while the file is replaced repeatedly; but if a rename does not replace it, it may be absent."""
    if store.url.startswith("gs"):
        pytest.skip("gcp-storage-emulator gives mixtures of two contents, to plain HTTP as well")
    path, done, seen, written = store.join("model"), threading.Event(), set(), [0]
    store.write_bytes(path, bytes([0]) * 300_000)

    def write() -> None:
        try:
            for value in range(1, 250):
                store.write_bytes(path, bytes([value]) * 300_000)
                written.append(value)
                if value >= 20 and len(seen) > 1:
                    break
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        try:
            data = store.read_bytes(path)
        except StoreError:
            assert store.url.startswith(("unforgiving", "unwilling"))
            continue
        assert data == data[:1] * 300_000
        seen.add(data[0])
    writer.join()
    assert len(seen) > 1
    assert store.read_bytes(path) == bytes([written[-1]]) * 300_000


def test_a_forked_child_uses_the_store_anew(store: Store) -> None:
    path = store.join("a")
    store.write_bytes(path, b"1")

    def child() -> None:
        assert store.read_bytes(path) == b"1"

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0


def test_missing_files_say_so(store: Store) -> None:
    path = store.join("missing")
    for action, verb in ((store.read_bytes, "read"), (store.open, r"open \(rb\)"), (store.size, "get the size of")):
        with pytest.raises(StoreError, match=f"^cannot {verb} {path}: FileNotFoundError: .*Check the (path|name)"):
            action(path)
    store.write_bytes(store.join("dir", "file"), b"x")
    with pytest.raises(StoreError, match=r"dir: IsADirectoryError: .*It is a directory where a file is expected"):
        store.size(store.join("dir"))


def test_check_writable_leaves_nothing(store: Store) -> None:
    store.check_writable()
    assert everything(store) == []


def test_pickles_as_data(store: Store) -> None:
    store.write_bytes(store.join("a"), b"1")
    assert store.filesystem is not None
    copy = pickle.loads(pickle.dumps(store))
    assert copy == store
    assert copy.read_bytes(store.join("a")) == b"1"
    assert len(pickle.dumps(store)) < 600


def test_other_processes_see_what_is_shared(store: Store) -> None:
    if store.url.startswith(("unforgiving", "unwilling")):
        pytest.skip("its class is in this file only")
    store.write_bytes(store.join("a"), b"from the first")
    code = (
        "import pickle, sys; store = pickle.loads(sys.stdin.buffer.read())\n"
        "print(store.exists(store.join('a')), 'pyspark' in sys.modules)\n"
        "if store.is_shared: store.write_bytes(store.join('b'), store.read_bytes(store.join('a')) + b', seen')\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    out = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(store), capture_output=True, env=environment, timeout=60
    )
    assert out.stdout.split() == [str(store.is_shared).encode(), b"False"], out.stderr.decode()
    assert store.is_shared == (not store.url.startswith("memory"))
    if store.is_shared:
        assert store.read_bytes(store.join("b")) == b"from the first, seen"


def test_folders_of_databricks_take_bytes_in_order_and_have_no_locks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """/Volumes and /dbfs do that: files are written without seeking, and nothing waits for a lock."""
    monkeypatch.setattr("spark_hvd.store.paths._DBFS_MOUNT", str(tmp_path))

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    for name in ("seek", "truncate"):
        monkeypatch.setattr(f"spark_hvd.store.errors._CheckedFile.{name}", refuse, raising=False)
    store = Store.create("dbfs:/fits")
    store.check_writable()
    for step in (1, 2):
        with store.writing(store.join("last.ckpt")) as file:
            torch.save({"x": torch.arange(1000.0) * step}, file)
    with Store.create("dbfs:///fits").open(store.join("last.ckpt")) as saved:
        assert torch.load(saved)["x"].sum() == 2 * 499_500
    with ExitStack() as stack:
        writer = RowGroupWriter(store, store.join("rows", "part.parquet"), 2, stack)
        writer.add(pa.table({"x": range(10_000)}))
        groups = writer.finish()
    assert pq.read_metadata(store.join("rows", "part.parquet")).num_row_groups == len(groups) > 1
    assert dataset_of(Store.create("dbfs:/fits/rows"), store.join("rows"), None).rows == 10_000
    with pytest.raises(OSError, match="Operation not supported"), store.writing(store.join("x")) as file:
        file.seek(0)
