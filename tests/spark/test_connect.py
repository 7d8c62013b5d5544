"""Over Spark Connect: this program is a client, and the cluster has two executors behind a separate server."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.estimators import TorchModel
from spark_hvd.runner import (
    ClusterError,
    Level,
    RankFailedError,
    Reporting,
    StartTimeoutError,
    doctor,
    run,
    run_elastic,
)
from spark_hvd.runner.launch import attempt as attempt_module
from tests.conftest import ranks_alive, wait_until
from tests.daemons import connect_server
from tests.doctor_cases import of
from tests.spark import estimator_support
from tests.spark.test_driver import cut_off

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_leaks")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(estimator_support)


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Start a client of a server that has the cluster of the other tests."""
    import pyspark

    if int(pyspark.__version__.partition(".")[0]) < 4:
        pytest.skip("PyPI's PySpark 3.5 has no Connect server")
    for package in ("grpc", "grpc_status", "google.rpc", "zstandard"):
        pytest.importorskip(package)
    from pyspark.sql import SparkSession

    settings = {"spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s"}  # and not 15 s after a lost executor
    folder = tmp_path_factory.mktemp("connect")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")  # PySpark sets it permanently
        with connect_server(Path(pyspark.__file__).parent, folder, settings) as address:
            session = SparkSession.builder.remote(address).create()
            yield session
            session.stop()


class Stream(io.StringIO):
    """Calls a function with everything written so far, at every write."""

    def __init__(self, seen: Callable[[str], None]) -> None:
        super().__init__()
        self._seen = seen

    def write(self, text: str) -> int:
        count = super().write(text)
        self._seen(self.getvalue())
        return count


def wait_for(path: Path) -> None:
    print("waiting", flush=True)
    while not path.exists():
        time.sleep(0.05)


@pytest.mark.night
def test_output_and_reports_come_while_ranks_run(connect: SparkSession, tmp_path: Path) -> None:
    def train() -> int:
        (progress := hvd.progress([1])).report(loss=1.0)
        wait_for(tmp_path / "seen")
        assert list(progress) == [1]
        return hvd.rank()

    def touch(text: str) -> None:
        if "[0] waiting" in text and "[1] waiting" in text:
            (tmp_path / "seen").touch()

    result = run(train, num_proc=2, spark=connect, reporting=Reporting(stdout=Stream(touch)), timeout=60)
    assert result == [0, 1]
    assert result.summary.metrics["loss"] == 1.0


def test_a_failing_rank_is_reported_and_the_others_are_stopped(connect: SparkSession) -> None:
    def fail() -> None:
        if hvd.rank() == 1:
            raise ValueError("bad batch")
        time.sleep(600)

    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed on host 127\.0\.0\.1: ValueError: bad batch"):
        run(fail, num_proc=2, spark=connect, verbose=0)


def test_a_run_takes_the_slots_that_the_server_has(connect: SparkSession) -> None:
    assert run(hvd.rank, spark=connect, verbose=0) == [0, 1]
    with pytest.raises(
        ClusterError, match=r"a server with spark\.executor\.cores=None\. Give the number of ranks: num_proc="
    ):
        run(hvd.rank, spark=connect, cpus_per_proc=2)
    connect.conf.set("spark.sql.leafNodeDefaultParallelism", 7)
    try:
        with pytest.raises(ClusterError, match=r"leafNodeDefaultParallelism=7\. Give the number of ranks: num_proc="):
            run(hvd.rank, spark=connect)
    finally:
        connect.conf.unset("spark.sql.leafNodeDefaultParallelism")


@pytest.mark.parametrize("rows", [0, 100])
def test_busy_slots_end_in_a_start_timeout(connect: SparkSession, rows: int) -> None:
    data = {"train": connect.range(0, rows, 1, 3)} if rows else None
    with pytest.raises(StartTimeoutError, match=r"0 of 3 ranks had started after start_timeout=3 s"):
        run(hvd.rank, num_proc=3, spark=connect, start_timeout=3, data=data)
    assert run(hvd.rank, num_proc=2, spark=connect, verbose=0) == [0, 1]


def test_an_interrupt_stops_the_ranks(connect: SparkSession, tmp_path: Path) -> None:
    def interrupt(text: str) -> None:
        if "waiting" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(wait_for, (tmp_path / "never",), num_proc=2, spark=connect, reporting=Reporting(stdout=Stream(interrupt)))
    assert not ranks_alive()
    assert run(hvd.rank, num_proc=2, spark=connect, verbose=0) == [0, 1]


