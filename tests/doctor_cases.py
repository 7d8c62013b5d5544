"""Facts about a healthy application; each test of the doctor's checks changes one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from spark_hvd.runner.diagnosis.facts import Disk, HostFacts, Package
from spark_hvd.runner.diagnosis.network import TaskNetwork
from spark_hvd.runner.diagnosis.report import Finding, Level
from spark_hvd.runner.diagnosis.spark_checks import SparkFacts

GIB = 1 << 30
TORCH = {"cuda": None, "cuda_available": False, "devices": [], "gloo": True, "nccl": False, "nccl_version": None}


def host(name: str = "a", **changes: Any) -> HostFacts:
    versions = {"spark_hvd": "0.1.0", "numpy": "2.1.0", "pyarrow": "18.0.0", "cloudpickle": "3.1.2", "zmq": "27.0.0"}
    packages = {package: Package(version) for package, version in versions.items()}
    packages |= {name: Package("1.0") for name in ("psutil", "fsspec")}
    packages["torch"] = Package("2.5.0+cpu", detail=dict(TORCH))
    packages["mpi4py"] = Package("4.1.0", detail={"library": "MPICH Version:      4.3.0"})
    facts = HostFacts(
        key=f"key-{name}",
        name=name,
        python="3.11.7",
        executable="/opt/python",
        packages=packages,
        cores=4.0,
        memory=16 * GIB,
        memory_free=8 * GIB,
        shm=Disk("/dev/shm", 8 * GIB, 8 * GIB),
        disks=[Disk("/tmp", 100 * GIB, 50 * GIB)],
        threads="1",
        open_files=65536,
        visible_gpus=None,
    )
    return replace(facts, **changes)


def with_package(facts: HostFacts, name: str, package: Package) -> HostFacts:
    return replace(facts, packages={**facts.packages, name: package})


def with_gpus(facts: HostFacts, count: int, built: str | None = "12.6") -> HostFacts:
    detail = {**TORCH, "cuda": built, "devices": ["NVIDIA H200"] * count, "nccl": True}
    return with_package(facts, "torch", Package("2.5.0", detail=detail))


def application(master: str = "yarn", **changes: Any) -> SparkFacts:
    settings = {"spark.master": master, "spark.executor.cores": "1", **changes.pop("settings", {})}
    facts = SparkFacts(
        version="4.0.0",
        pyspark=("4.0.1", "/opt/pyspark"),
        installed=("pyspark 4.0.1",),
        master=master,
        local=master.startswith("local["),
        connect=False,
        slots=4,
        asked=4,
        lacking="",
        procs_per_task=1,
        task_cpus=int(settings.get("spark.task.cpus", "1")),
        busy=0,
        result_bytes=GIB,
        settings=settings,
    )
    return replace(facts, **changes)


def task(partition: int, key: str = "a", **changes: Any) -> TaskNetwork:
    facts = TaskNetwork(partition, f"key-{key}", key, f"10.0.0.{partition}", 40000 + partition, reaches_driver=True)
    return replace(facts, **changes)


def of(check: str, findings: Iterable[Finding]) -> Finding:
    """Return the only finding of a check."""
    (found,) = [finding for finding in findings if finding.check == check]
    return found


def levels(findings: Iterable[Finding]) -> set[Level]:
    return {finding.level for finding in findings}
