"""Each finding about hosts: Python, packages, room, names, clocks, the store."""

from __future__ import annotations

from typing import Any

import pytest

from spark_hvd.runner.diagnosis.facts import Disk, Package, StoreTrial
from spark_hvd.runner.diagnosis.host_checks import (
    check_clocks,
    check_packages,
    check_python,
    check_resources,
    check_store,
)
from spark_hvd.runner.diagnosis.report import Level
from tests.doctor_cases import GIB, host, levels, of, with_package


def test_hosts_that_are_alike() -> None:
    driver, hosts = host("driver"), [host("a"), host("b")]
    found = [*check_python(driver, hosts), *check_packages(driver, hosts, "mpi")]
    assert levels(found) == {Level.OK}
    assert of("Python", found).found == "3.11.7 (/opt/python)", "said once where all have the same"
    assert of("MPI library", found).found == "MPICH Version: 4.3.0"


def test_another_minor_version_of_python() -> None:
    finding = of("Python", check_python(host("driver"), [host("a"), host("b", python="3.10.2")]))
    assert finding.level is Level.ERROR
    assert "Python 3.10.2 (/opt/python) on b, 3.11.7 on the driver" in finding.found
    assert "/path/to/python3.11" in finding.remedy
    assert of("Python", check_python(host("driver"), [host("a", python="3.11.1")])).level is Level.OK


@pytest.mark.parametrize(
    ("name", "package", "level", "part"),
    [
        ("torch", Package("1.9"), Level.WARNING, "torch 1.9 on b, 2.5.0+cpu on the driver"),
        ("spark_hvd", Package("0.0.9"), Level.ERROR, "spark_hvd 0.0.9 on b, 0.1.0 on the driver"),
        ("zmq", Package(error="ModuleNotFoundError: x", missing=True), Level.ERROR, "on b by /opt/python: it is not"),
        ("torch", Package(error="importing it crashed (SIGSEGV)"), Level.ERROR, "importing it crashed (SIGSEGV)"),
    ],
)
def test_a_package_that_differs_names_its_host(name: str, package: Package, level: Level, part: str) -> None:
    finding = of("packages", check_packages(host("driver"), [host("a"), with_package(host("b"), name, package)], None))
    assert finding.level is level
    assert part in finding.found
    assert "-m pip install" in finding.remedy
    assert finding.remedy.endswith("# on b")
    assert "+cpu" not in finding.remedy, "the index has no such version"


def test_mpi4py_is_needed_for_mpi_only() -> None:
    lacking = with_package(host("a"), "mpi4py", Package(error="x", missing=True))
    driver = with_package(host("driver"), "mpi4py", Package(error="x", missing=True))
    assert levels(check_packages(driver, [lacking], None)) == {Level.OK}
    assert Level.ERROR in levels(check_packages(driver, [lacking], "mpi"))


def test_two_mpi_libraries() -> None:
    other = with_package(host("b"), "mpi4py", Package("4.1.0", detail={"library": "Open MPI v5.0.1"}))
    finding = of("MPI library", check_packages(host("driver"), [host("a"), other], "mpi"))
    assert finding.level is Level.ERROR
    assert "Open MPI v5.0.1 on b" in finding.found
    assert of("MPI library", check_packages(host("driver"), [other], None)).level is Level.WARNING


@pytest.mark.parametrize(
    ("check", "changes", "level", "part", "remedy"),
    [
        ("cores", {"cores": 1.0}, Level.WARNING, "2 ranks with OMP_NUM_THREADS=1 on a", "executor.cores=1"),
        ("cores", {"threads": "4"}, Level.WARNING, "OMP_NUM_THREADS=4", '{"OMP_NUM_THREADS": "2"}'),
        ("memory", {"memory_free": GIB // 2}, Level.WARNING, "512 MiB free on a for 2 ranks", "Fewer ranks"),
        ("/dev/shm", {"shm": Disk("/dev/shm", 64 << 20, 60 << 20)}, Level.WARNING, "60 MiB of 64 MiB", "--shm-size=4g"),
        ("/dev/shm", {"shm": Disk("/dev/shm", error="gone")}, Level.WARNING, "on a: gone", "mount -t tmpfs"),
        ("disk", {"disks": [Disk("/tmp", GIB, GIB // 4)]}, Level.WARNING, "256 MiB of 1.0 GiB free at /tmp", "du -x"),
        ("disk", {"disks": [Disk("/x", error="Read-only")]}, Level.ERROR, "/x on a cannot be written", "TMPDIR="),
        ("open files", {"open_files": 64}, Level.WARNING, "64 at most on a", "ulimit -n"),
    ],
)  # fmt: skip
def test_too_little_of_something(check: str, changes: dict[str, Any], level: Level, part: str, remedy: str) -> None:
    (finding,) = check_resources(host("a", **changes), 2, 2)
    assert (finding.check, finding.level) == (check, level)
    assert part in finding.found
    assert remedy in finding.remedy


def test_enough_of_everything() -> None:
    (finding,) = check_resources(host("a"), 2, 2)
    assert finding.level is Level.OK
    assert finding.found.startswith("a: 4 cores for 2 ranks, memory 8.0 GiB free")


def test_clocks() -> None:
    finding = of("clock", check_clocks({"a": 0.001, "b": 7.0}))
    assert finding.level is Level.WARNING
    assert finding.found.startswith("b is 7.0 s or more ahead of the driver")
    assert "chronyc makestep" in finding.remedy
    assert not list(check_clocks({"a": 0.001}))


def test_a_store_that_one_host_cannot_use() -> None:
    trials = {"a": StoreTrial(shared=True), "b": StoreTrial("write", "PermissionError: denied")}
    finding = of("store", check_store("s3://bucket/x", StoreTrial(), trials))
    assert finding.level is Level.ERROR
    assert finding.found == "b cannot write at s3://bucket/x: PermissionError: denied"
    assert "pip install s3fs" in finding.remedy


def test_a_store_that_is_not_the_same_for_all() -> None:
    finding = of("store", check_store("/data", StoreTrial(), {"b": StoreTrial(shared=False)}))
    assert finding.level is Level.ERROR
    assert "b does not see the file that the driver wrote" in finding.found
    assert of("store", check_store("/data", StoreTrial(), {"b": StoreTrial(shared=True)})).level is Level.OK
