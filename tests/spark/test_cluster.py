"""Runs on a cluster of two executor JVMs: layout, lost executors, killed workers, refusals."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil
import pytest

from spark_hvd.runner import ClusterError, ExecutorLostError, NotEnoughSlotsError, RankFailedError, run, warm_up
from spark_hvd.runner.outcome.rows import FailureKind
from spark_hvd.runner.spark import session as on_spark
from spark_hvd.runner.spark import slots
from tests.conftest import LOCAL_CLUSTER, ranks_alive, start_session, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_leaks"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def hvd() -> Any:
    import spark_hvd.torch

    return spark_hvd.torch


def reduce_one() -> float:
    import torch

    return float(hvd().allreduce(torch.ones(1), op=hvd().Sum))


def executors() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
                found.append(process)
    return found


def in_background(target: Any, *args: Any, **kwargs: Any) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def body() -> None:
        try:
            target(*args, **kwargs)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, errors


def test_ranks_run_on_both_executors(cluster: SparkSession) -> None:
    def fn() -> tuple[int, int, int, float]:
        return os.getppid(), hvd().local_rank(), hvd().local_size(), reduce_one()

    (first, *rest_0), (second, *rest_1) = run(fn, num_proc=2, spark=cluster)
    assert first != second, "one fork server an executor"
    assert (rest_0, rest_1) == ([0, 2, 2.0], [1, 2, 2.0]), "one host: local ranks are contiguous"


def test_warm_up_reaches_every_executor_and_runs_find_it_warm(cluster: SparkSession) -> None:
    assert warm_up(cluster).executors == 2
    servers = set(run(os.getppid, spark=cluster, verbose=0))
    assert len(servers) == 2
    again = warm_up(cluster, num_proc=2)
    assert (again.executors, again.hosts, again.ranks) == (2, 1, 2)
    assert set(run(os.getppid, spark=cluster, verbose=0)) == servers


def test_num_proc_defaults_to_the_slots(cluster: SparkSession) -> None:
    assert run(lambda: hvd().size(), spark=cluster) == [2, 2]


def test_ranks_have_the_gpus_that_spark_assigns(cluster: SparkSession) -> None:
    def fn() -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    assert sorted(run(fn, spark=cluster, gpus_per_proc=2)) == ["0,1", "2,3"]  # type: ignore[type-var]
    assert run(fn, num_proc=1, spark=cluster) == [None]
    with pytest.raises(ClusterError, match="a task needs 3 GPUs, and an executor has 2"):
        run(fn, num_proc=1, spark=cluster, gpus_per_proc=3)


def test_a_failing_rank_is_named_and_the_cluster_stays_usable(cluster: SparkSession) -> None:
    def fn() -> None:
        if hvd().rank() == 1:
            raise ValueError("bad batch")
        reduce_one()

    with pytest.raises(
        RankFailedError, match=r"rank 1 of 2 failed on host 127\.0\.0\.1: ValueError: bad batch"
    ) as caught:
        run(fn, num_proc=2, spark=cluster, verbose=0)
    assert sorted(failure.executor for failure in caught.value.failures) == ["0", "1"]
    assert f"Traceback of rank 1 (host 127.0.0.1, executor {caught.value.first.executor})" in str(caught.value)
    assert run(reduce_one, num_proc=2, spark=cluster) == [2.0, 2.0]


def test_too_few_slots_are_waited_for_a_moment_and_named_with_the_settings(
    cluster: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert slots._SETTLE <= 10
    monkeypatch.setattr(slots, "_SETTLE", 1.0)  # executors may be about to register
    started = time.monotonic()
    with pytest.raises(NotEnoughSlotsError, match=r"5 slots needed, 2 available .*spark\.executor\.instances"):
        run(lambda: 1, num_proc=5, spark=cluster)
    assert time.monotonic() - started > 1


DYNAMIC = r"spark\.dynamicAllocation\.enabled=false"


@pytest.mark.parametrize("asked_for", [{}, {"gpus_per_proc": 1}])
def test_dynamic_allocation_is_refused(
    cluster: SparkSession, monkeypatch: pytest.MonkeyPatch, asked_for: dict[str, int]
) -> None:
    asked = on_spark.conf
    changed = {"spark.dynamicAllocation.enabled": "true"}
    monkeypatch.setattr(on_spark, "conf", lambda session, key: changed.get(key) or asked(session, key))
    with pytest.raises(ClusterError, match=DYNAMIC):
        run(lambda: 1, num_proc=2, spark=cluster, **asked_for)


def count_and_wait(folder: str) -> None:
    rank = hvd().rank()
    with open(os.path.join(folder, f"ran-{rank}-{os.getpid()}"), "w"):
        pass
    reduce_one()
    time.sleep(60)


def test_a_killed_executor_is_an_error_and_fn_never_runs_twice(cluster: SparkSession, tmp_path: Any) -> None:
    thread, errors = in_background(run, count_and_wait, (str(tmp_path),), num_proc=2, spark=cluster, verbose=0)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
    os.kill(executors()[0].pid, signal.SIGKILL)
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(errors[0], ExecutorLostError)
    assert "fn does not run again" in str(errors[0])
    wait_until(lambda: not ranks_alive())
    time.sleep(3)  # long enough for a retried stage to have started
    assert len(list(tmp_path.iterdir())) == 2
    wait_until(lambda: len(executors()) == 2, 60)
    assert run(reduce_one, num_proc=2, spark=cluster) == [2.0, 2.0]


def test_a_killed_python_worker_takes_its_rank_along(cluster: SparkSession, tmp_path: Any) -> None:
    thread, errors = in_background(run, count_and_wait, (str(tmp_path),), num_proc=2, spark=cluster, verbose=0)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
    daemons = [child for executor in executors() for child in executor.children()]
    os.kill(next(daemon for daemon in daemons if daemon.children()).children()[0].pid, signal.SIGKILL)
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(errors[0], ExecutorLostError)
    wait_until(lambda: not ranks_alive())
    assert run(reduce_one, num_proc=2, spark=cluster) == [2.0, 2.0]


def test_a_killed_fork_server_fails_the_rank_and_the_next_run_has_a_new_one(
    cluster: SparkSession, tmp_path: Any
) -> None:
    thread, errors = in_background(run, count_and_wait, (str(tmp_path),), num_proc=2, spark=cluster, verbose=0)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
    server = ranks_alive()[0].parent()
    assert server is not None
    server.kill()
    thread.join(30)
    assert isinstance(errors[0], RankFailedError)
    assert errors[0].first.kind is FailureKind.SIGNAL
    assert run(reduce_one, num_proc=2, spark=cluster) == [2.0, 2.0]


def test_values_too_large_for_the_heap_come_all_the_same(cluster: SparkSession) -> None:
    values = run(lambda: bytes([hvd().rank()]) * 110_000_000, num_proc=2, spark=cluster, verbose=0)
    assert [(len(value), value[0], value[-1]) for value in values] == [(110_000_000, 0, 0), (110_000_000, 1, 1)]
    assert run(reduce_one, num_proc=2, spark=cluster) == [2.0, 2.0]


@pytest.mark.night  # by day with such a setting alone, above
def test_dynamic_allocation_is_refused_at_once() -> None:
    session = start_session(LOCAL_CLUSTER, **{"spark.dynamicAllocation.enabled": "true"})
    try:
        with pytest.raises(ClusterError, match=DYNAMIC):
            run(lambda: 1, num_proc=2, spark=session)
    finally:
        session.stop()
