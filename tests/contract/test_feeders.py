"""Rows that feeders change: as many, in order, each once, whatever happens to a feeder. No Spark."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zmq

import spark_hvd.torch as hvd
from spark_hvd import DataError, run_local
from spark_hvd.data import Mapped
from spark_hvd.data.feeders import pool
from spark_hvd.data.feeders.directory import Directory
from spark_hvd.data.feeders.feeder import serve
from spark_hvd.data.feeders.mapping import MappedSpec, RowMap, apply
from spark_hvd.data.feeders.sockets import FeedAddress
from spark_hvd.data.mapped import mapped_source
from spark_hvd.data.shard import DatasetShard
from spark_hvd.data.source import parquet_source
from spark_hvd.engine.curve import Keys, url
from spark_hvd.runner.launch.data import run_data_of
from spark_hvd.runner.outcome.payload import dump_exception
from tests.conftest import wait_until
from tests.forked import fork

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS, AT_ONCE = 230, 7


def changed(rows: pa.RecordBatch) -> dict[str, Any]:
    ids = rows.column("id").to_numpy()
    return {"id": ids, "image": np.repeat(ids[:, None], 6, 1).reshape(-1, 2, 3) / 2, "text": [f"row {i}" for i in ids]}


def map_of(fn: Callable[..., Any], **options: Any) -> RowMap:
    table = pa.table({"id": [1]})
    return run_data_of({"train": Mapped(table, fn, rows_at_once=AT_ONCE, **options)}).maps["train"]


class Feeders:
    """Feeders of this host, each a process, and a directory like a driver's."""

    def __init__(self, row_map: RowMap, feeders: int) -> None:
        self._directory = Directory("127.0.0.1", "127.0.0.1", None, feeders, 60.0)
        self.address: FeedAddress = self._directory.address
        self._map, self.processes = row_map, [self.start(row_map) for _ in range(feeders)]

    def start(self, row_map: RowMap) -> ForkServerProcess:
        return fork(serve, self.address, uuid.uuid4().hex, "127.0.0.1", None, {"train": row_map}, dump_exception)

    def close(self) -> None:
        self._directory.end()
        for process in self.processes:
            process.join(20)
            assert process.exitcode in (0, -signal.SIGKILL)
        self._directory.close()


def close_pools() -> None:
    for _, each in pool._pools.values():
        each.close()
    pool._pools.clear()


@contextlib.contextmanager
def feeders_of(row_map: RowMap, number: int = 2) -> Iterator[Feeders]:
    feeders = Feeders(row_map, number)
    try:
        yield feeders
    finally:
        feeders.close()
        close_pools()


@pytest.fixture
def path(tmp_path: Path) -> str:
    table = pa.table({"id": range(ROWS), "more": [0.5] * ROWS})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=30)
    return str(tmp_path / "rows.parquet")


@pytest.fixture
def world() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def shard_of(path: str, row_map: RowMap, feed: FeedAddress | None) -> DatasetShard:
    return DatasetShard("train", mapped_source("train", parquet_source(path), MappedSpec(b"", row_map, feed)))


def test_batches_are_those_of_one_process(world: None, path: str) -> None:
    row_map = map_of(changed, columns=["id"])
    with feeders_of(row_map) as feeders:
        fed, here = (shard_of(path, row_map, feed) for feed in (feeders.address, None))
        raw = DatasetShard("train", parquet_source(path))
        assert fed.schema == here.schema
        assert fed.schema.names == ["id", "image", "text"]
        assert fed.rows == ROWS
        for options in ({"shuffle": True, "seed": 5}, {}, {"shuffle": True, "window_rows": 50, "drop_last": True}):
            loaders = [each.torch_batches(16, **options) for each in (fed, here)]
            ids = raw.arrow_batches(16, columns=["id"], **options)
            for _ in range(2):
                wanted = [batch.column("id").to_pylist() for batch in ids]
                for loader in loaders:
                    batches = list(loader)
                    assert [batch["id"].tolist() for batch in batches] == wanted
                    for batch in batches:
                        assert (batch["image"] == batch["id"][:, None, None] / 2).all()
                        assert batch["image"].shape[1:] == (2, 3)
                        assert batch["text"] == [f"row {i}" for i in batch["id"].tolist()]
        chosen = next(iter(fed.numpy_batches(4, columns=["text"])))
        assert {name: list(values) for name, values in chosen.items()} == {"text": [f"row {i}" for i in range(4)]}


