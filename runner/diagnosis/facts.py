"""The facts about one machine that the doctor checks; the program :mod:`probe` collects them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_hvd.runner.diagnosis import probe

PROGRAM = Path(probe.__file__).read_text()
PACKAGES = ("spark_hvd", "numpy", "pyarrow", "cloudpickle", "zmq", "psutil", "fsspec", "pyspark", "mpi4py", "torch")


@dataclass(frozen=True)
class Package:
    """The result of an import: the package's version, or why it has none."""

    version: str | None = None
    error: str | None = None
    missing: bool = False
    """Whether the package is not installed, rather than broken."""
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Disk:
    """A directory: the total and free bytes of its file system, or why it cannot be used."""

    path: str
    total: int = 0
    free: int = 0
    error: str | None = None


@dataclass(frozen=True)
class StoreTrial:
    """The result of a host's trial of the store."""

    failed_step: str | None = None
    error: str | None = None
    shared: bool | None = None
    """Whether the host sees the file that the driver wrote; None if it did not look."""
    existed: bool | None = None
    """Whether the store existed before; None if unknown."""


@dataclass(frozen=True)
class HostFacts:
    """One machine, or one container, as seen from inside. Sizes are in bytes."""

    key: str
    """Identifies the machine, container or network namespace, whatever its name."""
    name: str
    python: str
    executable: str
    packages: dict[str, Package]
    cores: float
    memory: int
    memory_free: int
    shm: Disk
    disks: list[Disk]
    threads: str | None
    """OMP_NUM_THREADS."""
    open_files: int
    visible_gpus: str | None
    """CUDA_VISIBLE_DEVICES."""
    store: StoreTrial | None = None

    @classmethod
    def of(cls, answer: dict[str, Any]) -> HostFacts:
        """Parse an answer of the program."""
        shaped = {
            "packages": packages_of(answer),
            "shm": Disk(**answer["shm"]),
            "disks": [Disk(**each) for each in answer["disks"]],
            "store": StoreTrial(**answer["store"]) if "store" in answer else None,
        }
        return cls(**{**answer, **shaped})


def packages_of(answer: dict[str, Any]) -> dict[str, Package]:
    """Parse the packages in an answer of the program."""
    return {name: Package(**package) for name, package in answer["packages"].items()}
