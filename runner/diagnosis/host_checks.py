"""Checks the hosts: Python and packages, memory and disks, clocks, the store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from spark_hvd.runner.diagnosis.facts import HostFacts, Package, StoreTrial
from spark_hvd.runner.diagnosis.report import Finding, Level, error, ok, warning
from spark_hvd.runner.watch import words
from spark_hvd.store.needs import to_install
from spark_hvd.world.words import count

_MIB = 1 << 20
_GIB = 1 << 30
_MIN_SHM = 512 * _MIB
_MIN_DISK = _GIB
_MIN_MEMORY = 512 * _MIB
"""Free memory per rank, in bytes; with less, a rank may be killed. Enough for torch and a small model."""
_MAX_CLOCK_OFFSET = 2.0

# Each of these must be installed. A different version is an error for spark_hvd, and a warning for the others.
_NEEDED = ("spark_hvd", "torch", "pyarrow", "numpy", "cloudpickle", "zmq", "psutil", "fsspec")
_INSTALL = {"zmq": "pyzmq"}


def check_python(driver: HostFacts, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Check that all hosts run one minor version of Python: others cannot load functions that cloudpickle pickled."""
    mismatched = [host for host in hosts if _minor(host.python) != _minor(driver.python)]
    for host in mismatched:
        yield error(
            "Python",
            f"Python {host.python} ({host.executable}) on {host.name}, {driver.python} on the driver: functions "
            "pickled by one minor version cannot be loaded by another",
            f"--conf spark.pyspark.python=/path/to/python{_minor(driver.python)}   # the same on every host",
        )
    if not mismatched:
        yield ok("Python", _by_value({host.name: f"{host.python} ({host.executable})" for host in hosts}))


def check_packages(driver: HostFacts, hosts: Sequence[HostFacts], backend: str | None) -> Iterator[Finding]:
    """Check that every host has the packages that ranks import, in the driver's versions."""
    failed = False
    needed = [*_NEEDED, "mpi4py"] if backend == "mpi" else [*_NEEDED]
    for name in needed:
        for host in hosts:
            here, there = driver.packages.get(name, Package()), host.packages.get(name, Package())
            if (finding := _compare(name, driver, here, host, there)) is not None:
                failed = True
                yield finding
        if driver.packages.get(name, Package()).version is None:
            failed = True
            yield Finding(
                "packages",
                Level.WARNING if name in ("torch", "mpi4py") else Level.ERROR,
                f"{name} cannot be imported on the driver ({driver.executable}): {_why(driver.packages.get(name))}",
                f"{driver.executable} -m pip install {_INSTALL.get(name, name)}",
            )
    if not failed:
        versions = {name: driver.packages[name].version for name in needed}
        yield ok("packages", ", ".join(f"{name} {version}" for name, version in versions.items()))
    yield from _check_mpi(driver, hosts, backend)


def _compare(name: str, driver: HostFacts, here: Package, host: HostFacts, there: Package) -> Finding | None:
    pip = f"{host.executable} -m pip install"
    if there.version is None:
        return error(
            "packages",
            f"{name} cannot be imported on {host.name} by {host.executable}: {_why(there)}",
            f"{pip} {_pinned(name, here.version)}   # on {host.name}",
        )
    if here.version is None or here.version == there.version:
        return None
    # The messages between ranks and driver belong to one version of spark_hvd; other differences are only suspicious.
    return Finding(
        "packages",
        Level.ERROR if name == "spark_hvd" else Level.WARNING,
        f"{name} {there.version} on {host.name}, {here.version} on the driver",
        f"{pip} {_pinned(name, here.version)}   # on {host.name}",
    )


def _check_mpi(driver: HostFacts, hosts: Sequence[HostFacts], backend: str | None) -> Iterator[Finding]:
    libraries = {
        host.name: host.packages["mpi4py"].detail["library"]
        for host in (driver, *hosts)
        if "mpi4py" in host.packages and "library" in host.packages["mpi4py"].detail
    }
    if len(set(libraries.values())) > 1:
        yield Finding(
            "MPI library",
            Level.ERROR if backend == "mpi" else Level.WARNING,
            f"hosts have different libraries, which cannot communicate with each other: {_by_value(libraries)}",
            f"pip install mpi4py=={driver.packages['mpi4py'].version} mpich   # on every host",
        )
    elif libraries:
        yield ok("MPI library", " ".join(next(iter(libraries.values())).split()))
    elif backend != "mpi":
        yield ok("MPI library", 'none (needed for backend="mpi" only: pip install mpi4py mpich)')


def check_resources(host: HostFacts, ranks: int, size: int) -> Iterator[Finding]:
    """Check that a host has room for its ranks. ``ranks`` is 0 for the driver, ``size`` is the number of all ranks."""
    ranks_text = "no rank" if not ranks else count(ranks, "rank")
    problems = list(_check_room(host, ranks, ranks_text, size))
    yield from problems
    if not problems:
        free = min((disk.free for disk in host.disks), default=0)
        yield ok(
            "resources",
            f"{host.name}: {host.cores:g} cores for {ranks_text}, memory {words.size(host.memory_free)} free, "
            f"/dev/shm {words.size(host.shm.free)} free, disk {words.size(free)} free, {host.open_files} open files",
        )


