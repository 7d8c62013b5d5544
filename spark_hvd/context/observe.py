"""One look at this rank: what its activity, its loop and the operating system say of it, as a record to send."""

from __future__ import annotations

import resource
import time
from dataclasses import replace

import torch

from spark_hvd.context.standing import standing
from spark_hvd.world.activity import activity
from spark_hvd.world.vitals import Vitals

_PAGE = resource.getpagesize()


def observe() -> Vitals | None:
    """What there is to tell of this rank now; None while it is in no world. From any thread."""
    here = standing.context
    if here is None:
        return None
    now, me, progress = time.monotonic(), here.world.me, activity.progress
    return Vitals(
        rank=me.rank,
        size=me.size,
        generation=here.world.generation,
        clock=now,
        entered=activity.entered,
        last=" ".join(activity.last),
        last_seconds=now - activity.last_at if activity.last else 0.0,
        underway=tuple(
            replace(one, ranks=None) if one.ranks is not None and len(one.ranks) == me.size else one
            for one in activity.underway(now)
        ),
        epochs_done=activity.epochs_done(now),
        steps_before=activity.steps_before,
        comm_seconds=activity.waited(now),
        cpu_seconds=time.process_time(),
        memory_bytes=_resident(),
        gpu_memory_bytes=torch.cuda.memory_reserved() if _has_gpu() else None,
        gpu_utilization=_gpu_utilization(),
        stall_warning=here.engine.config.stall_warning,
        **(_steps_of_optimizers() if progress is None else progress.facts(now)),
    )


def _steps_of_optimizers() -> dict[str, int]:
    return {"step": activity.optimizer_steps, "total_steps": activity.optimizer_steps}


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE


def _has_gpu() -> bool:
    """Whether this process uses one; to ask in another way would make it use one."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _gpu_utilization() -> float | None:
    if not _has_gpu():
        return None
    try:
        return torch.cuda.utilization() / 100
    except (ImportError, RuntimeError):  # without pynvml, or where the driver does not tell
        return None
