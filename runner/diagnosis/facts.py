"""What one machine is like, as the doctor's checks see it; the program :mod:`probe` finds it out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_hvd.runner.diagnosis import probe

PROGRAM = Path(probe.__file__).read_text()
PACKAGES = ("spark_hvd", "numpy", "pyarrow", "cloudpickle", "zmq", "psutil", "fsspec", "pyspark", "mpi4py", "torch")


@dataclass(frozen=True)
class Package:
    """An import that was tried: its version, or why there is none."""

    version: str | None = None
    error: str | None = None
    missing: bool = False
    """Whether it is simply not installed."""
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Disk:
    """A directory: bytes in all and free, or why it cannot be used."""

    path: str
    total: int = 0
    free: int = 0
    error: str | None = None


@dataclass(frozen=True)
class StoreTrial:
    """How a host got on with the store."""

    failed_step: str | None = None
    error: str | None = None
    shared: bool | None = None
    """Whether it sees the file that the driver wrote; None if it did not look."""
    existed: bool | None = None
    """Whether the store was there before; None if that is not known."""


@dataclass(frozen=True)
class HostFacts:
    """One machine, or one container, as seen from inside. Sizes are in bytes."""

    key: str
    """Tells machines, containers and network namespaces apart, whatever they are called."""
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
        """Make facts of an answer of the program."""
        shaped = {
            "packages": packages_of(answer),
            "shm": Disk(**answer["shm"]),
            "disks": [Disk(**each) for each in answer["disks"]],
            "store": StoreTrial(**answer["store"]) if "store" in answer else None,
        }
        return cls(**{**answer, **shaped})


def packages_of(answer: dict[str, Any]) -> dict[str, Package]:
    """The packages of an answer of the program."""
    return {name: Package(**package) for name, package in answer["packages"].items()}
