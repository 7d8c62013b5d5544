"""Small facts that every rank tells every other, as JSON over a process group."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from spark_hvd.activity import activity
from spark_hvd.waits import wait_for


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
    size = dist.get_world_size(group)
    text = torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([text.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in range(size)]
    _wait(dist.all_gather(lengths, length, group=group, async_op=True), group, device)
    counts = [int(each) for each in lengths]
    longest = max(counts)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    rows = [torch.empty_like(padded) for _ in range(size)]
    _wait(dist.all_gather(rows, padded, group=group, async_op=True), group, device)
    return [json.loads(bytes(row[:count].tolist()).decode()) for row, count in zip(rows, counts, strict=True)]


def _wait(work: dist.Work | None, group: dist.ProcessGroup, device: torch.device) -> None:
    if work is None:
        return
    if device.type == "cpu":
        wait_for(work, group)
    else:
        work.wait()
