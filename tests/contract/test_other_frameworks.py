"""The default process group stays usable: DDP and FSDP2 next to hvd calls, equal to training on the joined batch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS = 4
BATCH = 6


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with ranks(2) as started:
        yield started


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(STEPS, 2 * BATCH, 5, generator=generator, dtype=torch.float64)
    return features, torch.randn(STEPS, 2 * BATCH, 2, generator=generator, dtype=torch.float64)


def alone() -> list[torch.Tensor]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for features, targets in zip(*data(), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(features), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [param.detach() for param in net.parameters()]


def distributed(wrapper: str) -> list[torch.Tensor]:
    net: torch.nn.Module = model()
    if wrapper == "ddp":
        net = torch.nn.parallel.DistributedDataParallel(net)
    else:
        from torch.distributed.fsdp import fully_shard

        assert isinstance(net, torch.nn.Sequential)
        fully_shard(net[0])
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    mine = slice(hvd.rank() * BATCH, (hvd.rank() + 1) * BATCH)
    for features, targets in zip(*data(), strict=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(features[mine]), targets[mine])
        loss.backward()  # type: ignore[no-untyped-call]
        # hvd's own collectives in between, on the same group
        assert hvd.allgather(loss.detach()).mean().item() == pytest.approx(hvd.allreduce(loss.detach()).item())
        optimizer.step()
        assert hvd.broadcast_object(hvd.rank(), root_rank=1) == 1
    whole = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in net.parameters()]
    return [param.detach() for param in whole]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_equals_the_joined_batch(world: Ranks, wrapper: str) -> None:
    expected = alone()
    for trained in world.run(distributed, wrapper):
        for ours, theirs in zip(trained, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_sharded_parameters_are_refused(world: Ranks) -> None:
    def fn() -> None:
        from torch.distributed.fsdp import fully_shard

        net = model()
        fully_shard(net)
        with pytest.raises(TypeError, match="DTensor"):
            hvd.broadcast_parameters(net.state_dict())

    world.run(fn)


def test_a_model_may_outlive_its_process_group(world: Ranks) -> None:
    """Without our change, the ranks block, because the switch interval lets Gloo's threads wait for the GIL."""

    def fn() -> None:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        def train() -> None:
            group = dist.new_group()
            net = DistributedDataParallel(torch.nn.Linear(4, 1), process_group=group)
            net(torch.ones(2, 4)).sum().backward()
            assert [*vars(net)][-1] == "_spark_hvd_group"
            dist.destroy_process_group(group)

        before = sys.getswitchinterval()
        sys.setswitchinterval(10)
        try:
            for _ in range(40):
                train()
        finally:
            sys.setswitchinterval(before)
        copied = copy.deepcopy(DistributedDataParallel(torch.nn.Linear(4, 1)))
        assert [*vars(copied)][-1] == "_spark_hvd_group"
        assert vars(copied)["_spark_hvd_group"]._group is dist.group.WORLD

    world.run(fn)
