"""The GPUs of a rank, and checks of the GPUs of all ranks: pure functions of what Spark and the ranks report.

Spark gives a task addresses from its discovery script: with the usual script, nvidia-smi's numbers of the host's GPUs,
or UUIDs. An executor with CUDA_VISIBLE_DEVICES may use only the GPUs listed there. An address that is an entry of the
list means that entry; otherwise it is a position in the list, as for CUDA and for PySpark's TorchDistributor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations


class GpuError(ValueError):
    """The GPUs that Spark assigned, or that a host has, do not match what the run needs."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """Which GPUs a rank gets.

    Attributes:
        assigned: CUDA_VISIBLE_DEVICES of this rank; None if the rank chooses by its local rank.
        per_proc: The run's ``gpus_per_proc``.
        may_share: Whether several ranks may use one GPU.
    """

    assigned: Sequence[str] | None = None
    per_proc: int | None = None
    may_share: bool = False


@dataclass(frozen=True, slots=True)
class RankGpus:
    """A rank's report of its GPUs to the others.

    Attributes:
        host: Its host.
        assigned: As in :class:`GpuShare`.
        physical: Identity of its current device on that host; None if torch sees no GPU.
    """

    host: str
    assigned: Sequence[str] | None
    physical: str | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend for the ranks' GPUs, and a warning for rank 0 to log."""

    backend: str | None
    warning: str | None = None


