"""Takes a rank's GPU, in the rank's process, and agrees with the other ranks on a backend that their GPUs allow."""

from __future__ import annotations

import logging
from dataclasses import asdict

import torch

from spark_hvd.runner.rank.gpus import GpuShare, RankGpus, choose_backend, own_device
from spark_hvd.transport.rendezvous import all_gather_facts
from spark_hvd.transport.torch_private import PrefixStore, Store
from spark_hvd.world.layout import RankInfo

_log = logging.getLogger(__name__)


def settle(me: RankInfo, share: GpuShare, kv: Store, backend: str | None, local: RankInfo | None = None) -> str | None:
    """Make this rank's GPU the current device, and compare with the others; every rank must call this.

    ``local`` has the local rank by which the GPU is chosen; by default, that is ``me``.

    Returns:
        The backend to join with.

    Raises:
        GpuError: The GPUs do not fit what the run needs. Every rank raises it, unless only this host has too few.
        CollectiveError: The other ranks could not be reached.
    """
    mine = RankGpus(me.host, share.assigned, take(local or me, share))
    if share.assigned is None and backend is not None and backend != "nccl":
        return backend  # nothing that could conflict, on any rank
    everyone = all_gather_facts(asdict(mine), PrefixStore("spark_hvd/gpus", kv), me.rank, me.size)
    choice = choose_backend([RankGpus(**fact) for fact in everyone], backend, share.may_share)
    if choice.warning is not None and me.rank == 0:
        _log.warning("%s", choice.warning)
    return choice.backend


def take(me: RankInfo, share: GpuShare) -> str | None:
    """Make the rank's GPU the current device, and return its identity on this host; None without a GPU.

    Raises:
        GpuError: This host has fewer GPUs than its ranks need.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = own_device(me.local_rank, me.local_size, visible, share)
    if device is None:
        if share.assigned and share.per_proc:
            _log.warning(
                "rank %d has GPU %s of host %s, but torch cannot use it (torch %s, built for CUDA %s): the rank trains "
                "on the CPU",
                me.rank,
                share.assigned[0],
                me.host,
                torch.__version__,
                torch.version.cuda,
            )
        return None
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    # NCCL identifies a GPU by its address on the bus, which is the same for all MIG slices of one. Older versions of
    # torch know neither address nor UUID.
    bus = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if None not in bus:
        return ":".join(f"{number:x}" for number in bus)
    return str(getattr(properties, "uuid", (share.assigned or [str(device)])[0]))
