"""What a session's first run waits for: who starts the process from which ranks are forked, and ``warm_up``."""

from __future__ import annotations

import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil
import pytest

import spark_hvd
from spark_hvd.estimators import SparkBackend
from spark_hvd.runner import NotEnoughSlotsError
from spark_hvd.runner.config import PRELOAD
from spark_hvd.runner.supervise import processes
from tests.conftest import fork_servers, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def server() -> int:
    """Return, in a rank, the process from which it was forked."""
    return os.getppid()


def servers() -> set[int]:
    return {each.pid for each in fork_servers()}


def only_for(test: str) -> dict[str, str]:
    """Return a change to the environment for which no other run has a fork server."""
    return {PRELOAD: f"no_module_of_{test}_{os.getpid()}"}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fork servers be programs that this one starts, and not forks of the tests' own."""
    monkeypatch.setattr(processes, "_start", inspect.unwrap(processes._start))


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("run", [spark_hvd.run, spark_hvd.run_elastic])
def test_on_a_local_master_this_program_starts_the_one_process_that_ranks_are_forked_from(
    spark: SparkSession, run: Any
) -> None:
    before, env = servers(), only_for(run.__name__)
    (one,) = set(run(server, num_proc=2, spark=spark, env=env, verbose=0))
    assert psutil.Process(one).ppid() == os.getpid()
    assert servers() - before == {one}
    assert set(run(server, num_proc=2, spark=spark, env=env, verbose=0)) == {one}


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_a_run_whose_libraries_load_otherwise_has_one_of_its_own(spark: SparkSession) -> None:
    before, env = servers(), {"OMP_NUM_THREADS": "3", **only_for("otherwise")}
    (one,) = set(spark_hvd.run(server, num_proc=2, spark=spark, env=env, verbose=0))
    assert psutil.Process(one).ppid() == os.getpid()
    assert servers() - before == {one}


def test_a_fit_has_it_started_before_it_looks_at_the_data(spark: SparkSession) -> None:
    before, env = servers(), only_for("fit")
    backend = SparkBackend(2, spark=spark, env=env, verbose=0)
    with backend.torch_loading():
        (one,) = wait_until(lambda: servers() - before)
        assert set(backend.run(server)) == {one}


def test_it_is_started_for_no_run_that_cannot_be(spark: SparkSession) -> None:
    before = servers()
    with pytest.raises(NotEnoughSlotsError):
        spark_hvd.run(server, num_proc=3, spark=spark, env=only_for("nothing"))
    assert servers() == before


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_a_changed_path_is_none_of_the_workers_and_where_spark_is_silent_a_task_starts_it(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")  # differs from that of the JVM, whose workers do not have it
    (one,) = set(spark_hvd.run(server, num_proc=2, spark=spark, env=only_for("path"), verbose=0))
    assert psutil.Process(one).ppid() == os.getpid()
    with monkeypatch.context() as patched:
        patched.setattr("spark_hvd.runner.spark.private.local_workers", lambda spark: 1 / 0)
        (one,) = set(spark_hvd.run(server, num_proc=2, spark=spark, env=only_for("silence"), verbose=0))
    assert psutil.Process(one).ppid() != os.getpid()


def test_warm_up_says_what_is_warm_and_does_it_once(spark: SparkSession) -> None:
    env = only_for("warm_up")
    first = spark_hvd.warm_up(spark, env=env)
    assert (first.executors, first.hosts, first.ranks) == (1, 1, 2)
    assert str(first).startswith("1 executor on 1 host is warm: 2 ranks had started, met and ended after ")
    there = servers()
    again = spark_hvd.warm_up(spark, num_proc=1, env=env)
    assert (again.executors, again.ranks) == (1, 1)
    assert set(spark_hvd.run(server, num_proc=2, spark=spark, env=env, verbose=0)) <= there == servers()


def test_warm_up_refuses_what_it_cannot_do(spark: SparkSession) -> None:
    with pytest.raises(ValueError, match=r"OMP_NUM_THREADS.*expected only SPARK_HVD_PRELOAD"):
        spark_hvd.warm_up(spark, env={"OMP_NUM_THREADS": "2"})
    with pytest.raises(NotEnoughSlotsError, match="3 slots needed, 2 available"):
        spark_hvd.warm_up(spark, num_proc=3)
    with pytest.raises(ValueError, match="num_proc=0: expected a whole number of ranks, at least 1"):
        spark_hvd.warm_up(spark, num_proc=0)
