"""Exchanges small facts between all ranks, as JSON over a process group."""

from __future__ import annotations

import json
import struct
from typing import Any

import torch
import torch.distributed as dist

from spark_hvd.transport.waits import wait_for
from spark_hvd.world.activity import activity

_HEAD = 8
"""Bytes before a fact that give its length."""
_ROOM = 248
"""Maximum bytes of a fact that are sent at once; if one is longer, all are sent a second time."""


def exchange(fact: Any, group: dist.ProcessGroup, device: torch.device, about: str = "facts") -> list[Any]:
    """Return the facts of all ranks in rank order; collective over `group`.

    A fact is anything that JSON can carry. ``device`` is one of the group's. ``about`` is the name of this exchange in
    displays of the run.
    """
    with activity.waiting(about, tuple(dist.get_process_group_ranks(group))):
        return _exchange(fact, group, device)


def _exchange(fact: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    text, room = json.dumps(fact).encode(), _ROOM
    while True:
        row = torch.frombuffer(bytearray(struct.pack(f"<q{room}s", len(text), text)), dtype=torch.uint8).to(device)
        data = _rows(row, group).cpu().numpy().tobytes()
        rows = [data[start : start + len(row)] for start in range(0, len(data), len(row))]
        longest = max(_length(each) for each in rows)
        if longest <= room:
            return [json.loads(each[_HEAD : _HEAD + _length(each)]) for each in rows]
        room = longest  # now known to every rank


def _length(row: bytes) -> int:
    return int(struct.unpack_from("<q", row)[0])


def _rows(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows of all ranks; over Gloo they go through the first rank.

    Gloo gathers in a ring, in which every rank wakes up for every other rank's row: n² messages one after another for n
    ranks, which took most of the start-up of many ranks on one host. Through one rank there are 2 n messages.
    """
    if mine.device.type != "cpu" or "gloo" not in str(dist.get_backend_config(group)):
        return torch.stack(all_gather(mine, group))
    root, size = dist.get_global_rank(group, 0), dist.get_world_size(group)
    every = torch.empty((size, mine.numel()), dtype=torch.uint8, device="cpu")
    gathered = list(every) if dist.get_rank(group) == 0 else None
    wait_for(dist.gather(mine, gathered, root, group, async_op=True), group)
    wait_for(dist.broadcast(every, root, group, async_op=True), group)
    return every


def all_gather(mine: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Gather tensors of one shape and dtype from all ranks, in rank order; collective over `group`.

    Raises:
        RuntimeError: A peer or the network failed; the backend raises this.
    """
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(rows, mine, group=group, async_op=True)
    if work is not None and mine.is_cuda:
        work.wait()
    elif work is not None:
        wait_for(work, group)
    return rows
