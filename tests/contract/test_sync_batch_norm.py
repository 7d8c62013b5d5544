"""SyncBatchNorm on 1, 2 and 3 ranks, compared with torch's BatchNorm on the joined batch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.torch.sync_batch_norm import SyncBatchNorm
from tests.contract.sync_batch_norm_cases import CHANNELS, EXACT, compare, joined_batch, mine, pair, uneven
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow), 3])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks(request.param) as started:
        started.run(torch.set_num_threads, 1)
        yield started


@pytest.mark.parametrize("dimensions", [2, 3, 4, 5])
def test_equals_batch_norm_on_the_joined_batch(world: Ranks, dimensions: int) -> None:
    def fn() -> None:
        for counts in uneven():
            compare(*pair(dimensions), counts, dimensions)

    world.run(fn)


@pytest.mark.parametrize(
    "arguments",
    [
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
        {"affine": False},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_arguments(world: Ranks, arguments: dict[str, Any]) -> None:
    def fn() -> None:
        for counts in uneven():
            if arguments.get("track_running_stats", True):
                compare(*pair(4, **arguments), counts, 4)
        ours, theirs = pair(4, track_running_stats=False)
        counts = [3] * hvd.size()
        compare(ours, theirs, counts, 4)  # in eval mode each rank uses its own batch, as with torch

    world.run(fn)


def test_channels_last(world: Ranks) -> None:
    def fn() -> None:
        for dimensions, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            compare(
                *pair(dimensions), [3 + rank for rank in range(hvd.size())], dimensions, memory_format=memory_format
            )
        ours, theirs = pair(4)
        whole = joined_batch([3] * hvd.size(), 4, 0)
        strided = mine(whole, [3] * hvd.size()).transpose(2, 3)
        torch.testing.assert_close(ours(strided), mine(theirs(whole.transpose(2, 3)), [3] * hvd.size()), **EXACT)

    world.run(fn)


def test_large_mean_does_not_cancel(world: Ranks) -> None:
    def fn() -> None:
        counts = [6 + rank for rank in range(hvd.size())]
        ours, theirs = pair(4)
        whole = (joined_batch(counts, 4, 0) + 1e4).float()  # E[x^2] - E[x]^2 would be off by more than the variance
        expected = mine(theirs(whole.double()), counts)
        torch.testing.assert_close(ours.float()(mine(whole, counts)).double(), expected, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(ours.running_var.double(), theirs.running_var, rtol=1e-4, atol=0)

    world.run(fn)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_dtypes(world: Ranks, dtype: torch.dtype) -> None:
    def fn() -> None:
        counts = [40 + rank for rank in range(hvd.size())]
        tolerance: dict[str, Any] = {"rtol": 0.0, "atol": 8 * torch.finfo(dtype).eps}
        for module_dtype in (torch.float32, dtype):
            ours, theirs = pair(4)
            whole = joined_batch(counts, 4, 0).to(dtype).double().requires_grad_()
            part = mine(whole, counts).detach().to(dtype).requires_grad_()
            weights = joined_batch(counts, 4, 1).sign()
            expected, output = theirs(whole), ours.to(module_dtype)(part)
            assert output.dtype == dtype
            torch.testing.assert_close(output.double(), mine(expected, counts), **tolerance)
            (expected * weights).sum().backward()
            (output * mine(weights, counts).to(dtype)).sum().backward()
            assert whole.grad is not None
            assert part.grad is not None
            assert part.grad.dtype == dtype
            torch.testing.assert_close(part.grad.double(), mine(whole.grad, counts), **tolerance)
            assert {tensor.dtype for tensor in ours.parameters()} == {module_dtype}
            assert ours.weight.grad.dtype == module_dtype
            torch.testing.assert_close(ours.running_mean.double(), theirs.running_mean, rtol=0, atol=tolerance["atol"])

    world.run(fn)


def test_autocast(world: Ranks) -> None:
    def fn() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, CHANNELS), SyncBatchNorm(CHANNELS), torch.nn.Linear(CHANNELS, 1))
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.randn(8, 4))
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        assert all(
            parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in model.parameters()
        )

    world.run(fn)


def test_training_equals_one_process(world: Ranks) -> None:
    def fn() -> None:
        size = hvd.size()
        counts = [3 + 2 * rank for rank in range(size - 1)] + [4]
        torch.manual_seed(0)
        alone = torch.nn.Sequential(
            torch.nn.Conv2d(CHANNELS, 4, 2),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(inplace=True),
            torch.nn.Flatten(),
            torch.nn.Linear(24, 3),
            torch.nn.BatchNorm1d(3),
        ).double()
        model = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
        settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
        expected_optimizer = torch.optim.SGD(alone.parameters(), **settings)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), **settings), model.named_parameters(), op=hvd.Sum
        )
        for step in range(6):
            whole = joined_batch(counts, 4, step)
            targets = joined_batch(counts, 2, step + 50)[:, :3]
            for net, steps, batch, target in (
                (alone, expected_optimizer, whole, targets),
                (model, optimizer, mine(whole, counts), mine(targets, counts)),
            ):
                steps.zero_grad()
                ((net(batch) - target).square().sum() / sum(counts)).backward()
                steps.step()
        for our, their in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
            torch.testing.assert_close(our, their, **EXACT)

    world.run(fn)
