"""Checks GPU settings, devices and assignments: which rank gets which GPU, and whether two would get the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from spark_hvd.runner.diagnosis.facts import HostFacts
from spark_hvd.runner.diagnosis.network import TaskNetwork
from spark_hvd.runner.diagnosis.probe import machine_of
from spark_hvd.runner.diagnosis.report import Finding, Level, error, ok, warning
from spark_hvd.runner.diagnosis.spark_checks import SparkFacts
from spark_hvd.runner.rank.gpus import GpuError, GpuShare, RankGpus, choose_backend, devices_of, own_device

_TASK = "spark.task.resource.gpu.amount"
_EXECUTOR = "spark.executor.resource.gpu.amount"
_SCRIPT = "spark.executor.resource.gpu.discoveryScript"
_CUDA_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cu126   # on every executor"


def check_gpus(
    spark: SparkFacts,
    hosts: Sequence[HostFacts],
    tasks: Sequence[TaskNetwork],
    backend: str | None,
    gpus_per_proc: int | None,
) -> Iterator[Finding]:
    """Check that every rank has its own GPU, if there are any."""
    if not hosts:
        return
    devices = {host.key: _devices(host) for host in hosts}
    configured = _EXECUTOR in spark.settings or _TASK in spark.settings
    needs_gpus = configured or gpus_per_proc or backend == "nccl"
    if not needs_gpus and not any(devices.values()):
        yield ok("GPUs", "none asked for and none found: ranks compute on the CPU and communicate over Gloo")
        return
    yield from _check_settings(spark, gpus_per_proc)
    yield from _check_torch(hosts, devices, backend)
    yield from _check_peers(hosts, devices)
    yield from _check_assignment(spark, hosts, tasks, backend, gpus_per_proc)


def _check_settings(spark: SparkFacts, gpus_per_proc: int | None) -> Iterator[Finding]:
    executor, task = spark.get(_EXECUTOR), spark.get(_TASK)
    if executor and not task and not gpus_per_proc:
        yield warning(
            "GPU settings",
            f"{_EXECUTOR}={executor}, but {_TASK} is not set: Spark assigns no GPU to any task",
            f"--conf {_TASK}=1",
        )
    elif 0 < _number(task) < 1:
        yield warning(
            "GPU settings",
            f"{_TASK}={task}: {int(1 / _number(task))} ranks share one GPU; NCCL refuses that, so ranks use Gloo",
            f'--conf {_TASK}=1, or run(..., backend="gloo")',
        )
    elif executor or task:
        settings = [f"{key}={spark.get(key)}" for key in (_EXECUTOR, _TASK, _SCRIPT) if spark.get(key)]
        yield ok("GPU settings", ", ".join(settings))


def _check_torch(hosts: Sequence[HostFacts], devices: dict[str, list[str]], backend: str | None) -> Iterator[Finding]:
    without_gpus = [host for host in hosts if not devices[host.key]]
    for host in without_gpus:
        detail = host.packages["torch"].detail if "torch" in host.packages else {}
        if not detail:
            continue  # check_packages reports a missing torch
        built = f"CUDA {detail['cuda']}" if detail.get("cuda") else "without CUDA"
        visible = f", CUDA_VISIBLE_DEVICES={host.visible_gpus!r}" if host.visible_gpus is not None else ""
        why = detail.get("why") or ""
        remedy = "nvidia-smi   # does NVIDIA's driver see one there?" if detail.get("cuda") else _CUDA_TORCH
        yield Finding(
            "CUDA",
            Level.ERROR if backend == "nccl" else Level.WARNING,
            f"torch on {host.name} sees no GPU (built {built}{visible}): ranks there compute on the CPU"
            f"{why and f'. torch says: {why[:200]}'}",
            "Install a newer driver there, or a torch built for an older CUDA" if "too old" in why else remedy,
        )
    if not without_gpus:
        yield ok("CUDA", "; ".join(f"{host.name}: {', '.join(devices[host.key])}" for host in hosts))


def _check_peers(hosts: Sequence[HostFacts], devices: dict[str, list[str]]) -> Iterator[Finding]:
    """Check that NCCL can copy directly between the GPUs of a machine."""
    machines: dict[str, list[HostFacts]] = {}
    for host in hosts:
        if devices[host.key]:
            machines.setdefault(machine_of(host.key), []).append(host)
        no_access = host.packages["torch"].detail.get("no_peers") if devices[host.key] else None
        if no_access:
            one, other = no_access[0]
            yield warning(
                "GPU peers",
                f"{len(no_access)} pairs of GPUs on {host.name} have no peer access, {one} and {other} for one: NCCL "
                "copies between them through the host's memory",
                "nvidia-smi topo -p2p r   # shows all pairs; in virtual machines, ACS must be off",
            )
    for containers in (hosts for hosts in machines.values() if len(hosts) > 1):
        counts = ", ".join(f"{len(devices[host.key])} in {host.name}" for host in containers)
        yield warning(
            "GPU peers",
            f"{len(containers)} containers of one machine have GPUs of their own ({counts}): NCCL uses neither NVLink "
            "nor shared memory between containers",
            "One executor with all GPUs of the machine: spark.executor.resource.gpu.amount, spark.executor.cores",
        )


def _check_assignment(
    spark: SparkFacts,
    hosts: Sequence[HostFacts],
    tasks: Sequence[TaskNetwork],
    backend: str | None,
    gpus_per_proc: int | None,
) -> Iterator[Finding]:
    """Check how the ranks of a run would share the GPUs, and that each assigned GPU exists."""
    places, procs = {host.key: host for host in hosts}, spark.procs_per_task
    names = [host.name for host in hosts]
    tasks = [task for task in tasks if task.key in places]
    size, ranks = Counter(task.key for task in tasks for _ in range(procs)), list[RankGpus]()
    on_host: Counter[str] = Counter()
    for task in tasks:
        devices = _devices(places[task.key])
        unknown = [gpu for gpu in task.gpus or () if gpu.isdigit() and int(gpu) >= max(len(devices), 1)]
        if unknown and devices:
            yield error(
                "GPU assignment",
                f"task {task.partition} on {task.name} was assigned GPU {', '.join(unknown)}, but torch sees only "
                f"{len(devices)} there",
                f"Compare {_SCRIPT} with: nvidia-smi --query-gpu=index --format=csv,noheader",
            )
        try:
            for index in range(procs):
                assigned = devices_of(task.gpus, procs, index, places[task.key].visible_gpus, gpus_per_proc)
                share = GpuShare(assigned, gpus_per_proc)
                number = own_device(on_host[task.key], size[task.key], len(devices), share)
                physical = None if number is None else assigned[0] if assigned else str(number)
                ranks.append(RankGpus(task.name if names.count(task.name) == 1 else task.key, assigned, physical))
                on_host[task.key] += 1
        except GpuError as problem:
            yield error("GPU assignment", f"{task.name}: {problem}")
            return
    try:
        may_share = gpus_per_proc is None and 0 < _number(spark.get(_TASK)) < procs
        choice = choose_backend(ranks, backend, may_share)
    except GpuError as problem:
        yield error("GPU assignment", str(problem))
        return
    if choice.warning is not None:
        yield warning(
            "GPU assignment", choice.warning, f"--conf {_TASK}=1   # Spark then places no more ranks than GPUs"
        )
    elif any(task.gpus for task in tasks):
        listed = "; ".join(
            f"rank {number} on {rank.host}: {', '.join(rank.assigned or ())}" for number, rank in enumerate(ranks)
        )
        yield ok("GPU assignment", f"each GPU once ({listed[:300]})")
    elif any(rank.physical for rank in ranks):
        yield ok("GPU assignment", "Spark assigns none; each rank takes the GPU of its local rank")


def _devices(host: HostFacts) -> list[str]:
    package = host.packages.get("torch")
    return [] if package is None else list(package.detail.get("devices", []))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
