"""Feeders that are out of reach, slow or gone while an epoch is abandoned; and sources in other processes. No Spark."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import pickle
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zmq

import spark_hvd.torch as hvd
from spark_hvd import DataError
from spark_hvd.data import mapped
from spark_hvd.data.feeders import pool
from spark_hvd.data.feeders.directory import Directory
from spark_hvd.data.feeders.feeder import serve
from spark_hvd.data.feeders.mapping import MappedSpec, RowMap
from spark_hvd.data.mapped import MappedSource, mapped_source
from spark_hvd.data.readers.arrow import ArrowReader
from spark_hvd.data.readers.forms import TableForm
from spark_hvd.data.readers.sharding import Position
from spark_hvd.data.shard import DatasetShard
from spark_hvd.data.source import ReadOptions, parquet_source
from spark_hvd.runner.outcome.payload import dump_exception
from tests.conftest import wait_until
from tests.contract.test_feeders import AT_ONCE, BATCH, ROWS, OurError, close_pools, drawn, held, map_of

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def path(tmp_path: Path) -> str:
    pq.write_table(pa.table({"id": range(ROWS)}), tmp_path / "rows.parquet", row_group_size=30)
    return str(tmp_path / "rows.parquet")


@pytest.fixture
def world() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def source_of(path: str, row_map: RowMap) -> MappedSource:
    return mapped_source("train", parquet_source(path), MappedSpec(b"", row_map, None))


@contextlib.contextmanager
def feeder_here(row_map: RowMap) -> Iterator[pool.FeederPool]:
    """The pool of a feeder that is a thread of this process."""
    directory = Directory("127.0.0.1", "127.0.0.1", None, 1, 60.0)
    arguments = directory.address, "here", "127.0.0.1", None, {"train": row_map}, dump_exception
    feeder = threading.Thread(target=serve, args=arguments)
    feeder.start()
    try:
        yield pool.pool_of(directory.address)
    finally:
        directory.end()
        feeder.join()
        close_pools()
        directory.close()


def same(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows


def test_the_rank_goes_with_a_source(world: None, path: str) -> None:
    source = source_of(path, map_of(drawn, random=True))
    sent = pickle.loads(pickle.dumps(source))
    hvd.shutdown()
    options = ReadOptions(columns=("noise",))
    with contextlib.closing(sent.open(options, TableForm())) as reader:
        batches = reader.batches(0, sent.sharding(8, False, options).share(Position(), 0, 1), [8])
        assert next(batches).num_rows == 8
        batches.close()


def test_rows_that_come_while_an_epoch_is_left_are_not_asked_for(
    world: None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is answered just before it would be cancelled, so the reader's thread starts the next one."""
    asked: list[Future[pa.RecordBatch]] = []

    class Request(Future[pa.RecordBatch]):
        def __init__(self, rows: pa.RecordBatch) -> None:
            super().__init__()
            self.rows = rows

        def cancel(self) -> bool:
            if self is not asked[2]:
                return super().cancel()
            self.set_result(self.rows)
            wait_until(lambda: len(asked) == 6)
            return False

    def submit(rows: pa.RecordBatch, draws: Sequence[int] | None) -> Future[pa.RecordBatch]:
        asked.append(Request(rows))
        if len(asked) <= 2:
            asked[-1].set_result(rows)
        return asked[-1]

    shard = DatasetShard("train", source_of(path, map_of(same)))
    monkeypatch.setattr(mapped, "opened", lambda *_: (submit, 2))
    loader = iter(shard.arrow_batches(2 * AT_ONCE))
    next(loader)
    wait_until(lambda: len(asked) == 5)
    del loader
    assert [each.cancelled() for each in asked] == [False, False, False, True, True, True]


def test_the_reader_is_closed_where_the_first_row_fails(
    world: None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(rows: pa.RecordBatch) -> None:
        raise OurError("bad")

    closed: list[ArrowReader[Any, Any]] = []
    close = ArrowReader.close
    monkeypatch.setattr(ArrowReader, "close", lambda self: (closed.append(self), close(self)))
    with pytest.raises(OurError):
        source_of(path, map_of(bad))
    assert len(closed) == 1


class Loaded:
    """A function that is falsy, and records when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 0

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        Path(self.folder, uuid.uuid4().hex).touch()


def test_a_feeder_loads_a_function_once(tmp_path: Path) -> None:
    with feeder_here(map_of(Loaded(str(tmp_path)))) as feeder:
        for _ in range(2):
            assert feeder.submit("train", BATCH, None, None).result(60).equals(BATCH)
    assert len(list(tmp_path.iterdir())) == 1


@contextlib.contextmanager
def unreachable(directory: Directory) -> Iterator[str]:
    """A feeder that the directory names, at an address without a listener."""
    with socket.socket() as holds:
        holds.bind(("127.0.0.1", 0))
        address = list(holds.getsockname())
        directory._feeders["gone"] = address, time.monotonic() + 600
        yield f"{address[0]}:{address[1]}"


@pytest.mark.parametrize("named", [True, False])
def test_feeders_out_of_reach_are_named(
    named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "_WARN_AFTER", 1.0)
    directory = Directory("127.0.0.1", "127.0.0.1", None, 1, 2.0)
    with contextlib.ExitStack() as closing:
        closing.callback(directory.close)
        wanted = f"the driver at 127.0.0.1:{directory.address.endpoint.port} has named none. Next: check whether"
        if named:
            wanted = f"none can be reached at {closing.enter_context(unreachable(directory))}. Next: open these ports"
        closing.callback(close_pools)
        ranks = pool.pool_of(directory.address)
        ranks.submit("train", BATCH, None, None).cancel()  # of an abandoned epoch
        with caplog.at_level(logging.WARNING), pytest.raises(DataError) as raised:
            ranks.submit("train", BATCH, None, None).result(60)
        assert wanted in str(raised.value)
        assert "(start_timeout=2)" in str(raised.value)
        assert len([each for each in caplog.messages if wanted in each]) == 1


def test_a_slow_function_is_not_taken_for_a_feeder_out_of_reach(tmp_path: Path) -> None:
    with feeder_here(map_of(functools.partial(held, str(tmp_path)))) as feeder:
        feeder.submit("train", BATCH.slice(0, 1), None, None).result(60)
        feeder._feed = replace(feeder._feed, start_timeout=0.2)
        more = [feeder.submit("train", BATCH, None, None) for _ in range(5)]  # some of which wait
        time.sleep(0.6)
        (tmp_path / "go").touch()
        assert all(each.result(60).equals(BATCH) for each in more)


def test_a_directory_that_cannot_listen_leaves_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(zmq.ZMQError) as raised:
        Directory("192.0.2.1", "192.0.2.1", None, 1, 60.0)
    assert len(os.listdir("/proc/self/fd")) == before
    assert raised.value.errno == errno.EADDRNOTAVAIL  # and its traceback keeps the directory until here


def test_a_function_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the function of data\['train'\] has 65 MiB .* at most 64. Let it load"):
        map_of(functools.partial(same, bytes(65 << 20)))