def devices_of(
    assigned: Sequence[str] | None,
    procs_per_task: int,
    local_index: int,
    visible: str | None,
    gpus_per_proc: int | None,
) -> tuple[str, ...] | None:
    """Return the GPUs of one rank of a task, as CUDA_VISIBLE_DEVICES names them; the first is its current device.

    Args:
        assigned: Addresses that Spark gave the task; None if Spark assigns no GPUs.
        procs_per_task: Number of ranks in the task, which divide its GPUs; the first rank gets the first ones.
        local_index: Number of this rank among them, from 0.
        visible: The executor's CUDA_VISIBLE_DEVICES; None if it is not set.
        gpus_per_proc: GPUs per rank, 0 for none; None for equal shares.

    Returns:
        Names of GPUs, empty if the rank must see none. None if nothing was assigned: the rank then chooses by its local
        rank among the visible ones.

    Raises:
        GpuError: The executor may not use an assigned GPU, or too few were assigned.
    """
    if gpus_per_proc == 0:
        return ()
    if assigned is None:
        return None
    devices = _visible_names(assigned, visible)
    if gpus_per_proc is not None and len(devices) < gpus_per_proc * procs_per_task:
        raise GpuError(
            f"gpus_per_proc={gpus_per_proc}: {procs_per_task} ranks of a task need "
            f"{gpus_per_proc * procs_per_task} GPUs, but Spark assigned {len(devices)} ({', '.join(devices)})."
        )
    if len(devices) < procs_per_task:
        return tuple(devices[local_index * len(devices) // procs_per_task :][:1])
    each = gpus_per_proc or len(devices) // procs_per_task
    return tuple(devices[local_index * each : (local_index + 1) * each])


def gpu_env(devices: Sequence[str] | None, executor: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for a rank with these GPUs. Settings of the executor are kept."""
    ours = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}  # otherwise TensorFlow takes all memory from torch and NCCL
    if devices and all(device.isdigit() for device in devices) and "CUDA_VISIBLE_DEVICES" not in executor:
        ours["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # Spark's numbers are nvidia-smi's; CUDA's default order differs
    ours = {name: value for name, value in ours.items() if name not in executor}
    return ours if devices is None else ours | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


def _visible_names(assigned: Sequence[str], visible: str | None) -> list[str]:
    if visible is None:
        return list(assigned)
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    # CUDA_VISIBLE_DEVICES may contain shortened UUIDs.
    names = [next((entry for entry in entries if _same(entry, address)), None) for address in assigned]
    if None not in names:
        return [name for name in names if name is not None]
    if all(address.isdigit() and int(address) < len(entries) for address in assigned):
        return [entries[int(address)] for address in assigned]
    if entries and all(entry.isdigit() for entry in entries) != all(address.isdigit() for address in assigned):
        return list(assigned)  # numbers cannot be compared with UUIDs
    raise GpuError(
        f"Spark assigned GPUs {', '.join(assigned)}, but this executor's CUDA_VISIBLE_DEVICES={visible!r} does not "
        "have them, neither as entries nor as positions. Unset CUDA_VISIBLE_DEVICES for the executors, or let the "
        "discovery script print its entries."
    )


def _same(entry: str, address: str) -> bool:
    return entry == address or (not entry.isdigit() and address.startswith(entry))


def ordinal_of(address: str, visible: str | None, uuids: Sequence[str]) -> int:
    """Return the number of an assigned GPU among those that a process sees.

    ``visible`` is the executor's CUDA_VISIBLE_DEVICES; None if it is not set. ``uuids`` are those of the visible GPUs,
    in CUDA's order and without "GPU-".

    Raises:
        GpuError: The process does not see the GPU.
    """
    (name,) = _visible_names([address], visible)
    entries = [str(number) for number in range(len(uuids))]
    if visible is not None:
        entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if name in entries[: len(uuids)]:
        return entries.index(name)
    for number, uuid in enumerate(uuids):
        if uuid and uuid == name.removeprefix("GPU-"):
            return number
    if name.isdigit():  # counted on the host, while this container sees only its own GPUs
        return int(name) % len(uuids)
    raise GpuError(
        f"Spark assigned GPU {address}, which is none of the {len(uuids)} GPUs that torch sees here"
        f"{'' if visible is None else f' (CUDA_VISIBLE_DEVICES={visible!r})'}."
    )


def own_device(local_rank: int, local_size: int, visible: int, share: GpuShare) -> int | None:
    """Return the number of the rank's current device among the ``visible`` GPUs; None if there are none.

    Raises:
        GpuError: This host has too few for ``gpus_per_proc``.
    """
    if share.assigned is not None:
        return 0 if visible and share.assigned else None
    each = share.per_proc or 1
    if share.per_proc and visible < local_size * each:
        raise GpuError(
            f"gpus_per_proc={share.per_proc}: {local_size} ranks on this host need {local_size * each} GPUs, but torch "
            f"sees {visible}. Ask for fewer ranks, or check nvidia-smi, CUDA_VISIBLE_DEVICES, and that torch is built "
            "for CUDA (torch.version.cuda)."
        )
    return local_rank * each % visible if visible else None


def choose_backend(ranks: Sequence[RankGpus], backend: str | None, may_share: bool) -> Choice:
    """Compare the GPUs of all ranks, with the same result on every rank.

    ``ranks`` are in rank order. ``backend`` is the run's option; None to choose one. With ``may_share``, several ranks
    may use one GPU.

    Raises:
        GpuError: Spark gave one GPU to two tasks that need one each, or NCCL was requested and cannot work.
    """
    together: dict[tuple[str, str | None], list[int]] = {}
    for rank, info in enumerate(ranks):
        together.setdefault((info.host, info.physical), []).append(rank)
    shared = [pair for group in together.values() for pair in combinations(group, 2)]
    for first, second in shared:
        both = [device for device in ranks[first].assigned or () if device in (ranks[second].assigned or ())]
        if both and not may_share:
            raise GpuError(
                f"ranks {first} and {second} on host {ranks[first].host} were handed the same GPU {both[0]} by Spark. "
                "Two executors there report the same GPUs: run one worker on each host, or give each worker its own "
                "discovery script (spark.worker.resource.gpu.discoveryScript) or CUDA_VISIBLE_DEVICES."
            )
    on_one_gpu = [pair for pair in shared if ranks[pair[0]].physical is not None]
    without = [rank for rank, info in enumerate(ranks) if info.physical is None]
    if backend == "nccl":
        _require_nccl(ranks, on_one_gpu, without)
    if backend is not None or len(without) == len(ranks):
        return Choice(backend)
    if on_one_gpu:
        first, second = on_one_gpu[0]
        return Choice(
            "gloo",
            f"ranks {first} and {second} share a GPU of host {ranks[first].host}, and NCCL refuses two ranks on one "
            "GPU: Gloo carries CUDA tensors instead, through the host's memory. A whole GPU for every rank "
            '(gpus_per_proc=1) is faster; backend="mpi" is another way.',
        )
    if without:
        return Choice(
            "gloo",
            f"rank {without[0]} on host {ranks[without[0]].host} has no GPU that torch can use, but others have one: "
            "Gloo carries CUDA tensors instead of NCCL.",
        )
    return Choice(None)


def _require_nccl(ranks: Sequence[RankGpus], on_one_gpu: Sequence[tuple[int, int]], without: Sequence[int]) -> None:
    if without:
        raise GpuError(
            f'backend="nccl": rank {without[0]} on host {ranks[without[0]].host} has no GPU that torch can use. Use '
            'backend="gloo", or give every rank a GPU (gpus_per_proc=1).'
        )
    if on_one_gpu:
        first, second = on_one_gpu[0]
        raise GpuError(
            f'backend="nccl": ranks {first} and {second} share a GPU of host {ranks[first].host}, and NCCL refuses two '
            'ranks on one GPU. Use backend="gloo" or "mpi", or give every rank a whole GPU (gpus_per_proc=1).'
        )
