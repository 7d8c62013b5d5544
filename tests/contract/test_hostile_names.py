"""Keys of a bucket are arbitrary text: whatever its listing says, no path leads out of a folder or of the store."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spark_hvd.torch as hvd
from spark_hvd.estimators.data.reuse import clear_materialized_data, delete_unused
from spark_hvd.estimators.lightning.loop import RunFiles
from spark_hvd.estimators.training.checkpoint import Checkpoints
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError
from spark_hvd.store.paths import local_below
from tests import stores

s3 = stores.s3  # pytest looks for fixtures among a module's names


@pytest.fixture
def store(s3: dict[str, Any]) -> Store:
    return Store.create(f"s3://bucket/{uuid.uuid4().hex}", storage_options=s3)


@pytest.fixture
def world() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def put(store: Store, below: str, key: str) -> None:
    """Write without s3fs, which would remove ".." from some of them."""
    prefix = store.inner_path(below).partition("/")[2]
    store.filesystem.call_s3("put_object", Bucket="bucket", Key=f"{prefix}/{key}", Body=b"the attacker's")


@pytest.mark.parametrize(
    "name", ["../up", "a/../../up", "{outside}", "/{outside}", "a\\..\\b", "n\0l", "..", "./.", "x/.."]
)
def test_a_resumed_run_writes_nothing_outside_its_folder(
    store: Store, world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    temporary, logs = tmp_path / "a" / "b" / "c", store.logs_path("r")
    temporary.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    store.write_bytes(f"{logs}/0", b"ours")
    put(store, logs, name.format(outside=tmp_path / "outside"))
    with pytest.raises(StoreError, match=r"refusing .* of s3://bucket/.*: expected the name of a file below"):
        RunFiles(Checkpoints(store, "r"), resumed=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b", "c"]


def test_the_files_of_a_run_come_back(store: Store, world: None) -> None:
    logs = store.logs_path("r")
    for name in ("a", "b/c/d..e", "b/..f", ".g"):
        store.write_bytes(f"{logs}/{name}", name.encode())
    for folder in ("", "b/", "empty/"):  # as S3's console creates them
        put(store, logs, folder)
    files = RunFiles(Checkpoints(store, "r"), resumed=True)
    found = {path.relative_to(files.root).as_posix(): path.read_text() for path in Path(files.root).rglob("*.*")}
    assert found == {name: name for name in ("b/c/d..e", "b/..f", ".g")}
    files.close()


def test_a_list_has_no_names_that_lead_elsewhere(store: Store) -> None:
    data = store.join("intermediate_data")
    store.write_bytes(f"{data}/1/_used", b"0")
    for key in ("../_used", "./_used", "/_used"):
        put(store, data, key)
    assert store.list(data) == [f"{data}/1"]
    delete_unused(store)
    clear_materialized_data(store)
    assert store.list(data) == []
    assert local_below("/root", "a//b/./c", data) == "/root/a/b/c"
