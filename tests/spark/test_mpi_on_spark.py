"""MPI in barrier tasks: one proxy for several tasks of a host, several ranks in a task, a lost executor."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

from spark_hvd.runner import ExecutorLostError, Network, run
from tests.conftest import wait_until
from tests.contract.test_mpi_runs import check_worlds, managers, world
from tests.spark.test_cluster import executors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["tests.contract.test_mpi_runs"])


def test_a_rank_in_each_task(spark: SparkSession) -> None:
    check_worlds(run(world, num_proc=2, spark=spark, backend="mpi"), "MPICH")
    wait_until(lambda: not managers())


@pytest.mark.slow
def test_several_ranks_in_each_task(spark: SparkSession) -> None:
    check_worlds(
        run(world, num_proc=4, spark=spark, backend="mpi", procs_per_task=2, network=Network(ports="23000-23200")),
        "MPICH",
    )


@pytest.mark.night
def test_an_executor_lost_while_mpi_runs(cluster: SparkSession, tmp_path: Path) -> None:
    def stuck(folder: str) -> None:
        from mpi4py import MPI

        import spark_hvd.torch as hvd

        (Path(folder) / str(hvd.rank())).touch()
        if hvd.rank() == 0:
            MPI.COMM_WORLD.Barrier()
        time.sleep(300)

    errors: list[BaseException] = []

    def go() -> None:
        try:
            run(stuck, [str(tmp_path)], num_proc=2, spark=cluster, backend="mpi")
        except BaseException as error:
            errors.append(error)

    runner = threading.Thread(target=go)
    runner.start()
    wait_until(lambda: errors or len(list(tmp_path.iterdir())) == 2, 100.0)
    assert not errors, errors
    killed = time.monotonic()
    executors()[0].kill()  # a rank runs on each
    runner.join(60)
    assert not runner.is_alive()
    assert time.monotonic() - killed < 60
    assert isinstance(errors[0], ExecutorLostError), errors
    wait_until(lambda: not managers())
    # The application continues: Spark starts another executor.
    wait_until(lambda: len(executors()) == 2, 60.0)
    result: list[Any] = run(world, num_proc=2, spark=cluster, backend="mpi")
    check_worlds(result, "MPICH")
