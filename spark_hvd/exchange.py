"""Small facts that every rank tells every other, as JSON over a process group."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def exchange(fact: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Give every rank the facts of all ranks, in rank order; collective over `group`.

    Args:
        fact: anything JSON can carry.
        group: the process group to use.
        device: a device that the group's backend serves.
    """
    size = dist.get_world_size(group)
    text = torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([text.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    counts = [int(each) for each in lengths]
    longest = max(counts)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    rows = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(rows, padded, group=group)
    return [json.loads(bytes(row[:count].tolist()).decode()) for row, count in zip(rows, counts, strict=True)]
