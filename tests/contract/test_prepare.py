"""hvd.prepare, and the warnings if it was forgotten: different weights, gradients that are reduced twice."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import spark_hvd.torch as hvd
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with ranks(2) as world:
        yield world


def data(count: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(float(count))[:, None])


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> list[str]:
    """Return a step's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [str(each.message) for each in caught]


def test_a_loop_for_one_process(world: Ranks) -> None:
    def fn() -> Any:
        torch.manual_seed(hvd.rank())
        model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + hvd.rank()))
        loader = DataLoader(
            data(), batch_size=2, shuffle=True, collate_fn=lambda rows: torch.stack([r for (r,) in rows])
        )
        same, own, mine = hvd.prepare(model, optimizer, loader)
        again = hvd.prepare(mine, own, same)
        epochs = [[batch.flatten().tolist() for batch in mine] for _ in range(2)]
        warned = step(model, optimizer, torch.ones(2, 1) * hvd.rank())
        weights = torch.cat([param.flatten() for param in model.parameters()]).tolist()
        kept = same is model and own is optimizer and again[0] is mine and again[1] is own
        return kept, type(own).__mro__[1].__name__, own.param_groups[0]["lr"], epochs, warned, weights

    (kept, kind, lr, first, warned, weights), other = world.run(fn)
    assert (kept, kind, lr) == (True, "ReducedOptimizer", 0.1)
    assert other[:3] == (True, "ReducedOptimizer", 0.1)
    for mine, theirs in zip(first, other[3], strict=True):
        assert [len(batch) for batch in mine] == [len(batch) for batch in theirs] == [2, 2, 1]
        assert sorted(row for batch in mine + theirs for row in batch) == [float(row) for row in range(10)]
    assert first[0] != first[1]
    assert weights == other[5]
    assert warned == other[4] == []


def test_what_is_made_for_many_ranks_stays(world: Ranks) -> None:
    def fn() -> Any:
        torch.manual_seed(hvd.rank())
        model = torch.nn.ModuleDict({"part": DistributedDataParallel(torch.nn.Linear(1, 1))})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data(), sampler=DistributedSampler(data(), 2, hvd.rank()))
        prepared = hvd.prepare(model, optimizer, loader)
        return [a is b for a, b in zip(prepared, (model, optimizer, loader), strict=True)], type(optimizer).__name__

    assert world.run(fn) == [([True] * 3, "SGD")] * 2


def test_loaders(world: Ranks) -> None:
    class Mine(DataLoader[Any]):
        pass

    def fn() -> Any:
        ordered = hvd.prepare(Mine(data(5), batch_size=None))
        workers = hvd.prepare(DataLoader(data(), batch_size=4, drop_last=True))
        shuffled = hvd.prepare(DataLoader(data(100), batch_size=None, shuffle=True), seed=1)
        first = [row.item() for (row,) in shuffled]
        shuffled.sampler.set_epoch(0)
        found = [[row.item() for (row,) in ordered], [len(rows) for _ in range(2) for (rows,) in workers]]
        return type(ordered) is Mine, found, first == [row.item() for (row,) in shuffled]

    assert world.run(fn) == [
        (True, [[0.0, 2.0, 4.0], [4, 4]], True),
        (True, [[1.0, 3.0, 0.0], [4, 4]], True),
    ]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: DataLoader(Stream()), r"IterableDataset: its __iter__"),
        (lambda: DataLoader(data(), sampler=WeightedRandomSampler([1.0] * 10, 10)), "its own, WeightedRandomSampler"),
        (lambda: DataLoader(data(), sampler=RandomSampler(data(), num_samples=3)), "its own, RandomSampler"),
        (
            lambda: DataLoader(
                data(), batch_sampler=type("Mine", (BatchSampler,), {})(SequentialSampler(data()), 2, True)
            ),
            "batch_sampler of its own, Mine",
        ),
    ],
)
def test_loaders_that_cannot_be_dealt_out(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        hvd.prepare(make())


def test_other_objects() -> None:
    with pytest.raises(TypeError, match=r"argument 1 of hvd\.prepare is a list"):
        hvd.prepare(torch.nn.Linear(1, 1), [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_different_weights_are_said(dtype: torch.dtype, world: Ranks) -> None:
    def fn() -> Any:
        first, second = (torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
        with torch.no_grad():
            second[1] += hvd.rank() / 64
        named = [("first", first), ("second", second)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=0.1), named)
        return [step(lambda _: (first + second).abs(), optimizer, torch.ones(1)) for _ in range(2)]  # type: ignore[arg-type]

    (told, later), other = world.run(fn)
    assert later == []
    assert other == [[], []]
    assert len(told) == 1
    assert "1 of 2 parameters differ, such as 'second'" in told[0]
    assert "hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in told[0]


def test_reduced_twice_is_said(world: Ranks) -> None:
    def fn() -> Any:
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        return step(model, optimizer, torch.ones(2, 1))

    told, other = world.run(fn)
    assert other == []
    assert ["reduced twice, by DistributedDataParallel" in each for each in told] == [True]
