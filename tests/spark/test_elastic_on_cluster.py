"""Elastic runs and the application they run in: its settings, its memory, executors that come as they are wanted."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
from pyspark.sql import SparkSession

from spark_hvd.runner import ClusterError, NotEnoughSlotsError, RankFailedError, run_elastic
from tests.conftest import LOCAL_CLUSTER, start_session
from tests.elastic_jobs import Job, train

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def returns_much() -> bytes:
    import spark_hvd.torch as hvd

    hvd.elastic.run(lambda state: None)(hvd.elastic.ObjectState())
    return bytes(300_000_000) if hvd.rank() == 0 else b""


@pytest.mark.slow
def test_a_value_too_large_for_the_heap_is_an_error_and_not_an_outage(cluster: SparkSession) -> None:
    with pytest.raises(RankFailedError, match=r"fn returned 2\d\d MiB; .* from each rank .*spark\.driver\.memory"):
        run_elastic(returns_much, num_proc=2, spark=cluster, verbose=0)
    results = run_elastic(train, [Job(epochs=1)], num_proc=2, spark=cluster)
    assert [result.size for result in results] == [2, 2]


def test_a_failure_names_its_executor(cluster: SparkSession) -> None:
    def fails() -> None:
        raise ValueError("bad batch")

    with pytest.raises(RankFailedError, match=r"Traceback of rank \d \(host \S+, executor [01]\)") as caught:
        run_elastic(fails, num_proc=2, spark=cluster, verbose=0)
    assert {failure.executor for failure in caught.value.failures} <= {"0", "1"}


def test_ranks_of_several_executors_of_a_host_count_its_ranks(cluster: SparkSession) -> None:
    def places() -> tuple[int, int, int]:
        import spark_hvd.torch as hvd

        hvd.elastic.run(lambda state: state.commit())(hvd.elastic.ObjectState())
        return hvd.rank(), hvd.local_rank(), hvd.local_size()

    assert run_elastic(places, num_proc=2, spark=cluster) == [(0, 0, 2), (1, 1, 2)]


def test_fewer_slots_than_the_minimum(cluster: SparkSession) -> None:
    with pytest.raises(NotEnoughSlotsError, match="num_proc=3: 3 slots wanted, 2 there"):
        run_elastic(train, [Job()], num_proc=4, min_num_proc=3, spark=cluster, start_timeout=1)


def test_more_tasks_than_slots_wait_and_are_let_go(cluster: SparkSession) -> None:
    results = run_elastic(train, [Job(epochs=1)], num_proc=2, max_num_proc=5, spark=cluster)
    assert [result.size for result in results] == [2, 2]


@pytest.mark.slow
@pytest.mark.timeout(240)
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


@pytest.mark.slow
def test_speculation_is_refused() -> None:
    session = start_session("local[2]", **{"spark.speculation": "true"})
    try:
        with pytest.raises(ClusterError, match=r"spark\.speculation=true"):
            run_elastic(train, [Job()], num_proc=2, spark=session)
    finally:
        session.stop()
