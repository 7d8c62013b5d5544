"""From GPU settings, assignments and devices to findings: who gets which GPU, and who gets one twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from spark_hvd.runner.diagnosis.facts import HostFacts
from spark_hvd.runner.diagnosis.network import TaskNetwork
from spark_hvd.runner.diagnosis.report import Finding, Level, error, ok, warning
from spark_hvd.runner.diagnosis.spark_checks import SparkFacts

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
    """Whether every rank has a GPU of its own, where there are any.

    Args:
        spark: The application.
        hosts: The executors' hosts.
        tasks: Those of one barrier stage, with the GPUs that Spark assigned.
        backend: The run's.
        gpus_per_proc: The run's; None for what the settings give a task.
    """
    if not hosts:
        return
    devices = {host.key: _devices(host) for host in hosts}
    names = {host.key: host.name for host in hosts}
    configured = _EXECUTOR in spark.settings or _TASK in spark.settings
    asked = configured or gpus_per_proc or backend == "nccl"
    if not asked and not any(devices.values()):
        yield ok("GPUs", "none asked for and none found: ranks compute on the CPU, and Gloo carries")
        return
    yield from _check_settings(spark, gpus_per_proc)
    yield from _check_torch(hosts, devices, backend)
    shared_on_purpose = 0 < _number(spark.get(_TASK)) < 1
    if gpus_per_proc is None and not any(task.gpus for task in tasks):
        yield from _check_local_ranks(tasks, devices, names, backend)
    else:
        yield from _check_assigned(tasks, devices, shared_on_purpose)


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
            f"{_TASK}={task}: {int(1 / _number(task))} ranks share one GPU; NCCL refuses that, Gloo carries instead",
            f'--conf {_TASK}=1, or run(..., backend="gloo")',
        )
    elif executor or task:
        said = [f"{key}={spark.get(key)}" for key in (_EXECUTOR, _TASK, _SCRIPT) if spark.get(key)]
        yield ok("GPU settings", ", ".join(said))


def _check_torch(hosts: Sequence[HostFacts], devices: dict[str, list[str]], backend: str | None) -> Iterator[Finding]:
    blind = [host for host in hosts if not devices[host.key]]
    for host in blind:
        detail = host.packages["torch"].detail if "torch" in host.packages else {}
        if not detail:
            continue  # no torch at all is a finding of its own
        built = f"CUDA {detail['cuda']}" if detail.get("cuda") else "without CUDA"
        visible = f", CUDA_VISIBLE_DEVICES={host.visible_gpus!r}" if host.visible_gpus is not None else ""
        yield Finding(
            "CUDA",
            Level.ERROR if backend == "nccl" else Level.WARNING,
            f"torch on {host.name} sees no GPU (built {built}{visible}): ranks there compute on the CPU",
            "nvidia-smi   # does the driver see one there?" if detail.get("cuda") else _CUDA_TORCH,
        )
    if not blind:
        yield ok("CUDA", "; ".join(f"{host.name}: {', '.join(devices[host.key])}" for host in hosts))


def _check_local_ranks(
    tasks: Sequence[TaskNetwork], devices: dict[str, list[str]], names: dict[str, str], backend: str | None
) -> Iterator[Finding]:
    """Spark assigns none: rank i of a host takes GPU i there, and starts again at 0."""
    ranks: defaultdict[str, int] = defaultdict(int)
    for task in tasks:
        ranks[task.key] += 1
    crowded = {key: count for key, count in ranks.items() if 0 < len(devices.get(key, ())) < count}
    for key, count in crowded.items():
        yield Finding(
            "GPU assignment",
            Level.ERROR if backend == "nccl" else Level.WARNING,
            f"{count} ranks on {names[key]}, which has {len(devices[key])} GPU(s): several ranks would compute on one, "
            "which NCCL refuses; Gloo carries instead",
            f"--conf {_EXECUTOR}={len(devices[key])} --conf {_TASK}=1   # Spark then places no more ranks than GPUs\n"
            'run(..., backend="gloo")   # to share a GPU on purpose',
        )
    if ranks and not crowded:
        yield ok("GPU assignment", "Spark assigns none; each rank takes the GPU of its local rank")


def _check_assigned(
    tasks: Sequence[TaskNetwork], devices: dict[str, list[str]], shared_on_purpose: bool
) -> Iterator[Finding]:
    holders: defaultdict[tuple[str, str], list[TaskNetwork]] = defaultdict(list)
    for task in tasks:
        for gpu in task.gpus or ():
            holders[task.key, gpu].append(task)
    twice = {place: found for place, found in holders.items() if len(found) > 1}
    for (_, gpu), found in twice.items():
        yield Finding(
            "GPU assignment",
            Level.WARNING if shared_on_purpose else Level.ERROR,
            f"tasks {', '.join(str(task.partition) for task in found)} on {found[0].name} were all given GPU {gpu}",
            f"--conf {_TASK}=1, and one executor a host or a discoveryScript that gives each executor GPUs of its own",
        )
    for task in tasks:
        wrong = [gpu for gpu in task.gpus or () if gpu.isdigit() and int(gpu) >= max(len(devices.get(task.key, ())), 1)]
        if wrong and devices.get(task.key):
            yield error(
                "GPU assignment",
                f"task {task.partition} on {task.name} was given GPU {', '.join(wrong)}, but torch sees only "
                f"{len(devices[task.key])} there",
                f"Compare {_SCRIPT} with: nvidia-smi --query-gpu=index --format=csv,noheader",
            )
    if not twice and holders:
        listed = "; ".join(f"task {task.partition} on {task.name}: {', '.join(task.gpus or ())}" for task in tasks)
        yield ok("GPU assignment", f"no GPU twice ({listed[:300]})")


def _devices(host: HostFacts) -> list[str]:
    package = host.packages.get("torch")
    return [] if package is None else list(package.detail.get("devices", []))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
