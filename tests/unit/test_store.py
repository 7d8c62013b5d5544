"""Names and failures of stores: full and read-only disks, killed writers, S3 without a bucket, forks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from spark_hvd.data.parquet import dataset_of
from spark_hvd.data.readers.files import arrow_filesystem
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError, store_error
from spark_hvd.store.paths import complete
from tests import stores
from tests.stores import everything, scratch

s3 = stores.s3  # pytest looks for fixtures among a module's names
mount = stores.mount
forbidden = stores.forbidden


fsspec.register_implementation("nowhere", "no_such_package.FileSystem", errtxt="Install no_such_package")


def test_layout() -> None:
    store = Store.create("s3://bucket/fits/")
    assert store.run_path("r1") == "s3://bucket/fits/runs/r1"
    assert store.checkpoint_path("r1") == "s3://bucket/fits/runs/r1/last.ckpt"
    assert store.checkpoint_path("r1", "best.ckpt") == "s3://bucket/fits/runs/r1/best.ckpt"
    assert store.logs_path("r1") == "s3://bucket/fits/runs/r1/logs"
    assert store.data_path("abc") == "s3://bucket/fits/intermediate_data/abc"
    elsewhere = Store.create("/a", runs_path="/b/runs", train_path="/c/", val_path=Path("/d"))
    assert elsewhere.run_path("r1") == "/b/runs/r1"
    assert (elsewhere.train_path, elsewhere.val_path) == ("/c", "/d")
    for name in ("", "..", "a/b", "."):
        with pytest.raises(ValueError, match=r"run_id=.*expected the name of a file or directory"):
            store.run_path(name)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("/data/x/", "/data/x"),
        ("/data/../x//y", "/x/y"),
        ("file:///data/x/", "/data/x"),
        ("file:/data/x", "/data/x"),
        ("FILE:///data/x", "/data/x"),
        ("s3a://bucket/x", "s3://bucket/x"),
        ("s3n://bucket", "s3://bucket"),
        ("S3://bucket/X/", "s3://bucket/X"),
        ("hdfs://name:8020/x/", "hdfs://name:8020/x"),
        ("hdfs:///x", "hdfs:///x"),
        ("memory://", "memory://"),
    ],
)
def test_urls_have_one_form(given: str, url: str) -> None:
    assert Store.create(given).url == url


def test_relative_and_home_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert Store.create("store").url == str(tmp_path / "store")
    assert Store.create("~/store").url == "/home/me/store"


def test_dbfs_is_the_mount_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("spark_hvd.store.paths._DBFS_MOUNT", str(tmp_path))
    store = Store.create("dbfs:/fits/x")
    assert store.url == Store.create("dbfs:///fits/x").url == f"{tmp_path}/fits/x"
    store.check_writable()
    monkeypatch.setattr("spark_hvd.store.paths._DBFS_MOUNT", str(tmp_path / "absent"))
    outside = Store.create("dbfs:/fits/x")
    assert outside.url == "dbfs:///fits/x"
    with pytest.raises(StoreError, match=r"cannot open dbfs:///fits/x: TypeError.*There is no /dbfs here.*/Volumes/"):
        outside.exists("dbfs:///fits/x/y")


def test_bad_parameters() -> None:
    with pytest.raises(TypeError, match="prefix_path=5: expected a path or a URL, got int"):
        Store.create(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefix_path='': expected a path or a URL such as"):
        Store.create("")
    with pytest.raises(ValueError, match="expected a bucket, as in 's3://bucket/prefix'"):
        Store.create("s3:///x")
    with pytest.raises(ValueError, match="prefix_path='s3:/b/x': expected two slashes after the protocol"):
        Store.create("s3:/b/x")
    with pytest.raises(ValueError, match="train_path='/x' is on another file system than the store"):
        Store.create("memory://x", train_path="/x")
    with pytest.raises(TypeError, match="storage_options='anon': expected a mapping"):
        Store.create("s3://b", storage_options="anon")  # type: ignore[arg-type]


def test_unknown_protocols_and_missing_packages() -> None:
    with pytest.raises(StoreError, match=r"cannot use foo://x: fsspec knows no protocol 'foo'\. Expected a path, or"):
        Store.create("foo://x")
    with pytest.raises(StoreError, match=r"package for nowhere:// is not installed. Next: Install no_such_package"):
        Store.create("nowhere://x")


def test_missing_package_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "gs", raising=False)
    with pytest.raises(StoreError, match=r"Next: pip install gcsfs, on every host .* gs://bucket/fits, and GOOGLE_APP"):
        Store.create("gs://bucket/x")


@pytest.mark.parametrize("path", ["hdfs:///x", "viewfs://cluster/x", "har:///x"])
def test_long_causes_are_cut_and_hdfs_says_what_it_needs(path: str) -> None:
    error = store_error("open", path, OSError("Unable to load libjvm " + "dlopen failed " * 900))
    assert len(str(error)) < 800
    assert str(error).endswith(
        "Next: pip install hdfs-native, on every host of the cluster. Expected a path such as "
        "hdfs://namenode:8020/fits, and HADOOP_CONF_DIR on every host, or storage_options. Without that package, set "
        "JAVA_HOME, HADOOP_HOME and CLASSPATH there"
    )


def test_an_account_that_was_not_named_is_not_one_out_of_reach() -> None:
    cause = ValueError("unable to connect to account for Must provide either a connection_string or account_name")
    assert str(store_error("open", "abfs://container/x", cause)).endswith(
        "Check the path and storage_options. Expected a path such as "
        "abfss://container@account.dfs.core.windows.net/fits, and AZURE_STORAGE_ACCOUNT_KEY on every host, or "
        "storage_options"
    )


def test_secrets_do_not_show(s3: dict[str, Any]) -> None:
    store = Store.create("s3://absent/x", storage_options={**s3, "secret": "hush"})
    with pytest.raises(StoreError) as caught:
        store.check_writable()
    assert "hush" not in repr(store) + str(caught.value)


# -- failures of local disks


@pytest.mark.parametrize("size", [100, 1 << 20])  # found by the final flush, and by a write
def test_a_full_disk(mount: Callable[..., Path], size: int) -> None:
    directory = mount()
    store = Store.create(directory / "store")
    path = store.join("model")
    store.write_bytes(path, b"old")
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    with pytest.raises(StoreError, match=f"^cannot write {path}: OSError: .*No space left on device. Free space there"):
        store.write_bytes(path, os.urandom(size))
    assert store.read_bytes(path) == b"old"
    assert everything(store) == [path]


def test_a_full_disk_shows_through_what_torch_makes_of_it(mount: Callable[..., Path]) -> None:
    store = Store.create(mount())
    with (
        pytest.raises(StoreError, match=r"No space left on device. Free space there"),
        store.writing(store.join("model")) as file,
    ):
        torch.save(torch.zeros(1 << 18), file)
    assert everything(store) == []


def test_a_full_scratch_disk_names_it(
    mount: Callable[..., Path], s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(mount()))
    store = Store.create(f"s3://bucket/{uuid.uuid4().hex}", storage_options=s3)
    with pytest.raises(StoreError, match=r"cannot write s3://.*/x, staged in .*mount0.*: No space left|No space left"):
        store.write_bytes(store.join("x"), b"x" * (1 << 20))
    assert everything(store) == []
    assert scratch() == set()
    store.write_bytes(store.join("x"), b"x")  # the staged data are gone


def test_a_read_only_disk(mount: Callable[..., Path]) -> None:
    store = Store.create(mount("ro") / "store")
    with pytest.raises(StoreError, match=f"cannot write {store.url}/.*Read-only file system.*choose another store"):
        store.check_writable()


def test_a_directory_of_somebody_else() -> None:
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o555)
        store = Store.create(directory)
        os.seteuid(65534 if root else os.geteuid())  # root may write everywhere
        try:
            with pytest.raises(
                StoreError, match=f"cannot write {directory}/.*Permission denied.*Check the owner and mode"
            ):
                store.check_writable()
        finally:
            os.seteuid(0 if root else os.geteuid())


def test_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    store = Store.create(tmp_path / "file" / "store")
    with pytest.raises(StoreError, match="A part of the path is a file where a directory is expected"):
        store.check_writable()
    assert not store.exists(store.url)


def test_runs_path_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    store = Store.create(tmp_path / "store", runs_path=tmp_path / "file" / "runs")
    with pytest.raises(StoreError, match="file/runs"):
        store.check_writable()


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_a_killed_writer_leaves_the_old_content(kind: str, tmp_path: Path, s3: dict[str, Any]) -> None:
    store = (
        Store.create(tmp_path)
        if kind == "local"
        else Store.create(f"s3://bucket/{uuid.uuid4().hex}", storage_options=s3)
    )
    path = store.join("run", "model")
    store.write_bytes(path, b"old")
    code = (
        "import os, pickle, signal, sys; store = pickle.loads(sys.stdin.buffer.read())\n"
        "with store.writing(store.join('run', 'model')) as file:\n"
        "    file.write(os.urandom(1 << 20)); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(store), env=environment, timeout=250)
    assert ended.returncode == -9
    assert store.read_bytes(path) == b"old"
    assert store.list(store.join("run")) == [path]


# -- S3


def quick(options: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Options that give up on a dead server at once."""
    return {**options, **changes, "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1}}


def test_s3_missing_bucket(s3: dict[str, Any]) -> None:
    store = Store.create("s3://absent/x", storage_options=s3)
    with pytest.raises(
        StoreError, match=r"cannot write s3://absent/x/.*bucket does not exist.*not created automatically"
    ):
        store.check_writable()


def test_s3_no_server(s3: dict[str, Any]) -> None:
    store = Store.create("s3://bucket/x", storage_options=quick(s3, endpoint_url="http://127.0.0.1:9"))
    for action in (store.check_writable, lambda: store.exists(store.url), lambda: store.list(store.url)):
        with pytest.raises(StoreError, match=r"cannot .* s3://bucket/x.*Check the address \(endpoint_url in storage_"):
            action()


def test_s3_no_credentials(s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    store = Store.create("s3://bucket/x", storage_options={"endpoint_url": s3["endpoint_url"]})
    with pytest.raises(StoreError, match=r"Unable to locate credentials.*Pass credentials in storage_options"):
        store.check_writable()


def test_s3_misspelt_option(s3: dict[str, Any]) -> None:
    store = Store.create("s3://bucket/x", storage_options={**s3, "endpont_url": "x"})
    with pytest.raises(StoreError, match=r"'endpont_url'.*Check the path and storage_options"):
        store.check_writable()


def test_s3_large_files_in_parts(s3: dict[str, Any]) -> None:
    """Above 100 MiB, the upload has several parts, and the object keeps its old content until the last part arrives."""
    store = Store.create(f"s3://bucket/{uuid.uuid4().hex}", storage_options=s3)
    path, block = store.join("large"), os.urandom(1 << 20)
    store.write_bytes(path, b"old")
    with store.writing(path) as file:
        for _ in range(101):
            file.write(block)
        assert store.read_bytes(path) == b"old"
    assert store.size(path) == 101 << 20
    with store.open(path) as saved:
        saved.seek(100 << 20)
        assert saved.read() == block


def test_s3_arrow_requests_what_it_reads(s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs.core

    store = Store.create(f"s3://bucket/{uuid.uuid4().hex}", storage_options=s3)
    path, filesystem = store.inner_path(store.join("x.parquet")), arrow_filesystem(store)
    table = pa.table({name: np.random.default_rng(0).random(80_000) for name in "abcd"})
    pq.write_table(table, path, filesystem=filesystem, row_group_size=20_000)
    fetch, fetched = s3fs.core._fetch_range, []

    def counting(fs: Any, bucket: str, key: str, version: Any, start: int, end: int, *rest: Any, **more: Any) -> Any:
        fetched.append(end - start)
        return fetch(fs, bucket, key, version, start, end, *rest, **more)

    monkeypatch.setattr(s3fs.core, "_fetch_range", counting)
    with pq.ParquetFile(filesystem.open_input_file(path)) as file:
        assert file.read_row_group(1, columns=["b"]) == table.select(["b"]).slice(20_000, 20_000)
        chunk = file.metadata.row_group(1).column(1).total_compressed_size
    assert chunk > 100_000
    assert len(fetched) == 2
    assert sum(fetched) < chunk + 70_000  # it and the end of the file, of 3 MB


FORK = """
import os, pickle, sys, threading, time
store = pickle.loads(sys.stdin.buffer.read())
store.write_bytes(store.join("a"), b"1")
stop = threading.Event()
def read():
    while not stop.is_set():
        store.read_bytes(store.join("a"))
readers = [threading.Thread(target=read) for _ in range(2)]  # the fork finds fsspec's thread at work
for reader in readers: reader.start()
children = []
for number in range(4):
    time.sleep(0.05)
    if (child := os.fork()) == 0:
        status = 1
        try:
            store.write_bytes(store.join(f"child{number}"), store.read_bytes(store.join("a")))
            status = 0
        finally:
            os._exit(status)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
stop.set()
for reader in readers: reader.join()
print(len(store.list(store.url)), store.read_bytes(store.join("child3")))
"""


@pytest.mark.slow  # by day: a forked child in tests/contract/test_stores.py
def test_s3_works_in_forks_and_in_the_process_that_forked(s3: dict[str, Any]) -> None:
    store = Store.create(f"s3://bucket/{uuid.uuid4().hex}", storage_options=s3)
    out = subprocess.run([sys.executable, "-c", FORK], input=pickle.dumps(store), capture_output=True, timeout=250)
    assert out.stdout.decode().splitlines() == ["[0, 0, 0, 0]", "5 b'1'"], out.stderr.decode()


def test_a_bucket_that_forbids_says_so_on_every_call(forbidden: Store) -> None:
    path = forbidden.join("a")
    calls: list[Callable[[], Any]] = [
        forbidden.check_writable,
        lambda: forbidden.write_bytes(path, b"x"),
        lambda: forbidden.read_bytes(path),
        lambda: forbidden.open(path),
        lambda: forbidden.exists(path),
        lambda: forbidden.size(path),
        lambda: forbidden.list(path),
        lambda: forbidden.delete(path),
        lambda: dataset_of(forbidden, path, None),
    ]
    for call in calls:
        with pytest.raises(
            StoreError, match=r"cannot .* s3://bucket/fits/(a|writable-\w+)(/_delta_log)?: PermissionError"
        ) as failure:
            call()
        assert "storage_options allow to list, read, write and delete there" in str(failure.value)
        assert "hush" not in str(failure.value)


def test_abfss_is_abfs_whose_package_is_named() -> None:
    assert complete("path", "abfss://c@account.dfs.core.windows.net/x") == "abfs://c@account.dfs.core.windows.net/x"
    if importlib.util.find_spec("adlfs") is None:
        with pytest.raises(StoreError, match=r"the package for abfs:// is not installed\. Next: pip install adlfs"):
            Store.create("abfss://c@account.dfs.core.windows.net/x")
