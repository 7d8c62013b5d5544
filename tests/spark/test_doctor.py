"""The doctor on real applications: one healthy one, and some broken ones."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import spark_hvd
from spark_hvd.runner import ClusterError, Level, doctor
from spark_hvd.runner.spark import session as on_spark
from tests.conftest import LOCAL_CLUSTER, daemon_of, start_session
from tests.doctor_cases import of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.timeout(300)]


@pytest.mark.slow
def test_an_application_that_is_well(spark: SparkSession, tmp_path: Path) -> None:
    report = spark_hvd.doctor(
        spark, num_proc=2, store=str(tmp_path / "store"), network=spark_hvd.Network(ports="42000-42999")
    )
    # this machine may lack resources; nothing else may be found
    scarce = {"memory", "disk", "/dev/shm", "cores", "open files"}
    assert [f for f in report.findings if f.level is not Level.OK and f.check not in scarce] == []
    assert report.ok
    found = report.findings
    assert "2 available, 2 needed" in of("slots", found).found
    assert "all tasks reach 127.0.0.1:42" in of("executor to driver", found).found
    assert "1 connection between 1 host on ports 42000-42999" in of("rank to rank", found).found
    assert of("all-reduce", found).found.startswith("2 ranks, tensors on cpu: the sum is correct")
    assert "on the CPU" in of("GPUs", found).found
    assert "renamed and deleted" in of("store", found).found
    assert not (tmp_path / "store").exists()


@pytest.mark.slow  # by day: tests/unit/test_doctor_*.py
def test_errors_are_collected_and_named(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zmq", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a shadow of it')")
    monkeypatch.setitem(spark.sparkContext.environment, "PYTHONPATH", str(tmp_path))
    (tmp_path / "file").write_text("")
    with daemon_of(spark, "pyspark.daemon"):  # imports nothing that is shadowed
        report = doctor(spark, num_proc=5, store=str(tmp_path / "file" / "store"))
    assert not report.ok
    errors = {(finding.check, finding.found.split(" ")[0]): finding for finding in report.errors}
    assert errors.keys() == {("slots", "num_proc=5:"), ("packages", "zmq"), ("packages", "torch"), ("store", "the")}
    assert 'master("local[5]")' in errors["slots", "num_proc=5:"].remedy
    assert "ImportError: a shadow of it" in errors["packages", "torch"].found
    assert "-m pip install" in errors["packages", "torch"].remedy
    assert "the driver cannot create a directory" in errors["store", "the"].found
    assert of("network", report.findings).level is Level.WARNING, "not tried, since no rank could start"


@pytest.mark.slow
def test_a_driver_whose_address_is_in_brackets(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    real = on_spark.conf
    changed = {"spark.driver.host": "[::1]", "spark.driver.bindAddress": None}
    monkeypatch.setattr(on_spark, "conf", lambda session, key: changed.get(key, real(session, key)))
    findings = doctor(spark, 2).findings
    assert "all tasks reach ::1:" in of("executor to driver", findings).found


def test_wrong_arguments_are_refused(spark: SparkSession) -> None:
    with pytest.raises(ValueError, match="backend='x'"):
        doctor(spark, 2, backend="x")
    with pytest.raises(ValueError, match="ports="):
        doctor(spark, 2, network=spark_hvd.Network(ports="high"))


@pytest.mark.night
def test_two_executors(cluster: SparkSession, tmp_path: Path) -> None:
    report = doctor(cluster, store=str(tmp_path), backend="mpi")
    assert report.ok, str(report)
    assert "2 available" in of("slots", report.findings).found
    assert "over mpi" in of("all-reduce", report.findings).found
    assert "all ranks together may return" in of("return values", report.findings).found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.night
def test_executors_with_another_torch_and_one_gpu_for_two(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace as S\n"
        "__version__ = '1.9.0'\n"
        "version, distributed = S(cuda='11.1'), S(is_available=lambda: False)\n"
        "nccl = S(version=lambda: (2, 7, 8))\n"
        "cuda = S(is_available=lambda: True, device_count=lambda: 1, get_device_name=lambda i: 'GPU', nccl=nccl)\n"
    )
    script = tmp_path / "gpus.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0"]}\'\n')
    script.chmod(0o755)
    session = start_session(
        LOCAL_CLUSTER,
        **{
            "spark.executorEnv.PYTHONPATH": f"{tmp_path}:{ROOT}",
            "spark.worker.resource.gpu.amount": "1",
            "spark.worker.resource.gpu.discoveryScript": str(script),
            "spark.executor.resource.gpu.amount": "1",
            "spark.task.resource.gpu.amount": "1",
        },
    )
    try:
        report = doctor(session, 2)
        packages = of("packages", report.findings)
        assert packages.level is Level.WARNING
        assert packages.found.startswith("torch 1.9.0 on ")
        assert packages.remedy.split()[0].endswith("python")
        shared = of("GPU assignment", report.findings)
        assert shared.level is Level.ERROR, "two workers on one machine, each with the same GPU"
        assert "were handed the same GPU 0" in shared.found
    finally:
        session.stop()
    report = doctor(session, 2)  # it answers nothing any more
    assert [(finding.check, finding.level) for finding in report.findings] == [("settings", Level.ERROR)]
    assert "this check crashed" in report.findings[0].found


@pytest.mark.night
def test_dynamic_allocation() -> None:
    session = start_session(LOCAL_CLUSTER, **{"spark.dynamicAllocation.enabled": "true"})
    try:
        report = doctor(session, 2)
        assert [finding.check for finding in report.errors] == ["dynamic allocation"]
        assert of("packages", report.findings).level is Level.OK, "facts need no barrier"
        assert "not tried" in of("network", report.findings).found
    finally:
        session.stop()


@pytest.mark.slow
def test_without_a_session() -> None:
    from pyspark.sql import SparkSession

    if (active := SparkSession.getActiveSession()) is not None:
        active.stop()
    with pytest.raises(ClusterError, match="no active Spark session"):
        doctor(num_proc=2)
