"""Small facts that every rank tells every other, as JSON over a process group."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from spark_hvd.transport.waits import wait_for
from spark_hvd.world.activity import activity


def exchange(fact: Any, group: dist.ProcessGroup, device: torch.device, about: str = "facts") -> list[Any]:
    """Give every rank the facts of all ranks, in rank order; collective over `group`.

    Args:
        fact: anything JSON can carry.
        group: the process group to use.
        device: a device that the group's backend serves.
        about: what to call this, for whoever watches the run.
    """
    with activity.waiting(about, tuple(dist.get_process_group_ranks(group))):
        return _exchange(fact, group, device)


def _exchange(fact: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    text = torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8).to(device)
    counts = [int(length) for length in all_gather(torch.tensor([text.numel()], device=device), group)]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    rows = all_gather(padded, group)
    return [json.loads(bytes(row[:count].tolist()).decode()) for row, count in zip(rows, counts, strict=True)]


def all_gather(mine: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Tensors of one shape and dtype of all ranks, in rank order; collective over `group`.

    Raises:
        RuntimeError: As the backend raises it when a peer or the network failed.
    """
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(rows, mine, group=group, async_op=True)
    if work is not None and mine.is_cuda:
        work.wait()
    elif work is not None:
        wait_for(work, group)
    return rows
