"""``spark-hvd check-build``: lists the frameworks and transports, the Spark and the Java that this Python can use."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

import spark_hvd
from spark_hvd.runner.diagnosis.facts import PROGRAM, Package, packages_of
from spark_hvd.runner.diagnosis.probe import ask
from spark_hvd.runner.supervise.mpi.manager import MpiMissingError, find

_PACKAGES = ("torch", "lightning", "mpi4py", "pyspark", "pyarrow")
_SECONDS = 120.0


def check_build() -> str:
    """Return the text that ``spark-hvd check-build`` prints. Takes seconds, because it imports every package."""
    packages = packages_of(ask(PROGRAM, {"packages": _PACKAGES}, _SECONDS))
    return describe(packages, java_version(), process_managers(), petastorm())


def describe(
    packages: Mapping[str, Package], java: str | None, managers: Mapping[str, str], petastorm: str | None
) -> str:
    """Format the findings like ``horovodrun --check-build``."""
    torch, mpi = packages["torch"], packages["mpi4py"]
    library = " ".join(str(mpi.detail.get("library", "")).split())
    nccl = torch.detail.get("nccl_version") or ("built in, but no GPU here" if torch.detail.get("nccl") else None)
    sections = {
        "Frameworks": [_package("PyTorch", torch), _package("Lightning", packages["lightning"])],
        "Transports": [
            _line("Gloo", "" if torch.detail.get("gloo") else None, "comes with torch"),
            _line("NCCL", nccl, "comes with torch for CUDA"),
            _line("MPI", f"{library}, mpi4py {mpi.version}" if library else None, _why(mpi, "mpi4py mpich")),
            _line("MPI process manager", _listed(managers), "pip install mpich"),
        ],
        "Cluster and data": [
            _package("Spark", packages["pyspark"]),
            _line("Java", java, "Spark needs it: apt install openjdk-17-jre-headless"),
            _package("pyarrow", packages["pyarrow"]),
            _line("Petastorm", petastorm, "pip install 'petastorm<0.13' opencv-python-headless"),
        ],
    }
    lines = [f"spark_hvd {spark_hvd.__version__}, Python {sys.version.split()[0]} ({sys.executable})"]
    for title, entries in sections.items():
        lines += ["", f"{title}:", *entries]
    return "\n".join(lines)


def _listed(managers: Mapping[str, str]) -> str | None:
    return ", ".join(f"of {name} ({path})" for name, path in managers.items()) or None


def _package(title: str, package: Package) -> str:
    name = {"PyTorch": "torch", "Spark": "pyspark"}.get(title, title.lower())
    return _line(title, package.version, _why(package, name))


def _why(package: Package, install: str) -> str:
    return f"pip install {install}" if package.missing or package.error is None else package.error


def _line(title: str, version: str | None, remedy: str) -> str:
    if version is None:
        return f"    [ ] {title}: {remedy}"
    return f"    [X] {title} {version}".rstrip()


def java_version() -> str | None:
    """Return the version of the Java that Spark would start, or None."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None:
        return None
    try:
        result = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "([^"]+)"', result.stderr + result.stdout)
    return match[1] if match else None


def petastorm() -> str | None:
    """Return Petastorm's version without importing it: by itself it fails with a current pyarrow."""
    try:
        return importlib.metadata.version("petastorm")
    except importlib.metadata.PackageNotFoundError:
        return None


def process_managers() -> dict[str, str]:
    """Return the paths of the MPI process managers on this host, by name."""
    paths = {}
    for name, program in (("MPICH", "mpiexec.hydra"), ("Open MPI", "orted")):
        with contextlib.suppress(MpiMissingError):
            paths[name] = find(program, "")
    return paths
