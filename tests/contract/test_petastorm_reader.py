"""What only the Petastorm reader does: its pools, its processes, and batches equal to the Arrow reader's."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pytest
import torch

from spark_hvd.data.readers.dataset import DatasetMeta
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.reader import ReaderSpec
from spark_hvd.estimators.errors import EstimatorError
from spark_hvd.estimators.petastorm.reader import PetastormReader
from spark_hvd.estimators.training.rows import open_reader
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError
from tests import stores
from tests.contract.reader_data import Share, local, numbered, shared, write

if importlib.util.find_spec("petastorm") is None:
    pytest.skip("needs petastorm", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

s3 = stores.s3


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return local(tmp_path)


@pytest.fixture(autouse=True)
def _no_process_stays() -> Iterator[None]:
    yield
    workers = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            workers += [child] if "run_launched" in " ".join(child.cmdline()) else []
    assert psutil.wait_procs(workers, timeout=5)[1] == []


def spec_of(meta: DatasetMeta, store: Store, **options: Any) -> ReaderSpec:
    columns = tuple(column.name for column in meta.columns)
    return ReaderSpec(**{"dataset": meta, "columns": columns, "store": store, **options})


def petastorm(meta: DatasetMeta, store: Store, batch_size: int = 7, **options: Any) -> Share:
    shuffle = options.get("shuffle", False)
    return shared(PetastormReader(spec_of(meta, store, **options)), meta, batch_size, shuffle=shuffle)


def rows(reader: Any, number: int = 0) -> list[int]:
    return [value for batch in reader.batches(number) for value in batch["row"].tolist()]


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("window_rows", [None, 15, 64])
@pytest.mark.parametrize("pool", ["thread", "dummy"])
def test_the_batches_of_the_arrow_reader(store: Store, pool: str, window_rows: int | None, cache: bool) -> None:
    meta = write(store, numbered(211), 3, 40)
    for rank in range(3):
        spec = spec_of(meta, store, shuffle=True, seed=9, window_rows=window_rows, cache=cache)
        readers = open_reader(replace(spec, kind="arrow")), PetastormReader(replace(spec, pool=pool, workers=3))
        arrow, other = (shared(reader, meta, 7, rank=rank, size=3, shuffle=True) for reader in readers)
        for epoch in (0, 1):
            for a, b in zip(arrow.batches(epoch), other.batches(epoch), strict=True):
                assert all(torch.equal(a[name], b[name]) for name in ("row", "half", "other"))
        arrow.close()
        other.close()


@pytest.mark.parametrize("workers", [1, 8])
def test_many_passes_lose_nothing_and_repeat(store: Store, workers: int) -> None:
    meta = write(store, numbered(400), 4, 10)
    reader = petastorm(meta, store, workers=workers, shuffle=True, seed=1)
    passes = [rows(reader, number) for number in range(10)]
    assert all(sorted(each) == list(range(400)) for each in passes)
    assert len({tuple(each) for each in passes}) == 10
    assert rows(reader, 4) == passes[4]
    reader.close()


@pytest.mark.slow
def test_processes(store: Store) -> None:
    """They start once, transform in their own memory, and yield what threads yield."""
    me = os.getpid()

    def transform(frame: pd.DataFrame) -> pd.DataFrame:
        frame["elsewhere"] = np.int64(os.getpid() != me)
        frame["image"] = [np.full((2, 2), i, np.float32) for i in frame["row"]]
        return frame.drop(columns=["other"])

    fields = (("elsewhere", np.int64, (), False), ("image", np.float32, (2, 2), False))
    meta = write(store, numbered(100), 2, 9)
    spec = spec_of(
        meta, store, pool="process", transformation_fn=transform, edit_fields=fields, removed_fields=("other",)
    )
    reader = shared(PetastormReader(spec), meta, 7)
    batches = list(reader.batches(0))
    children = _children()
    assert len(children) == 2
    assert torch.cat([batch["row"] for batch in batches]).tolist() == list(range(100))
    assert all(batch["elsewhere"].bool().all() for batch in batches)
    assert torch.equal(torch.cat([batch["image"] for batch in batches])[:, 1, 0], torch.arange(100.0))
    assert rows(reader, 1) == list(range(100))
    assert _children() == children
    half = reader.batches(2)
    next(half)
    half.close()  # type: ignore[attr-defined]
    assert not _children()
    assert rows(reader, 2) == list(range(100))
    reader.close()
    reader.close()
    assert not _children()


def _children() -> list[int]:
    found = []
    for child in psutil.Process().children():
        if child.status() != psutil.STATUS_ZOMBIE and "run_launched" in " ".join(child.cmdline()):
            found.append(child.pid)
    return sorted(found)


def test_a_process_that_is_killed(store: Store) -> None:
    meta = write(store, numbered(200), 1, 5)
    reader = petastorm(meta, store, pool="process", workers=1)
    batches = reader.batches(0)
    next(batches)
    os.kill(_children()[0], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EstimatorError, match=r"a reader process ended with exit code -9 \(-9: killed, mostly for"):
        list(batches)
    assert time.monotonic() - started < 30
    reader.close()


@pytest.mark.parametrize("pool", ["thread", "process"])
@pytest.mark.slow
def test_closed_by_another_thread(store: Store, pool: str) -> None:
    def slow(frame: pd.DataFrame) -> pd.DataFrame:
        time.sleep(0.3)
        return frame

    meta = write(store, numbered(400), 1, 5)
    reader = petastorm(meta, store, pool=pool, workers=1, transformation_fn=slow)
    raised: list[BaseException] = []

    def consume() -> None:
        try:
            rows(reader)
        except BaseException as error:
            raised.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    deadline = time.monotonic() + 60
    while not reader.reader._busy and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.4)
    reader.close()
    consumer.join(20)
    assert not consumer.is_alive()
    assert "the reader was closed while its batches were read" in str(raised[0])


def test_passes_side_by_side(store: Store) -> None:
    reader = petastorm(write(store, numbered(60), 1, 5), store, cache=True, shuffle=True, window_rows=5)
    first, second = reader.batches(0), reader.batches(1)
    pairs = [(a["row"].tolist(), b["row"].tolist()) for a, b in zip(first, second, strict=True)]
    for each in zip(*pairs, strict=True):
        assert sorted(itertools.chain(*each)) == list(range(60))
    reader.close()


def test_of_several_errors_always_the_first(store: Store) -> None:
    table = pa.table({"row": pa.array([0, 1, None, 3, None, 5])})
    meta = write(store, table, 1, 2)
    for _ in range(3):
        reader = petastorm(meta, store, workers=4)
        with pytest.raises(DataError, match=r"column 'row' in .*row group 1 has 1 null"):
            rows(reader)
        reader.close()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"pool": "fork"}, ValueError, "pool='fork': expected one of 'thread', 'process', 'dummy'"),
        ({"workers": 0}, ValueError, "workers=0: expected at least 1"),
    ],
)
def test_parameters(store: Store, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        PetastormReader(spec_of(write(store, numbered(4)), store, **options))


def test_processes_cannot_read_memory() -> None:
    store = Store.create(f"memory://{uuid.uuid4().hex}")
    meta = write(store, numbered(4))
    with pytest.raises(StoreError, match="is seen by this process alone: use pool='thread'"):
        PetastormReader(spec_of(meta, store, pool="process"))
    reader = petastorm(meta, store)
    assert rows(reader) == [0, 1, 2, 3]
    reader.close()


def test_reads_ahead_by_a_few_row_groups_only(store: Store) -> None:
    """The amount in memory does not grow with the data."""
    meta = write(store, numbered(1000), 1, 10)
    seen: list[int] = []

    def note(frame: pd.DataFrame) -> pd.DataFrame:
        seen.append(int(frame["row"].iloc[0]) // 10)
        return frame

    reader = petastorm(meta, store, batch_size=10, workers=2, transformation_fn=note)
    for step, _ in enumerate(reader.batches(0)):
        time.sleep(0.005)
        assert max(seen) <= step + 5
    reader.close()


def test_s3(s3: dict[str, Any]) -> None:
    store = Store.create(f"s3://bucket/{uuid.uuid4().hex}", storage_options=s3)
    meta = write(store, numbered(60), 2, 8)
    reader = petastorm(meta, store, shuffle=True)
    assert sorted(rows(reader)) == list(range(60))
    reader.close()
    from petastorm import make_batch_reader

    with make_batch_reader(meta.url, workers_count=2, storage_options=s3) as whole:
        assert sorted(int(i) for batch in whole for i in batch.row) == list(range(60))