def _check_room(host: HostFacts, ranks: int, ranks_text: str, size: int) -> Iterator[Finding]:
    threads = int(host.threads) if host.threads and host.threads.isdigit() else 1
    if ranks * threads > max(host.cores, 1):
        yield warning(
            "cores",
            f"{ranks_text} with OMP_NUM_THREADS={threads} on {host.name}, which has {host.cores:g} cores: they "
            "slow each other down",
            f'run(..., env={{"OMP_NUM_THREADS": "{max(1, int(host.cores) // ranks)}"}})'
            if ranks <= host.cores
            else f"Fewer ranks on {host.name}: --conf spark.executor.cores={int(host.cores)}",
        )
    if ranks and host.memory_free / ranks < _MIN_MEMORY:
        yield warning(
            "memory",
            f"{words.size(host.memory_free)} free on {host.name} for {ranks_text}; torch alone takes 300 MB each",
            "Fewer ranks on a host, smaller executors (spark.executor.memory), or larger machines",
        )
    if ranks and host.shm.error is None and host.shm.free < _MIN_SHM:
        yield warning(
            "/dev/shm",
            f"{words.size(host.shm.free)} of {words.size(host.shm.total)} free on {host.name}: DataLoader workers and "
            'NCCL pass tensors through it, and die of "Bus error" when it is full',
            "docker run --shm-size=4g ...\n"
            "Kubernetes: volumes: [{name: shm, emptyDir: {medium: Memory}}], mounted at /dev/shm",
        )
    elif ranks and host.shm.error is not None:
        yield warning("/dev/shm", f"on {host.name}: {host.shm.error}", "mount -t tmpfs shm /dev/shm")
    for disk in host.disks:
        if disk.error is not None:
            yield error(
                "disk",
                f"{disk.path} on {host.name} cannot be written: {disk.error}",
                "TMPDIR=/a/writable/directory for executors (--conf spark.executorEnv.TMPDIR=...), or spark.local.dir",
            )
        elif disk.free < _MIN_DISK:
            yield warning(
                "disk",
                f"{words.size(disk.free)} of {words.size(disk.total)} free at {disk.path} on {host.name}",
                f"du -xhd1 {disk.path} | sort -h   # or another spark.local.dir",
            )
    needed = 256 + 16 * size  # sockets between ranks, and files of data readers
    if 0 < host.open_files < needed:
        yield warning(
            "open files",
            f"{host.open_files} at most on {host.name}; {size} ranks and their readers may need {needed}",
            "ulimit -n 65536   # where the executor is started",
        )


def check_clocks(ahead: Mapping[str, float]) -> Iterator[Finding]:
    """Check that the clocks agree; ``ahead`` says by how many seconds each host is ahead of the driver."""
    for name, offset in ahead.items():
        if abs(offset) > _MAX_CLOCK_OFFSET:
            yield warning(
                "clock",
                f"{name} is {abs(offset):.1f} s or more {'ahead of' if offset > 0 else 'behind'} the driver: times in "
                "logs and timelines do not match, and object stores reject signed requests beyond 15 minutes",
                f"chronyc makestep   # on {name}",
            )


def check_store(url: str, driver: StoreTrial, hosts: Mapping[str, StoreTrial]) -> Iterator[Finding]:
    """Check that the driver and all hosts (by name) can use the store, and that it is the same for all."""
    failed = False
    for place, trial in {"the driver": driver, **hosts}.items():
        if trial.failed_step is not None:
            failed = True
            yield error("store", f"{place} cannot {trial.failed_step} at {url}: {trial.error}", _store_remedy(url))
        elif trial.shared is False:
            failed = True
            yield error(
                "store",
                f"{place} does not see the file that the driver wrote to {url}: each has its own directory there",
                "Use a store that all hosts share: s3://, gs://, abfs://, hdfs://, or a path on NFS",
            )
    if not failed:
        yield ok("store", f"{url}: created, wrote, read, renamed and deleted a file on the driver and every host")


def _store_remedy(url: str) -> str:
    return to_install(url) or f"mkdir -p {url} && chmod a+rwx {url}   # on storage that all hosts share"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _why(package: Package | None) -> str:
    if package is None:
        return "not examined"
    return "it is not installed" if package.missing else str(package.error)


def _pinned(name: str, version: str | None) -> str:
    if name == "spark_hvd":  # on no package index: name the wheel that docs/quickstart.md builds
        return f"dist/spark_hvd-{version}-py3-none-any.whl"
    package = _INSTALL.get(name, name)
    return f"'{package}=={version.partition('+')[0]}'" if version and version != "unknown" else package


def _by_value(values: Mapping[str, str]) -> str:
    """List the values, each with the names that have it; without names if all have the same value."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in values.items():
        names[value].append(name)
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{value} on {', '.join(where)}" for value, where in names.items())