def test_an_epoch_that_is_left_and_a_state_that_goes_on(world: None, path: str) -> None:
    row_map = map_of(changed)
    with feeders_of(row_map) as feeders:
        shard, raw = shard_of(path, row_map, feeders.address), DatasetShard("train", parquet_source(path))
        loader, ids = (each.arrow_batches(16, shuffle=True) for each in (shard, raw))
        epochs = [[batch.column("id").to_pylist() for batch in ids] for _ in range(3)]
        for number, batch in enumerate(loader):  # and more requests are under way
            assert batch.column("id").to_pylist() == epochs[0][number]
            if number == 2:
                break
        state = loader.state_dict()
        assert [batch.column("id").to_pylist() for batch in loader] == epochs[1]
        again = shard.arrow_batches(16, shuffle=True)
        again.load_state_dict(state)
        assert [batch.column("id").to_pylist() for batch in again] == epochs[0][3:]
        assert [batch.column("id").to_pylist() for batch in again] == epochs[1]


def held(folder: str, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows unchanged once there is a file "go", which the first rows need not wait for; record who waits."""
    if rows.num_rows > 1:
        Path(folder, f"pid-{os.getpid()}").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.01)
    return rows


def test_what_a_killed_feeder_had_others_do(world: None, path: str, tmp_path: Path) -> None:
    folder = tmp_path / "held"
    folder.mkdir()
    row_map = map_of(functools.partial(held, str(folder)))
    with feeders_of(row_map) as feeders:
        loader = iter(shard_of(path, row_map, feeders.address).torch_batches(16, shuffle=True))
        found: list[list[int]] = []
        reads = threading.Thread(target=lambda: found.extend(batch["id"].tolist() for batch in loader))
        reads.start()
        wait_until(lambda: len(list(folder.iterdir())) == 2)  # each has its requests, and processes one
        os.kill(feeders.processes[0].pid, signal.SIGKILL)
        feeders.processes[0].join()
        feeders.processes.append(feeders.start(row_map))  # like Spark
        (folder / "go").touch()
        reads.join(60)
        assert not reads.is_alive()
        raw = DatasetShard("train", parquet_source(path)).torch_batches(16, shuffle=True)
        assert found == [batch["id"].tolist() for batch in raw]


class OurError(Exception):
    pass


def fails(rows: pa.RecordBatch) -> dict[str, Any]:
    if 100 in rows.column("id").to_pylist():
        raise OurError("row 100 is bad")
    return changed(rows)


def test_an_error_of_the_function_is_raised_as_it_is(world: None, path: str) -> None:
    row_map = map_of(fails)
    with feeders_of(row_map) as feeders:
        loader = iter(shard_of(path, row_map, feeders.address).torch_batches(16))
        ids = [i for _ in range(6) for i in next(loader)["id"].tolist()]
        assert ids == list(range(96))  # earlier batches are yielded
        with pytest.raises(OurError, match="row 100 is bad") as raised:
            next(loader)
        assert 'raise OurError("row 100 is bad")' in str(raised.value.__cause__)


def counted(folder: str, rows: pa.RecordBatch) -> pa.RecordBatch:
    Path(folder, uuid.uuid4().hex).touch()
    return rows


def wait_for_no_change(folder: Path) -> None:
    """Wait until a feeder without a bound would have continued: ten checks in a row equal the first."""
    found, same = -1, 0
    while same < 10:
        time.sleep(0.05)
        now = len(list(folder.iterdir()))
        found, same = now, same + 1 if now == found else 0


def test_feeders_work_no_further_ahead_than_they_may(world: None, path: str, tmp_path: Path) -> None:
    folder = tmp_path / "counted"
    folder.mkdir()
    row_map = map_of(functools.partial(counted, str(folder)))
    with feeders_of(row_map, 1) as feeders:
        shard = shard_of(path, row_map, feeders.address)
        loader = iter(shard.torch_batches(AT_ONCE))
        next(loader)
        wait_until(lambda: len(list(folder.iterdir())) > 3)
        wait_for_no_change(folder)
        assert len(list(folder.iterdir())) <= 1 + 1 + pool.IN_FLIGHT + 3  # columns, consumed, in flight, read ahead


def drawn(rows: pa.RecordBatch, generator: np.random.Generator) -> dict[str, Any]:
    return {"id": rows.column("id"), "noise": generator.random(rows.num_rows)}


def test_what_a_function_draws_follows_from_seed_and_epoch(world: None, path: str) -> None:
    row_map = map_of(drawn, random=True)
    with feeders_of(row_map) as feeders:
        fed, here = (shard_of(path, row_map, feed).numpy_batches(50, seed=1) for feed in (feeders.address, None))
        first, second = (np.concatenate([batch["noise"] for batch in fed]) for _ in range(2))
        assert (np.concatenate([batch["noise"] for batch in here]) == first).all()
    assert len({*first, *second}) == 2 * ROWS


@pytest.mark.slow
def test_ranks_of_different_speed_share_feeders(path: str) -> None:
    def read(feed: FeedAddress, row_map: RowMap) -> list[list[list[int]]]:
        found: list[list[list[int]]] = []
        for shard in (
            shard_of(path, row_map, feed),
            hvd.get_dataset_shard("here"),
            DatasetShard("train", parquet_source(path)),
        ):
            loader = shard.torch_batches(8, shuffle=True, seed=2)
            found.append([])
            for _ in range(2):
                for batch in loader:
                    found[-1].append(batch["id"].tolist())
                    time.sleep(0.01 * hvd.rank())
        return found

    row_map = map_of(changed)
    with feeders_of(row_map) as feeders:
        results = run_local(read, (feeders.address, row_map), num_proc=2, data={"here": Mapped(path, changed)})
    for fed, here, raw in results:
        assert fed == here == raw
    ids = [i for fed, *_ in results for batch in fed for i in batch]
    assert sorted(ids) == sorted([*range(ROWS)] * 2)


def test_a_stranger_is_told_nothing() -> None:
    directory, context = Directory("127.0.0.1", "127.0.0.1", None, 1, 60.0), zmq.Context()
    try:
        other, server = Keys.of(b"another secret"), Keys.of(directory.address.secret)
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.curve_serverkey = server.server_public
            stranger.curve_publickey, stranger.curve_secretkey = other.member_public, other.member_secret
            events = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            endpoint = directory.address.endpoint
            stranger.connect(url(endpoint.host, endpoint.port))
            event = zmq.utils.monitor.recv_monitor_message(events)["event"]
            stranger.disable_monitor()
            events.close(0)
        assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    finally:
        context.destroy(linger=0)
        directory.close()


BATCH = pa.RecordBatch.from_pydict({"id": [1, 2, 3]})


@pytest.mark.parametrize(
    "made",
    [
        {"x": np.ones((3, 2), np.float32)},
        {"x": torch.ones(3, 2)},
        pa.table({"x": pa.array([[1.0, 1.0]] * 3, pa.list_(pa.float32()))}),
        pa.RecordBatch.from_pydict({"x": pa.array([[1.0, 1.0]] * 3, pa.list_(pa.float32()))}),
        pa.table({"x": pa.array([[1.0, 1.0]] * 3, pa.list_(pa.float32()))}).to_pandas(),
    ],
    ids=["numpy", "torch", "table", "batch", "pandas"],
)
def test_what_a_function_may_return(made: Any) -> None:
    found = apply(lambda rows: made, BATCH, None)
    assert found.column("x").to_pylist() == [[1.0, 1.0]] * 3


def test_a_masked_value_is_null() -> None:
    made = {"x": np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False])}
    assert apply(lambda rows: made, BATCH, None).column("x").to_pylist() == [1.0, None, 3.0]
    made = {"x": np.ma.array([[1], [2], [3]], mask=[[True], [False], [False]])}
    assert apply(lambda rows: made, BATCH, None).column("x").to_pylist() == [[None], [2], [3]]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"x": [1, 2]}, "returned 2 rows for 3: expected as many"),
        ([1, 2, 3], "returned a list: expected a dict of columns"),
        ({"y": [1, 2, 3]}, "returned no column 'x' but 'y'"),
        (
            {"x": torch.ones(3, dtype=torch.bfloat16)},
            "returned a Tensor as 'x', which Arrow cannot convert to a column: .*BFloat16",
        ),
        ({"x": torch.ones(3, requires_grad=True)}, "returned a Tensor as 'x', .*requires grad"),
        ({"x": np.ones(3, np.complex64)}, "returned a ndarray as 'x', .*numpy type"),
        ({"x": np.ones((3, 0))}, "returned a ndarray as 'x', .*list_size"),
        ({"x": [2**64, 1, 1]}, "returned a list as 'x', .*too large"),
        ({"x": 1}, "returned a int as 'x', .*not iterable"),
        ({1: [1, 2, 3]}, "returned a list as 1, .*names are of type str"),
    ],
)
def test_what_it_may_not(made: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        apply(lambda rows: made, BATCH, None, ["x"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fn": 3}, "fn=3: expected a function"),
        ({"columns": "id"}, r"expected a list of names, \['id'\]"),
        ({"columns": []}, r"columns=\[\]: expected at least one name, or None"),
        ({"rows_at_once": True}, "rows_at_once=True: expected a whole number of rows"),
        ({"rows_at_once": 0}, "rows_at_once=0: expected a whole number of rows, at least 1"),
        ({"rows": Mapped(BATCH, changed)}, "Mapped over Mapped: expected one function"),
    ],
)
def test_arguments_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Mapped(**{"rows": BATCH, "fn": changed, **options})
