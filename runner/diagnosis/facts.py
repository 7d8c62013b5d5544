"""What one machine is like, as the doctor sees it; runs on the driver and in Spark tasks.

The doctor sends the text of this file along, so that a host without spark_hvd, or with another version of it, can
still say what it has: standard library only, psutil where it is there. Nothing here raises for what it finds.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class HostFacts:
    """One machine, or one container, as seen from inside. Sizes are in bytes."""

    key: str
    """Tells machines, containers and network namespaces apart, whatever they are called."""
    name: str
    python: str
    executable: str
    system: str
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


def host_key() -> str:
    """The same in all processes of one machine or container, and another in each other one."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip()[:8])
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    return "/".join(parts)


def look(probe: str, local_dirs: list[str], store: dict[str, Any] | None = None, seconds: float = 60.0) -> HostFacts:
    """Gather the facts of this machine.

    Args:
        probe: Source text of the probe program.
        local_dirs: Directories besides the temporary one whose disks matter.
        store: Arguments of the probe's trial of the store.
        seconds: Time that imports, and the trial of the store, may take each.
    """
    memory, free = _memory()
    folders = list(dict.fromkeys([tempfile.gettempdir(), *(path for path in local_dirs if path)]))
    return HostFacts(
        key=host_key(),
        name=socket.gethostname(),
        python=platform.python_version(),
        executable=sys.executable,
        system=f"{platform.system()} {platform.machine()}",
        packages=packages(probe, PACKAGES, seconds),
        cores=_cores(),
        memory=memory,
        memory_free=free,
        shm=disk("/dev/shm"),
        disks=[disk(path) for path in folders],
        threads=os.environ.get("OMP_NUM_THREADS"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        store=None if store is None else try_store(probe, store, seconds),
    )


def facts_from_json(data: dict[str, Any]) -> HostFacts:
    """Rebuild facts from what ``dataclasses.asdict`` made of them."""
    data = dict(data)
    data["packages"] = {name: Package(**package) for name, package in data["packages"].items()}
    data["shm"] = Disk(**data["shm"])
    data["disks"] = [Disk(**each) for each in data["disks"]]
    data["store"] = None if data["store"] is None else StoreTrial(**data["store"])
    return HostFacts(**data)


class FirstOnHost:
    """A claim that one process of a machine can hold: the first one looks around, the others need not.

    It is a name in Linux's abstract socket namespace, so it goes with the process and leaves no file.
    """

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(f"\0{name}")
            self.held = True
        except OSError:
            self.held = False

    def release(self) -> None:
        """Give the claim up."""
        self._socket.close()


def packages(probe: str, names: tuple[str, ...], seconds: float) -> dict[str, Package]:
    """Import packages in a process of their own.

    Args:
        probe: Source text of the probe program.
        names: What to import, in this order.
        seconds: Time for all of them together.
    """
    found: dict[str, Package] = {}
    deadline = time.monotonic() + seconds
    while rest := [name for name in names if name not in found]:
        left = deadline - time.monotonic()
        if left <= 0:
            return found | {name: Package(error=f"not tried: the imports before took {seconds:.0f} s") for name in rest}
        lines, ending = _run_probe(probe, {"packages": rest}, left)
        begun = rest[0]
        for line in lines:
            if "begin" in line:
                begun = line["begin"]
            elif "name" in line:
                found[line["name"]] = Package(**{key: line[key] for key in line if key != "name"})
        if begun not in found:  # it died, or hung, in this one; the ones after it get another process
            found[begun] = Package(error=f"importing it {ending}")
    return found


def try_store(probe: str, arguments: dict[str, Any], seconds: float) -> StoreTrial:
    """Try the store in a process of its own: its libraries may hang on a network that is not there."""
    lines, ending = _run_probe(probe, {"store": arguments}, seconds)
    said: dict[str, Any] = {}
    for line in lines:
        said.update(line)
    if "step" not in said:
        return StoreTrial("answer", f"the attempt {ending}", existed=said.get("existed"))
    return StoreTrial(said["step"], said.get("error"), said.get("shared"), said.get("existed"))


def clean_store(probe: str, arguments: dict[str, Any], seconds: float) -> str | None:
    """Remove what trials of the store have left; returns what went wrong."""
    lines, ending = _run_probe(probe, {"clean": arguments}, seconds)
    return None if {"cleaned": True} in lines else ending


def _run_probe(probe: str, arguments: dict[str, Any], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """What the probe printed, and how it ended."""
    # -c looks into the working directory first, which others may write to.
    only_the_path = "import sys; sys.path = [entry for entry in sys.path if entry]\n"
    process = subprocess.Popen(
        [sys.executable, "-c", only_the_path + probe],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)},
        start_new_session=True,  # so that what it starts can be ended with it
    )
    try:
        out, err = process.communicate(json.dumps(arguments).encode(), timeout=seconds)
        code = process.returncode
        words = err.decode(errors="replace").strip().splitlines()
        ending = f"crashed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        ending += f": {words[-1]}" if code and words else ""
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        ending = f"took more than {seconds:.0f} s"
    lines = []
    for line in out.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):  # packages print what they like when they are imported
            value = json.loads(line)
            if isinstance(value, dict):
                lines.append(value)
    return lines, ending


def disk(path: str) -> Disk:
    """Size and free space of a directory's file system, and whether files can be written there."""
    try:
        usage = shutil.disk_usage(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return Disk(path, error=f"{type(error).__name__}: {error.strerror or error}")
    return Disk(path, usage.total, usage.free)


def _cores() -> float:
    """Cores that this process may use: the affinity mask and the container's quota, whichever is less."""
    # A driver elsewhere than on Linux has no affinity mask.
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as file:
        quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores


def _memory() -> tuple[int, int]:
    """Memory of the machine or container in bytes: in all, and available."""
    amounts = {"MemTotal": 0, "MemAvailable": 0}
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in amounts:
                amounts[name] = int(rest.split()[0]) << 10
    total, free = amounts["MemTotal"], amounts["MemAvailable"]
    with contextlib.suppress(OSError, ValueError):
        limit = int(_text("/sys/fs/cgroup/memory.max"))
        used = int(_text("/sys/fs/cgroup/memory.current"))
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return total, free


def _text(path: str) -> str:
    with open(path) as file:
        return file.read().strip()
