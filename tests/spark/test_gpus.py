"""GPUs and cores of ranks, as Spark schedules them; discovery scripts make up the GPUs."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil
import pytest

from spark_hvd.runner import ClusterError, NotEnoughSlotsError, RankFailedError, run
from spark_hvd.runner.outcome.rows import FailureKind
from spark_hvd.runner.spark.profiles import ResourceRequest, task_resources
from tests.conftest import LOCAL_CLUSTER, fake_gpus, start_session, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def seen() -> tuple[str | None, str | None]:
    import torch

    import spark_hvd.torch as hvd

    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == hvd.size()
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("OMP_NUM_THREADS")


@contextmanager
def session_on(master: str, **settings: str) -> Iterator[SparkSession]:
    session = start_session(master, **settings)
    try:
        yield session
    finally:
        session.stop()


# ---- local mode: Spark has cores only --------------------------------------------------------------------------------


def test_cores_in_local_mode(spark: SparkSession) -> None:
    assert run(seen, spark=spark, cpus_per_proc=2, gpus_per_proc=0) == [("", "2")], "one rank of two cores"
    with pytest.raises(
        NotEnoughSlotsError, match=r"cpus_per_proc=2: 2 slots needed, 1 available: 4 cores needed.*local\[4\]"
    ):
        run(seen, num_proc=2, spark=spark, cpus_per_proc=2)


def test_gpus_that_this_machine_lacks(spark: SparkSession) -> None:
    import torch

    many = torch.cuda.device_count() + 1
    with pytest.raises(
        RankFailedError, match=rf"gpus_per_proc={many}: 1 ranks on this host need {many} GPUs"
    ) as caught:
        run(seen, num_proc=1, spark=spark, gpus_per_proc=many, verbose=0)
    assert caught.value.first.kind is FailureKind.SETUP


# ---- local-cluster ---------------------------------------------------------------------------------------------------


@pytest.mark.night
def test_amounts_other_than_the_applications(tmp_path: Path) -> None:
    with session_on("local-cluster[2,2,1024]", **fake_gpus(tmp_path)) as session:
        ranks = run(seen, spark=session, gpus_per_proc=1)
        assert sorted(ranks) == [("0", "1"), ("1", "1"), ("2", "1"), ("3", "1")], "as many as there are GPUs"
        assert sorted(run(seen, spark=session, gpus_per_proc=2, cpus_per_proc=2)) == [("0,1", "2"), ("2,3", "2")]
        assert sorted(run(seen, spark=session, cpus_per_proc=2)) == [(None, "2")] * 2
        assert run(seen, num_proc=1, spark=session) == [(None, "1")], "nothing asked, nothing assigned"
        with pytest.raises(
            NotEnoughSlotsError, match=r"gpus_per_proc=2: 3 slots needed, 2 available: 6 GPUs needed, 4 available"
        ):
            run(seen, num_proc=3, spark=session, gpus_per_proc=2)
        with pytest.raises(ClusterError, match="a task needs 3 GPUs, and an executor has 2"):
            run(seen, num_proc=1, spark=session, gpus_per_proc=3)
        assert run(seen, num_proc=1, spark=session, cpus_per_proc=2) == [(None, "2")]
        # Spark keeps profiles forever, so the same request gets the same one.
        first, again = (task_resources(session, ResourceRequest(cpus_per_proc=2)).profile for _ in range(2))
        assert first is not None
        assert again is not None
        assert first.id == again.id
        assert task_resources(session, ResourceRequest(cpus_per_proc=2, gpus_per_proc=1)).profile.id != first.id


@pytest.mark.night  # by day: tests/unit/test_profiles.py, test_too_few_slots.py and test_gpus.py
def test_tasks_that_share_a_gpu(tmp_path: Path) -> None:
    settings = {**fake_gpus(tmp_path, each=1), "spark.task.resource.gpu.amount": "0.5"}
    with session_on("local-cluster[1,4,1024]", **settings) as session:
        assert run(seen, spark=session) == [("0", "1")] * 2, "two tasks a GPU, whatever cores there are"
        assert run(seen, spark=session, gpus_per_proc=1) == [("0", "1")]
        with pytest.raises(RankFailedError, match=r'backend="nccl": rank 0 on host .* has no GPU that torch can use'):
            run(seen, spark=session, backend="nccl", verbose=0)
        with pytest.raises(
            NotEnoughSlotsError, match=r"num_proc=3: 3 slots needed, 2 available: 1\.5 GPUs needed, 1 available"
        ):
            run(seen, num_proc=3, spark=session)


@pytest.mark.night  # by day: tests/unit/test_gpus.py; that such an error is one of the setup, above
def test_two_executors_that_report_the_same_gpu(tmp_path: Path) -> None:
    script = tmp_path / "same.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0"]}\'\n')
    script.chmod(0o755)
    settings = {
        "spark.worker.resource.gpu.amount": "1",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "1",
        "spark.task.resource.gpu.amount": "1",
    }
    with session_on(LOCAL_CLUSTER, **settings) as session:
        with pytest.raises(
            RankFailedError, match=r"ranks 0 and 1 on host .* were handed the same GPU 0 by Spark"
        ) as caught:
            run(seen, spark=session, verbose=0)
        assert caught.value.first.kind is FailureKind.SETUP
        assert run(seen, num_proc=1, spark=session) == [("0", "1")]


def of_its_own() -> tuple[Any, ...]:
    """Return a rank's variables, the number of GPUs that torch sees, its own GPU, and the live view's values."""
    from unittest import mock

    import torch
    from nvml_stub import board, chosen

    from spark_hvd.context.observe import observe

    variables, order = seen()[0], os.environ.get("CUDA_DEVICE_ORDER")
    with mock.patch.object(torch.cuda, "is_initialized", return_value=True):
        vitals = observe()
    assert vitals is not None
    there = torch.cuda.device_count()
    own = board(chosen[-1]) if there else None
    return variables, order, there, own, vitals.gpu_memory_bytes, vitals.gpu_utilization


BY_NUMBER = "PCI_BUS_ID"
ONE_EACH = [
    ("0", BY_NUMBER, 1, 0, 1000, 0.1),
    ("1", BY_NUMBER, 1, 1, 1000, 0.2),
    ("GPU-a1", None, 1, 2, 1000, 0.3),
    ("GPU-b2", None, 1, 3, 1000, 0.4),
    ("MIG-c", None, 1, 4, 1000, None),  # NVML reports nothing about slices
    ("MIG-d", None, 1, 4, 1000, None),
]
TWO_EACH = [
    ("0,1", BY_NUMBER, 2, 0, 1000, 0.1),
    ("GPU-a1,GPU-b2", None, 2, 2, 1000, 0.3),
    ("MIG-c,MIG-d", None, 1, 4, 1000, None),  # of several slices CUDA gives a process one
]
NONE_EACH = [("", None, 0, None, 0, None)]


@pytest.mark.slow
def test_every_rank_sees_its_own_gpus_and_nothing_else(tmp_path: Path) -> None:
    """Three executors with two GPUs each, with numbers, UUIDs or slices as addresses; stages have their own amounts."""
    script = tmp_path / "gpus.sh"
    listed = "\n".join(
        f"if mkdir {tmp_path}/worker-{number} 2>/dev/null; then\n"
        f'  echo \'{{"name": "gpu", "addresses": ["{first}", "{second}"]}}\'; exit\nfi'
        for number, (first, second) in enumerate([("0", "1"), ("GPU-a1", "GPU-b2"), ("MIG-c", "MIG-d")])
    )
    script.write_text(f"#!/bin/sh\n{listed}\n")
    script.chmod(0o755)
    settings = {
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "2",
        "spark.executorEnv.PYTHONPATH": str(Path(__file__).parent),
        "spark.executorEnv.SPARK_HVD_PRELOAD": "nvml_stub",
    }
    table: list[tuple[dict[str, Any], list[tuple[Any, ...]]]] = [
        ({"gpus_per_proc": 1}, ONE_EACH),  # two tasks of an executor
        ({"gpus_per_proc": 2}, TWO_EACH),
        ({"gpus_per_proc": 1, "procs_per_task": 2}, ONE_EACH),  # a task divides its GPUs among two ranks
        ({"gpus_per_proc": 0, "num_proc": 1}, NONE_EACH),
    ]
    with session_on("local-cluster[3,2,1024]", **settings) as session:
        for asked, expected in table:
            assert sorted(run(of_its_own, spark=session, verbose=0, **asked)) == expected, asked


@pytest.mark.night  # by day with such a setting alone: test_cluster.py
def test_dynamic_allocation_is_refused_with_amounts_too(tmp_path: Path) -> None:
    settings = {**fake_gpus(tmp_path), "spark.dynamicAllocation.enabled": "true"}
    with (
        session_on("local-cluster[1,1,1024]", **settings) as session,
        pytest.raises(ClusterError, match=r"spark\.dynamicAllocation\.enabled=false"),
    ):
        run(seen, num_proc=1, spark=session, gpus_per_proc=1)


# ---- standalone: a master and two workers, processes of their own ----------------------------------------------------


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[str]:
    """Return the master's address; each worker has two cores and two GPUs with UUIDs."""
    import pyspark

    home = Path(pyspark.__file__).parent
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    daemons = []

    def start(name: str, *command: str, **variables: str) -> None:
        env = {**os.environ, "SPARK_HOME": str(home), "SPARK_DAEMON_MEMORY": "256m", **variables}
        with (tmp_path / f"{name}.log").open("w") as log:
            program = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{command[0]}", *command[1:]]
            daemons.append(subprocess.Popen(program, env=env, stdout=log, stderr=subprocess.STDOUT))

    with ExitStack() as closing:
        closing.callback(end, daemons)
        address = f"spark://127.0.0.1:{port}"
        listen = ("--host", "127.0.0.1", "--webui-port", "0")
        no_rest = "-Dspark.master.rest.enabled=false"  # its port is fixed
        start("master", "master.Master", *listen, "--port", str(port), SPARK_MASTER_OPTS=no_rest)
        for number in range(2):
            script = tmp_path / f"gpus-{number}.sh"
            script.write_text(
                f'#!/bin/sh\necho \'{{"name": "gpu", "addresses": ["GPU-{number}a", "GPU-{number}b"]}}\'\n'
            )
            script.chmod(0o755)
            options = {"amount": "2", "discoveryScript": str(script)}
            start(
                f"worker-{number}",
                "worker.Worker",
                *(*listen, "-c", "2", "-m", "1g", "-d", str(tmp_path / f"work-{number}"), address),
                SPARK_WORKER_OPTS=" ".join(
                    f"-Dspark.worker.resource.gpu.{key}={value}" for key, value in options.items()
                ),
            )
        log = tmp_path / "master.log"
        wait_until(lambda: len(re.findall("Registering worker", log.read_text())) == 2, 100)
        yield address


