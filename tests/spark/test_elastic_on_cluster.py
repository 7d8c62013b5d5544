"""Elastic runs and their application: its settings, its memory, executors that start on demand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from pyspark.ml.functions import array_to_vector
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_hvd.runner import ClusterError, NotEnoughSlotsError, RankFailedError, run_elastic
from spark_hvd.testing import FaultPlan
from tests.conftest import LOCAL_CLUSTER, start_session
from tests.elastic_jobs import Job, train

pytestmark = pytest.mark.slow

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def returns_much() -> bytes:
    import spark_hvd.torch as hvd

    hvd.elastic.run(lambda state: None)(hvd.elastic.ObjectState())
    return bytes(300_000_000) if hvd.rank() == 0 else b""


@pytest.mark.night
def test_a_value_too_large_for_the_heap_comes_all_the_same(cluster: SparkSession) -> None:
    values = run_elastic(returns_much, num_proc=2, spark=cluster, verbose=0)
    assert [len(value) for value in values] == [300_000_000, 0]
    results = run_elastic(train, [Job(epochs=1)], num_proc=2, spark=cluster)
    assert [result.size for result in results] == [2, 2]


def test_a_failure_names_its_executor(cluster: SparkSession) -> None:
    def fails() -> None:
        raise ValueError("bad batch")

    with pytest.raises(RankFailedError, match=r"Traceback of rank \d \(host \S+, executor \d+\)") as caught:
        run_elastic(fails, num_proc=2, spark=cluster, verbose=0)
    assert all(failure.executor.isdigit() for failure in caught.value.failures)  # earlier tests may have lost executors


def rows_of(faults: FaultPlan) -> tuple[list[int], list[str], int]:
    """Return the numbers that ranks saw up to the last commit, the columns, and the number of the world."""
    import spark_hvd.torch as hvd

    shard = hvd.get_dataset_shard("train")
    loader = shard.torch_batches(50, shuffle=True)

    @hvd.elastic.run
    def loop(state: Any) -> list[int]:
        for batch in state.loader:
            faults.at(len(state.seen))
            assert batch["a.vector"].shape[1] == 2
            assert batch["text"] == [str(number) for number in batch["id"].tolist()]
            state.seen = [*state.seen, hvd.allgather_object(batch["id"].tolist())]
            state.commit()
        return [number for step in state.seen for part in step for number in part]

    rows = loop(hvd.elastic.TorchState(loader=loader, seen=[]))
    return rows, shard.schema.names, hvd.generation()


def test_rows_of_a_data_frame_that_a_lost_rank_had_come_again(cluster: SparkSession, tmp_path: Path) -> None:
    numbers = cluster.range(0, 400, 1, 3).select("id", F.col("id").cast("string").alias("text"))
    frame = numbers.withColumn("a.vector", array_to_vector(F.array(F.rand(), F.lit(1.0))))
    with pytest.raises(ValueError, match=r"data\['train'\] has its rows in Spark .* Expected data_store="):
        run_elastic(rows_of, (FaultPlan(),), num_proc=2, spark=cluster, data={"train": frame})
    faults = FaultPlan().kill(rank=1, step=2)
    options = {"spark": cluster, "data": {"train": frame}, "data_store": str(tmp_path)}
    for rows, columns, generation in run_elastic(rows_of, (faults,), num_proc=2, **options):
        assert sorted(rows) == list(range(400))
        assert columns == ["id", "text", "a.vector"]
        assert generation == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file() or "run_data" in path.name]


def test_ranks_of_several_executors_of_a_host_count_its_ranks(cluster: SparkSession) -> None:
    def places() -> tuple[int, int, int]:
        import spark_hvd.torch as hvd

        hvd.elastic.run(lambda state: state.commit())(hvd.elastic.ObjectState())
        return hvd.rank(), hvd.local_rank(), hvd.local_size()

    assert run_elastic(places, num_proc=2, spark=cluster) == [(0, 0, 2), (1, 1, 2)]


def test_fewer_slots_than_the_minimum(cluster: SparkSession) -> None:
    with pytest.raises(NotEnoughSlotsError, match="num_proc=3: 3 slots needed, 2 available"):
        run_elastic(train, [Job()], num_proc=4, min_num_proc=3, spark=cluster, start_timeout=1)


def test_more_tasks_than_slots_wait_and_are_let_go(cluster: SparkSession) -> None:
    results = run_elastic(train, [Job(epochs=1)], num_proc=2, max_num_proc=5, spark=cluster)
    assert [result.size for result in results] == [2, 2]


def test_executors_come_as_ranks_want_them() -> None:
    settings = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.initialExecutors": "1",
    }
    session = start_session(LOCAL_CLUSTER, **settings)
    try:
        results = run_elastic(train, [Job(epochs=1)], num_proc=2, spark=session)
    finally:
        session.stop()
    assert [result.size for result in results] == [2, 2]


def test_speculation_is_refused() -> None:
    session = start_session("local[2]", **{"spark.speculation": "true"})
    try:
        with pytest.raises(ClusterError, match=r"spark\.speculation=true"):
            run_elastic(train, [Job()], num_proc=2, spark=session)
    finally:
        session.stop()
