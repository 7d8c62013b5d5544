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

from spark_hvd.collectives.compression import Compression
from spark_hvd.torch.optimizer.distributed import DistributedOptimizer
from spark_hvd.transport.host import shared_memory
from spark_hvd.transport.host.arena import SharedArena
from spark_hvd.transport.host.pipes import Pipes, SyncPoint
from spark_hvd.transport.host.shared_memory import SMALL, CopiedSum, SharedSum, in_memory
from tests.contract import optimizer_cases, optimizer_odd_cases
from tests.contract.optimizer_cases import assert_same_bits, batch, compare, loss_of, net, reducer_of, sgd
from tests.ranks import left_in


def shares_memory(optimizer: Any) -> bool:
    return all(bucket.shared for bucket in reducer_of(optimizer)._buckets)


def gather(fact: Any) -> list[Any]:
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, fact)
    return facts


def memory_is_the_default_on_one_host(rank: int, size: int) -> None:
    assert shares_memory(compare(rank, size))


def memory_can_be_declined(rank: int, size: int) -> None:
    assert not shares_memory(compare(rank, size, shared_memory=False))
    assert not shares_memory(compare(rank, size, shared_memory=False, bucket_cap_mb=1e-4))


def memory_and_gloo_give_the_same_bits(rank: int, size: int) -> None:
    weights = []
    for wanted in (True, False):
        model = net()
        optimizer = DistributedOptimizer(sgd(model.parameters()), shared_memory=wanted)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
        weights.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    if size == 2:  # a sum of two numbers does not depend on the order
        assert torch.equal(*weights)
    else:
        torch.testing.assert_close(*weights)


def compression_goes_over_gloo(rank: int, size: int) -> None:
    model = net()
    optimizer = DistributedOptimizer(sgd(model.parameters()), compression=Compression.bf16)
    loss_of(model, batch(rank, 0)).backward()
    optimizer.step()
    assert not shares_memory(optimizer)


def ranks_out_of_step(rank: int, size: int) -> None:
    """Many buckets, and ranks that are slow at different ones: no rank may sum what another has not filled yet."""
    layers = 24
    model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(layers)])
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, number / 1000)
    chance = random.Random(rank)
    for param in model.parameters():
        param.register_hook(lambda grad: time.sleep(chance.choice([0, 0, 0.002])))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), bucket_cap_mb=0.008)
    for step in range(5):
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
    assert len(reducer_of(optimizer).buckets) >= layers
    assert shares_memory(optimizer)
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
    assert not shares_memory(optimizer)


def every_dtype(rank: int, size: int) -> None:
    pipes = opened(rank, size)
    kinds: Sequence[torch.dtype] = (torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32)
    arena = SharedArena([(200_001, dtype) for dtype in kinds])
    mapped = arena.map_all(rank, gather)
    assert mapped is not None
    for buffer, everyones in zip(arena.buffers, mapped, strict=True):
        reduction = SharedSum(everyones, pipes)
        for turn in range(3):
            buffer.fill_(rank + turn)
            reduction.start()
            reduction.wait()
            assert torch.equal(buffer, torch.full_like(buffer, sum(range(size)) + turn * size))


class Dawdling:
    """Pipes of a rank that sleeps before or after it sends or receives something."""

    def __init__(self, pipes: Pipes, place: str) -> None:
        self._pipes = pipes
        self._place = place
        self.place = pipes.place

    def _at(self, place: str) -> None:
        if place == self._place:
            time.sleep(0.01)

    def send(self, point: SyncPoint) -> int:
        self._at("before sending")
        times = self._pipes.send(point)
        self._at("after sending")
        return times

    def wait(self, point: SyncPoint, times: int) -> None:
        self._at("before waiting")
        self._pipes.wait(point, times)
        self._at("after waiting")


def opened(rank: int, size: int) -> Pipes:
    pipes = Pipes.open(range(size), rank, 60.0, gather)
    assert pipes is not None
    return pipes


def arena_of(rank: int, *kinds: tuple[int, torch.dtype]) -> list[list[torch.Tensor]]:
    mapped = SharedArena(kinds).map_all(rank, gather)
    assert mapped is not None
    return mapped