@pytest.mark.parametrize("rows", [0, 100])
def test_a_client_that_executors_cannot_reach_says_so_and_can_be_interrupted(
    connect: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    data = {"train": connect.range(0, rows, 1, 3)} if rows else None
    monkeypatch.setattr(attempt_module, "task_of", cut_off(0, 1))
    monkeypatch.setattr(attempt_module, "_UNHEARD", 1.0)
    said = []

    class Interrupting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "ranks [0, 1] cannot reach this program at 127.0.0.1:" in record.getMessage():
                said.append(record)
                if len(said) == 2:
                    wait_until(lambda: len(list(tmp_path.glob("rank-*"))) == 2, 60)
                    raise KeyboardInterrupt
                (tmp_path / "go").touch()

    def train(rest: str) -> int:
        (tmp_path / f"rank-{hvd.rank()}").touch()
        wait_for(tmp_path / rest)
        (tmp_path / f"rank-{hvd.rank()}").unlink()
        return hvd.rank()

    handler = Interrupting()
    logging.getLogger("spark_hvd").addHandler(handler)
    try:
        assert run(train, ("go",), num_proc=2, spark=connect, data=data) == [0, 1]
        with pytest.raises(KeyboardInterrupt):
            run(train, ("never",), num_proc=2, spark=connect, data=data)
        wait_until(lambda: not ranks_alive())
    finally:
        logging.getLogger("spark_hvd").removeHandler(handler)


@pytest.mark.night
def test_a_lost_executor_is_survived(connect: SparkSession) -> None:
    def train() -> tuple[int, int]:
        if hvd.generation() == 0 and hvd.rank() == 1:
            psutil.Process(int(psutil.Process().cmdline()[-2])).kill()  # the executor's JVM
            time.sleep(60)
        return hvd.rank(), hvd.generation()

    assert run(train, num_proc=2, spark=connect, max_restarts=1, verbose=0) == [(0, 1), (1, 1)]


def test_rows_of_a_frame_come_to_the_ranks(connect: SparkSession) -> None:
    def rows() -> list[int]:
        from spark_hvd.data.registry import source_of

        source = source_of("train")
        spool = source.open()
        tables = spool.tables([(bucket, 0, 0, int(spool.counts[bucket])) for bucket in source.buckets], None)
        return [each for table in tables for each in table.column("id").to_pylist()]

    some, others = run(rows, num_proc=2, spark=connect, data={"train": connect.range(0, 1000, 1, 3)}, verbose=0)
    assert sorted(some + others) == list(range(1000))
    assert min(len(some), len(others)) > 400


@pytest.mark.night
def test_an_elastic_run_goes_on_without_an_executor_and_then_with_another(connect: SparkSession) -> None:
    def train() -> tuple[int, int]:
        state = hvd.elastic.ObjectState(step=0)

        @hvd.elastic.run
        def go(state: Any) -> tuple[int, int]:
            while hvd.size() < 2 or hvd.generation() == 0:
                hvd.allreduce(torch.ones(1), name="x")
                state.step += 1
                state.commit()
                if (hvd.rank(), hvd.generation(), state.step) == (1, 0, 3):
                    psutil.Process(int(psutil.Process().cmdline()[-2])).kill()
                    time.sleep(60)
                time.sleep(0.05)
            return hvd.rank(), hvd.size()

        return go(state)

    values = run_elastic(train, num_proc=2, min_num_proc=1, spark=connect, verbose=0)
    assert values == [(0, 2), (1, 2)]


def test_an_argument_that_is_too_large_for_a_message(connect: SparkSession) -> None:
    with pytest.raises(
        ClusterError, match=r"too large for Spark Connect: message larger than max \(14\d+ vs\. 13\d+\)"
    ):
        run(len, (os.urandom(140_000_000),), num_proc=2, spark=connect, verbose=0)


@pytest.mark.parametrize("store", ["store", None])
def test_an_estimator_fits_and_its_model_transforms_and_is_saved(
    connect: SparkSession, tmp_path: Path, store: str | None
) -> None:
    frame = estimator_support.frame(connect, partitions=2)
    model = estimator_support.estimator(store=store and str(tmp_path / store), validation="held").fit(frame)
    assert [row["epoch"] for row in model.getHistory()] == [1, 2]
    predictions = model.transform(frame).orderBy("row").toPandas()["prediction"]
    model.write().save(str(tmp_path / "model"))
    again = TorchModel.load(str(tmp_path / "model")).transform(frame).orderBy("row").toPandas()["prediction"]
    assert list(predictions) == list(again)


@pytest.mark.night
def test_the_doctor(connect: SparkSession) -> None:
    report = doctor(connect, num_proc=2)
    assert report.ok
    assert "all tasks reach 127.0.0.1:" in of("executor to driver", report.findings).found
    assert of("executor to driver", report.findings).level is Level.OK
    assert of("all-reduce", report.findings).found.startswith("2 ranks, tensors on cpu: ")
