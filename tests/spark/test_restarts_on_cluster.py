"""Restarts after an executor JVM was killed: the same final weights, fewer ranks, the limit."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil
import pytest

import spark_hvd.torch as hvd
from spark_hvd.runner import ExecutorLostError, NotEnoughSlotsError, RankFailedError, run
from tests.conftest import wait_until
from tests.contract.test_restarts import same
from tests.contract.test_restarts import train as train_steps
from tests.spark.test_cluster import executors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.usefixtures("no_leaks")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules[train_steps.__module__])
OPTIONS: dict[str, Any] = {"num_proc": 2, "verbose": 0}


def kill_executor() -> None:
    """Kill the executor's JVM, whose process id is an argument of this rank's fork server."""
    psutil.Process(int(psutil.Process().cmdline()[-2])).kill()
    time.sleep(60)  # until this process is ended, too


def train(folder: str, last: int) -> dict[str, Any]:
    """Like the function of run_local's tests; in starts before `last`, rank 1's executor is killed at step 3."""
    if hvd.generation() < last:
        before = hvd.checkpoint.save

        def save(where: str, state: dict[str, Any], step: int, **options: Any) -> Any:
            handle = before(where, state, step, **options)
            if hvd.rank() == 1 and step == 3:
                kill_executor()
            return handle

        hvd.checkpoint.save = save  # type: ignore[assignment]
    return train_steps(folder, {})


@pytest.fixture
def _all_executors(cluster: SparkSession) -> Iterator[None]:
    yield
    limit_executors(cluster, 2)
    wait_until(lambda: len(executors()) == 2 and slots(cluster) == 2, 60)


def limit_executors(session: SparkSession, number: int) -> None:
    """Have the cluster start no more executors than that."""
    context: Any = session.sparkContext._jsc.sc()
    nowhere = session.sparkContext._jvm.scala.Predef.Map().empty()  # type: ignore[union-attr]
    assert context.requestTotalExecutors(number, 0, nowhere)


def slots(session: SparkSession) -> int:
    context: Any = session.sparkContext._jsc.sc()
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().resourceProfileFromId(0)))


@pytest.mark.slow
@pytest.mark.usefixtures("_all_executors")
def test_a_lost_executor_is_survived_to_the_bit(
    cluster: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (whole, _) = run(train, (str(tmp_path / "whole"), 0), spark=cluster, **OPTIONS)
    again = run(train, (str(tmp_path / "again"), 1), spark=cluster, max_restarts=3, **OPTIONS)
    assert [(one["generation"], one["count"], one["size"]) for one in again] == [(1, "1", 2)] * 2
    assert all(2 <= one["first"] <= 3 for one in again)
    assert all(same(one, whole) for one in again)
    (record,) = [record for record in caplog.records if record.name == "spark_hvd.runner.launch.restart"]
    assert record.message.startswith("restart 1 of 3: Spark lost the executor of rank 1 on ")


@pytest.mark.night
@pytest.mark.usefixtures("_all_executors")
def test_it_goes_on_with_fewer_ranks_if_they_are_enough(
    cluster: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(hvd.rank, spark=cluster, **OPTIONS)  # on a busy machine, the first run on new executors is slow
    limit_executors(cluster, 1)  # does not end a running one
    options = {**OPTIONS, "max_restarts": 1, "start_timeout": 20.0, "spark": cluster}
    (alone,) = run(train, (str(tmp_path / "fewer"), 1), min_num_proc=1, **options)
    assert (alone["generation"], alone["size"]) == (1, 1)
    assert 2 <= alone["first"] <= 3
    assert "continuing with 1 of 2 ranks" in caplog.text
    limit_executors(cluster, 2)
    wait_until(lambda: len(executors()) == 2 and slots(cluster) == 2, 60)
    run(hvd.rank, spark=cluster, **OPTIONS)
    limit_executors(cluster, 1)
    with pytest.raises(NotEnoughSlotsError, match=r"1 of 2 ranks find a slot 20 s .*The loss: Spark lost") as caught:
        run(train, (str(tmp_path / "none"), 1), **options)
    assert isinstance(caught.value.__cause__, ExecutorLostError)


@pytest.mark.night
@pytest.mark.usefixtures("_all_executors")
def test_the_limit_and_what_is_not_restarted(cluster: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ExecutorLostError, match=r"This was after 1 restart \(max_restarts=1\)"):
        run(lambda: kill_executor() if hvd.rank() == 1 else hvd.barrier(), spark=cluster, max_restarts=1, **OPTIONS)

    def fails() -> None:
        open(os.path.join(str(tmp_path), f"{hvd.rank()}-{hvd.generation()}"), "w").close()
        hvd.barrier()
        raise ValueError("mine")

    wait_until(lambda: len(executors()) == 2 and slots(cluster) == 2, 60)
    with pytest.raises(RankFailedError, match="ValueError: mine"):
        run(fails, spark=cluster, max_restarts=3, **OPTIONS)
    assert sorted(os.listdir(tmp_path)) == ["0-0", "1-0"]


@pytest.mark.usefixtures("_all_executors")
@pytest.mark.night
def test_rows_come_again_after_an_executor_was_lost(cluster: SparkSession) -> None:
    def rows() -> list[int]:
        from spark_hvd.data.registry import source_of

        source = source_of("train")
        spool = source.open()
        if hvd.generation() == 0 and hvd.rank() == 1:
            kill_executor()
        hvd.barrier()
        tables = spool.tables([(bucket, 0, 0, int(spool.counts[bucket])) for bucket in source.buckets], None)
        return [each for table in tables for each in table.column("id").to_pylist()]

    some, others = run(rows, spark=cluster, data={"train": cluster.range(0, 1000, 1, 3)}, max_restarts=1, **OPTIONS)
    assert sorted(some + others) == list(range(1000))
    assert min(len(some), len(others)) > 400