def copies_are_read_before_they_are_overwritten(rank: int, size: int) -> None:
    """Whichever rank is slow, and wherever: each sum is that of all ranks' values."""
    pipes = opened(rank, size)
    buffer = torch.zeros(1000)
    copies = arena_of(rank, (1000, torch.float32), (1000, torch.float32))
    number = 0
    for slow in range(size):
        for place in ("before sending", "after sending", "before waiting", "after waiting"):
            mine: Any = Dawdling(pipes, place if rank == slow else "")
            reduction = CopiedSum(buffer, copies, mine)
            for _ in range(6):
                number += 1
                buffer.fill_(number * (rank + 1))
                reduction.start()
                reduction.wait()
                assert (buffer == number * sum(range(1, size + 1))).all(), (slow, place, number)
            gather(None)  # another CopiedSum begins with the same copy


def copies_of_abandoned_sums(rank: int, size: int) -> None:
    """A rank that abandons sums does not run ahead of one that does not."""
    slow: Any = Dawdling(opened(rank, size), "after waiting" if rank == size - 1 else "")
    buffer = torch.zeros(1000)
    reduction = CopiedSum(buffer, arena_of(rank, (1000, torch.float32), (1000, torch.float32)), slow)
    for number in range(1, 9):
        buffer.fill_(number)
        reduction.start()
        if rank == size - 1 or number == 8:
            reduction.wait()
            assert (buffer == number * size).all(), number


def both_ways_give_the_same_bits(rank: int, size: int) -> None:
    pipes = opened(rank, size)
    numel = 70_001  # more than is summed at a time
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64):
        numbers = torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).to(dtype)
        shares, *copies = arena_of(rank, *[(numel, dtype)] * 3)
        shares[rank].copy_(numbers)
        buffer = numbers.clone()
        sums = [SharedSum(shares, pipes), CopiedSum(buffer, copies, pipes)]
        for reduction in sums:
            reduction.start()
        for reduction in sums:
            reduction.wait()
        assert torch.equal(buffer, shares[rank]), dtype
        if size == 2 and dtype in (torch.float32, torch.float64):  # a sum of two numbers does not depend on the order
            dist.all_reduce(numbers)
            assert torch.equal(buffer, numbers)


def ways_by_size(rank: int, size: int) -> None:
    kinds = [(numel, torch.float32) for numel in (1, SMALL // 4 // size, SMALL // 4 // size + 1, 1 << 20)]
    sums = in_memory(kinds, opened(rank, size), gather)
    assert sums is not None
    ways = [type(way).__name__ for _, way in sums]
    assert ways == ["CopiedSum", "CopiedSum", "SharedSum", "SharedSum"]
    assert [(buffer.numel(), int(buffer.count_nonzero())) for buffer, _ in sums] == [(numel, 0) for numel, _ in kinds]


def shares_of_small_buckets(rank: int, size: int) -> None:
    """Run what the other cases do with copies, because these models are small."""
    shared_memory.SMALL = 0
    try:
        for case in (
            memory_is_the_default_on_one_host,
            memory_and_gloo_give_the_same_bits,
            ranks_out_of_step,
            optimizer_cases.average,
            optimizer_cases.sparse_gradients,
            optimizer_odd_cases.unused_parameters,
        ):
            case(rank, size)
    finally:
        shared_memory.SMALL = SMALL


def nothing_has_a_name(rank: int, size: int) -> None:
    """No file in /dev/shm and no descriptor stays open: the memory is freed with the processes."""
    gc.collect()
    before_maps = sum("memfd:spark_hvd" in name for name in _open_files())
    before = set(os.listdir("/dev/shm"))
    optimizer = compare(rank, size, bucket_cap_mb=1e-4)
    assert shares_memory(optimizer)
    assert not left_in("/dev/shm", before)
    assert len(reducer_of(optimizer).buckets) >= 5
    # Python keeps a duplicate of a mapping's descriptor, one per rank.
    # Buffers of every rank, and counters.
    assert sum("memfd:spark_hvd" in name for name in _open_files()) - before_maps <= 2 * size


def _open_files() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names