def end(daemons: list[subprocess.Popen[bytes]]) -> None:
    for daemon in daemons:
        for process in [*psutil.Process(daemon.pid).children(recursive=True), daemon]:
            process.terminate()
    for daemon in daemons:
        daemon.wait(20)


@pytest.mark.night
def test_gpus_of_a_standalone_cluster(standalone: str) -> None:
    settings: dict[str, Any] = {"spark.executor.resource.gpu.amount": "2", "spark.executor.memory": "512m"}
    with session_on(standalone, **settings) as session:
        wait_until(lambda: session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() == 3, 100)
        every = ["GPU-0a", "GPU-0b", "GPU-1a", "GPU-1b"]
        assert sorted(run(seen, spark=session, gpus_per_proc=1)) == [(name, "1") for name in every]
        pairs = run(seen, spark=session, gpus_per_proc=2)
        assert sorted(pairs) == [("GPU-0a,GPU-0b", "1"), ("GPU-1a,GPU-1b", "1")]
        assert run(seen, num_proc=1, spark=session, gpus_per_proc=0) == [("", "1")]
        own = {"CUDA_VISIBLE_DEVICES": ""}  # takes precedence over Spark's: ranks choose among what remains
        with pytest.raises(RankFailedError, match="2 ranks on this host need 2 GPUs, but torch sees 0"):
            run(seen, num_proc=2, spark=session, gpus_per_proc=1, env=own, verbose=0)
