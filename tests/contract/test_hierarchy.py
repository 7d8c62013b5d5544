"""Hierarchical all-reduce on real ranks that treat this machine as several hosts."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd.context.global_state import current
from spark_hvd.torch.optimizer.distributed import DistributedOptimizer
from spark_hvd.transport.host.sliced import LEAST
from tests.conftest import wait_until
from tests.contract.optimizer_cases import reducer_of
from tests.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

EVEN = ["a", "a", "b", "b"]
UNEVEN = ["a", "a", "a", "b", "c", "c"]


def trained(hierarchical: bool, steps: int = 4, **options: Any) -> tuple[torch.Tensor, list[str]]:
    """Return weights after some steps, and what sums the buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 7))
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model.named_parameters(),
        shared_memory=hierarchical,
        bucket_cap_mb=0.05,
        **options,
    )
    for step in range(steps):
        rows = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * hvd.rank() + step))
        optimizer.zero_grad()
        if step == 2:
            time.sleep(0.02 * hvd.rank())  # out of step
        model(rows).square().mean().backward()
        optimizer.step()
    ways = [type(bucket._memory).__name__ for bucket in reducer_of(optimizer)._buckets]
    return torch.cat([param.detach().flatten() for param in model.parameters()]), ways


def gradients_agree() -> None:
    weights, ways = trained(True)
    flat, flat_ways = trained(False)
    assert set(ways) == {"HierarchicalSum"}
    assert len(ways) > 2
    assert set(flat_ways) == {"NoneType"}
    torch.testing.assert_close(weights, flat)
    everyones = [torch.empty_like(weights) for _ in range(hvd.size())]
    dist.all_gather(everyones, weights)
    assert all(torch.equal(each, weights) for each in everyones)  # the same bits


def by_name() -> None:
    """Sums of all sizes and dtypes, in place and not, alone and fused."""
    sliced = current().queue.members.sliced
    assert sliced is not None
    size = hvd.size()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
        for nbytes in (LEAST, (13 if dtype is torch.float32 else 3) << 20):  # the largest reuse a part of memory
            numel = -(-nbytes // dtype.itemsize) + (nbytes != LEAST)
            period = torch.arange(7).to(dtype)
            mine = (period * (hvd.rank() + 1)).repeat(-(-numel // 7))[:numel]
            wanted = (period * (size * (size + 1) // 2)).repeat(-(-numel // 7))[:numel]
            before = mine.clone()
            assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), wanted), (dtype, numel)
            assert torch.equal(mine, before)
            halved = hvd.allreduce_(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
            assert torch.equal(halved, wanted)
            assert halved is mine
            mean = hvd.allreduce(before)
            exact = (wanted.double() / size).trunc() if dtype is torch.int32 else wanted.double() / size
            torch.testing.assert_close(mean.double(), exact, atol=0.1, rtol=0.01)
    many = [torch.full((1 << 17,), float(hvd.rank() + k)) for k in range(6)]
    handles = [hvd.allreduce_async(part, name=f"part.{k}", op=hvd.Sum) for k, part in enumerate(many)]
    for k, handle in enumerate(handles):
        assert hvd.synchronize(handle).unique().tolist() == [size * (size - 1) / 2 + size * k]
    strided = torch.ones(2, 1 << 18).t()
    assert hvd.allreduce_(strided, op=hvd.Sum).unique().tolist() == [size]


def memory_is_refused() -> tuple[list[str], list[str]]:
    """Rank 3's kernel has no memory to share: first for buckets alone, then for named sums, too."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("spark_hvd").addHandler(handler)
    made = os.memfd_create

    def refused(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    if hvd.rank() == 3:
        os.memfd_create = refused
    try:
        _, ways = trained(True)
        hvd.shutdown()
        hvd.init()
        assert current().queue.members.sliced is None
        assert hvd.allreduce(torch.ones(1 << 20), op=hvd.Sum).unique().tolist() == [hvd.size()]
        trained(True)
    finally:
        os.memfd_create = made
        logging.getLogger("spark_hvd").removeHandler(handler)
    return ways, said


def turned_off_by_one_rank() -> set[str]:
    if hvd.rank() == 1:
        os.environ["HOROVOD_HIERARCHICAL_ALLREDUCE"] = "0"
    hvd.shutdown()
    hvd.init()
    return {*trained(True, steps=2)[1]}


@pytest.mark.slow
def test_even_hosts() -> None:
    with ranks(4, hosts=EVEN) as world:
        world.run(gradients_agree)
        world.run(by_name)
        outcomes = world.run(memory_is_refused)
        assert world.run(turned_off_by_one_rank) == [{"NoneType"}] * 4
    assert all(set(ways) == {"NoneType"} for ways, _ in outcomes)
    assert [len(said) for _, said in outcomes] == [1, 0, 0, 0]
    assert "rank 3 of it has no memory to share, or cannot open that of its host" in outcomes[0][1][0]


@pytest.mark.slow
def test_hosts_with_different_numbers_of_ranks() -> None:
    with ranks(6, hosts=UNEVEN) as world:
        world.run(gradients_agree)
        world.run(by_name)


def one_dies(method: str, by_name: bool, told: Path) -> str:
    """Return the error when rank 2 dies in the third sum; no rank ends before the others have got theirs."""
    from spark_hvd.transport.host import hierarchy

    model = nn.Linear(200, 200)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    try:
        for step in range(4):
            if step == 2 and hvd.rank() == 2:
                setattr(hierarchy.HierarchicalSum, method, lambda self: os._exit(3))
            if by_name:
                hvd.allreduce(torch.ones(3 * LEAST), name="large")
                continue
            model(torch.ones(2, 200)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except hvd.CollectiveError as error:
        (told / str(hvd.rank())).touch()
        wait_until(lambda: len(list(told.iterdir())) == 3)  # if this rank alone told it, it would never come
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [False, True], ids=["bucket", "by name"])
@pytest.mark.parametrize(
    "method", ["reduce", "spread"], ids=["before my host has summed", "before the others have my slice"]
)
def test_a_rank_that_dies_between_the_halves(method: str, by_name: bool, tmp_path: Path) -> None:
    with ranks(4, hosts=EVEN) as world:
        outcomes = world.outcomes(one_dies, method, by_name, tmp_path)
    assert not outcomes[2][0]
    for place in (0, 1, 3):
        ok, text = outcomes[place]
        assert ok, text
        assert text != "no error"
        assert "timed out" not in text.lower(), text
        assert by_name or text.startswith("reducing gradients failed because a peer or the network did"), text
