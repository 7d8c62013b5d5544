"""Collects a record of this rank to send: its activity, its loop, and its use of memory, CPU and GPUs."""

from __future__ import annotations

import logging
import os
import resource
import time
from dataclasses import replace
from typing import Any

import torch

from spark_hvd.context.global_state import global_state
from spark_hvd.world.activity import activity
from spark_hvd.world.vitals import Vitals

_log = logging.getLogger("spark_hvd")
_PAGE = resource.getpagesize()


def observe() -> Vitals | None:
    """Return the current record of this rank; None outside a world. Any thread may call this."""
    here = global_state.context
    if here is None:
        return None
    now, me, progress, steps = time.monotonic(), here.world.me, activity.progress, activity.optimizer_steps
    return Vitals(
        rank=me.rank,
        size=me.size,
        generation=here.world.generation,
        clock=now,
        host=me.host,
        pid=os.getpid(),
        entered=activity.entered,
        last=" ".join(activity.last),
        last_seconds=now - activity.last_at if activity.last else 0.0,
        pending=tuple(
            replace(one, ranks=None) if one.ranks is not None and len(one.ranks) == me.size else one
            for one in activity.pending(now)
        ),
        epochs_done=activity.epochs_done(now),
        steps_before=activity.steps_before,
        kept_steps=activity.kept_steps,
        lost_steps=activity.lost_steps,
        comm_seconds=activity.waited(now),
        cpu_seconds=time.process_time(),
        memory_bytes=_resident(),
        **_gpu(),
        stall_warning=here.engine.config.stall_warning,
        **({"step": steps, "total_steps": steps} if progress is None else progress.facts(now)),
    )


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE


def _gpu() -> dict[str, Any]:
    """Return the fields for the GPUs on which torch holds memory in this process.

    The current device does not show them, because each thread has its own.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # other queries would initialise CUDA
        return {}
    held = {number: torch.cuda.memory_reserved(number) for number in range(torch.cuda.device_count())}
    busy = [share for number, bytes_ in held.items() if bytes_ and (share := _utilization(number)) is not None]
    return {"gpu_memory_bytes": sum(held.values()), "gpu_utilization": sum(busy) / len(busy) if busy else None}


def _utilization(device: int) -> float | None:
    try:
        return torch.cuda.utilization(device) / 100
    except Exception as error:
        # pynvml is missing, or NVML failed: on MIG, on vGPU and in some containers it has no data.
        _log.debug("NVML has no utilization of cuda:%d: %s", device, error)
        return None
