"""The defaults that a program sets by torch.set_default_device and torch.set_default_dtype do not affect our tensors.

The device is "meta", which keeps no values: a tensor of ours that is created there by mistake raises. With "cuda",
a program has tensors there that Gloo cannot send.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = {"device": "cpu"}


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with ranks(2) as started:
        started.run(set_defaults)
        yield started


def set_defaults() -> None:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2, device="cpu", dtype=torch.float32)


def mine() -> torch.Tensor:
    return torch.full((2, 3), hvd.rank() + 1.0, dtype=torch.float32, device="cpu")


def named() -> None:
    for name in (None, "named"):
        assert torch.equal(hvd.allreduce(mine(), op=hvd.Sum, name=name), mine() * 0 + 3)
        assert torch.equal(hvd.allgather(mine(), name=name).sum(1), torch.tensor([3.0, 3, 6, 6], **CPU).float())
        assert torch.equal(hvd.broadcast(mine(), 1, name=name), mine() * 0 + 2)
        assert hvd.reducescatter(mine(), op=hvd.Sum, name=name).tolist() == [[3.0] * 3]
        swapped, received = hvd.alltoall(mine(), torch.tensor([1, 1], **CPU), name=name)
        assert (swapped[:, 0].tolist(), received.tolist()) == ([1.0, 2.0], [1, 1])
        grouped = hvd.grouped_allreduce([mine(), mine().double()], op=hvd.Average, name=name)
        assert [each.dtype for each in grouped] == [torch.float32, torch.float64]
    assert hvd.allgather_object({"rank": hvd.rank()}) == [{"rank": 0}, {"rank": 1}]
    assert hvd.broadcast_object([hvd.rank()], 1) == [1]
    hvd.barrier()
    assert hvd.join() in (0, 1)


def derived() -> None:
    parts = mine().requires_grad_()
    gathered = hvd.allgather(parts[: 1 + hvd.rank()], name="derived")
    (gathered.sum() * (hvd.rank() + 1)).backward()
    assert parts.grad is not None
    # The sum of both ranks' gradients, 1 and 2; the second row of rank 0 had no effect.
    assert parts.grad.tolist() == [[3.0] * 3, [3.0 * hvd.rank()] * 3]


def trained(distribute: Callable[[Any, Any], Any]) -> torch.Tensor:
    net = linear()
    optimizer = distribute(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for _ in range(3):
        optimizer.zero_grad()
        net(mine()).square().mean().backward()
        optimizer.step()
    return net.weight.detach()


def optimizers() -> None:
    alone = trained(lambda optimizer, _: optimizer)
    for options in ({}, {"shared_memory": False}, {"compression": hvd.Compression.fp16}, {"op": hvd.Adasum}):
        together = trained(lambda each, net, o=options: hvd.DistributedOptimizer(each, net.named_parameters(), **o))
        assert together.dtype == torch.float32
        assert torch.equal(*hvd.allgather(together[None], name="weights"))
        assert not torch.equal(alone, together)


def norms() -> None:
    with torch.device("cpu"):
        norm = hvd.SyncBatchNorm(3).float()
    whole = torch.nn.BatchNorm1d(3, device="cpu", dtype=torch.float32)
    rows = torch.arange(12.0, dtype=torch.float32, **CPU).view(4, 3) ** 2
    half = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
    torch.testing.assert_close(norm(rows[half]), whole(rows)[half])
    torch.testing.assert_close(norm.running_var, whole.running_var)


def states(folder: str) -> None:
    net = linear()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), net.named_parameters())
    state = hvd.elastic.TorchState(net, optimizer, rows=torch.zeros(2, **CPU))
    state.sync()
    net(mine()).sum().backward()
    optimizer.step()
    state.save()
    wanted = net.weight.detach().clone()
    optimizer.step()
    state.restore()
    assert torch.equal(net.weight, wanted)
    for wait in (True, False):
        hvd.checkpoint.save(folder, {"net": net.state_dict(), "optimizer": optimizer.state_dict()}, 1 + wait, wait=wait)
    found = hvd.checkpoint.load(folder)
    assert found is not None
    assert torch.equal(found.state["net"]["weight"], wanted)


def outer() -> None:
    for compression in (hvd.Compression.none, hvd.Int8Compressor()):
        net = linear()
        optimizer = hvd.LocalSGD(net, torch.optim.SGD(net.parameters(), lr=0.1), 2, compression=compression)
        for _ in range(4):
            optimizer.zero_grad()
            net(mine()).square().mean().backward()
            optimizer.step()
        assert torch.equal(*hvd.allgather(net.weight.detach()[None], name="outer"))


def tables() -> None:
    table = hvd.ShardedEmbedding(5, 2, device="cpu", dtype=torch.float32)
    ids = torch.tensor([hvd.rank(), 4, 2], device="cpu")
    rows = table(ids)
    rows.sum().backward()
    assert rows.dtype == torch.float32
    assert torch.equal(rows, table(ids))


@pytest.mark.parametrize("part", [named, derived, optimizers, norms, outer, tables])
def test_with_other_defaults(world: Ranks, part: Callable[[], None]) -> None:
    world.run(part)


def test_states_with_other_defaults(world: Ranks, tmp_path: Path) -> None:
    world.run(states, str(tmp_path))
