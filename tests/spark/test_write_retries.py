"""Tasks that write the store and fail half-way, or run twice at once: each row occurs once, and no file is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession

from spark_hvd.data.readers.dataset import DatasetMeta
from spark_hvd.estimators.data.columns import columns_of
from spark_hvd.estimators.data.materialize import materialize
from spark_hvd.store import Store
from tests.conftest import wait_until
from tests.spark.elastic_cluster import elastic_cluster

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 40_000
HALF = 50_000  # bytes; of some 100,000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two hosts, because Spark retries no task on the same one; it retries soon."""
    settings = {
        "spark.task.maxFailures": "2",
        "spark.speculation": "true",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.minTaskRuntime": "4s",
        "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[2]),
    }
    with elastic_cluster(tmp_path_factory.mktemp("cluster"), **settings) as cluster:
        cluster.provide(h2=1, h3=1)
        yield cluster.session


@dataclass(frozen=True)
class Faulty(Store):
    """A store on which the first attempt of the first partition fails."""

    fault: str = ""
    seen: str = ""

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        context = TaskContext.get()
        first = context is not None and (context.partitionId(), context.attemptNumber()) == (0, 0)
        with super().writing(path) as file:
            yield Failing(file, self) if first and "/part-" in path else file  # type: ignore[misc]
        if first and self.fault == "raises when it is done":
            fail(self)


def fail(store: Faulty) -> None:
    Path(store.seen).touch()
    if store.fault == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if store.fault.startswith("raises"):
        raise ConnectionResetError("injected")
    time.sleep(60 if store.fault == "hangs" else 6)


class Failing:
    """A file that fails half-way."""

    def __init__(self, file: BinaryIO, store: Faulty) -> None:
        self.file, self.store, self.failed = file, store, False

    def write(self, data: bytes) -> int:
        if not self.failed and self.file.tell() > HALF and self.store.fault != "raises when it is done":
            self.failed = True
            self.file.flush()
            fail(self.store)
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def ids_of(data: DatasetMeta) -> list[int]:
    groups = [pq.ParquetFile(group.file).read_row_group(group.index)["id"] for group in data.row_groups]
    return sorted(pa.chunked_array([chunk for group in groups for chunk in group.chunks]).to_pylist())


FAULTS = [
    *(pytest.param(fault, marks=pytest.mark.night) for fault in ("raises", "hangs", "is slow")),
    "raises when it is done",
    "is killed",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_row_is_there_once(session: SparkSession, tmp_path: Path, fault: str) -> None:
    seen, root = tmp_path / "seen", tmp_path / "store"
    store = Faulty(str(root), fault=fault, seen=str(seen))
    df = session.range(ROWS, numPartitions=2).selectExpr("id", "cast(id as float) value")
    columns = columns_of(df.schema, df.columns)
    train, held = materialize(df, columns, store, num_proc=2, validation=0.4)
    assert held is not None
    assert seen.exists()
    assert sorted(ids_of(train) + ids_of(held)) == list(range(ROWS))
    files = {group.file for group in (*train.row_groups, *held.row_groups)}
    assert len(files) == 4
    # including files of an attempt that runs on for a while
    wait_until(lambda: {str(path) for path in root.rglob("*part-*")} == files, 120)


def test_rows_that_fail_to_come(session: SparkSession, tmp_path: Path) -> None:
    def half(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        for number, batch in enumerate(batches):
            if number == 1 and context.attemptNumber() == 0:
                raise ConnectionResetError("injected")
            yield batch

    store = Store.create(tmp_path)
    df = session.range(ROWS, numPartitions=2).mapInArrow(half, "id long")
    data, _ = materialize(df, columns_of(df.schema, ["id"]), store, num_proc=2)
    assert ids_of(data) == list(range(ROWS))
    files = {group.file for group in data.row_groups}
    wait_until(
        lambda: {str(path) for path in tmp_path.rglob("*part-*")} == files, 120
    )  # a speculative copy may still run
