"""Reduction in memory that ranks of one host share: the same results as over Gloo, whatever the ranks' timing."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spark_hvd.compression import Compression
from spark_hvd.optimizer import DistributedOptimizer
from spark_hvd.shared_memory import SharedArena, SharedSum
from tests.contract.optimizer_cases import assert_same_bits, batch, compare, lane_of, loss_of, net, sgd


def in_memory(optimizer: Any) -> bool:
    return all(bucket._everyones for bucket in lane_of(optimizer)._buckets)


def gather(fact: Any) -> list[Any]:
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, fact)
    return facts


def memory_is_the_default_on_one_host(rank: int, size: int) -> None:
    assert in_memory(compare(rank, size))


def memory_can_be_declined(rank: int, size: int) -> None:
    assert not in_memory(compare(rank, size, shared_memory=False))
    assert not in_memory(compare(rank, size, shared_memory=False, bucket_cap_mb=1e-4))


def memory_and_gloo_give_the_same_bits(rank: int, size: int) -> None:
    weights = []
    for shared_memory in (True, False):
        model = net()
        optimizer = DistributedOptimizer(sgd(model.parameters()), shared_memory=shared_memory)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
        weights.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    if size == 2:  # of two numbers there is one sum
        assert torch.equal(*weights)
    else:
        torch.testing.assert_close(*weights)


def compression_goes_over_gloo(rank: int, size: int) -> None:
    model = net()
    optimizer = DistributedOptimizer(sgd(model.parameters()), compression=Compression.bf16)
    loss_of(model, batch(rank, 0)).backward()
    optimizer.step()
    assert not in_memory(optimizer)


def ranks_out_of_step(rank: int, size: int) -> None:
    """Many buckets, and ranks that dawdle at different ones: no rank may sum what another has not yet filled."""
    layers = 24
    model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(layers)])
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, number / 1000)
    chance = random.Random(rank)
    for param in model.parameters():
        param.register_hook(lambda grad: time.sleep(chance.choice([0, 0, 0.002])))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), bucket_cap_mb=0.008)
    for step in range(8):
        optimizer.zero_grad()
        rows = torch.full((2, 40), float(rank + 1 + step))
        loss = model(rows).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        optimizer.step()
        for param, mine in zip(model.parameters(), grads, strict=True):
            wanted = mine.clone()
            dist.all_reduce(wanted)
            assert param.grad is not None
            torch.testing.assert_close(param.grad, wanted / size)
    assert len(lane_of(optimizer).buckets) >= layers
    assert in_memory(optimizer)
    assert_same_bits(model)


def a_rank_that_cannot_map_the_others_sends_all_over_gloo(rank: int, size: int) -> None:
    opened = os.open

    def forbidden(path: str, flags: int, *rest: Any) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "Permission denied", path)
        return opened(path, flags, *rest)

    if rank == 1:
        os.open = forbidden  # type: ignore[assignment]
    try:
        optimizer = compare(rank, size)
    finally:
        os.open = opened
    assert not in_memory(optimizer)


def every_dtype(rank: int, size: int) -> None:
    groups = [dist.new_group(), dist.new_group()]
    kinds: Sequence[torch.dtype] = (torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32)
    arena = SharedArena([(200_001, dtype) for dtype in kinds])
    mapped = arena.map_everyones(rank, gather)
    assert mapped is not None
    for buffer, everyones in zip(arena.buffers, mapped, strict=True):
        for turn in range(3):
            buffer.fill_(rank + turn)
            reduction = SharedSum(everyones, *groups)
            reduction.wait()
            assert torch.equal(buffer, torch.full_like(buffer, sum(range(size)) + turn * size))


def nothing_has_a_name(rank: int, size: int) -> None:
    """No file in /dev/shm, and no descriptor stays open: the memory goes with the processes."""
    gc.collect()
    before_maps = sum("memfd:spark_hvd" in name for name in _open_files())
    before = set(os.listdir("/dev/shm"))
    optimizer = compare(rank, size, bucket_cap_mb=1e-4)
    assert in_memory(optimizer)
    assert set(os.listdir("/dev/shm")) <= before
    assert len(lane_of(optimizer).buckets) >= 5
    # Python keeps a duplicate of the descriptor of a mapping, one a rank; the rest are those of two process groups.
    assert sum("memfd:spark_hvd" in name for name in _open_files()) - before_maps <= size


def _open_files() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names
