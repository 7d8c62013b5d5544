"""Weights of sharded tables if a program replaces them, gathers them with an optimizer's state, or clips them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import spark_hvd.torch as hvd
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DIM = 4


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks(request.param) as world:
        yield world


def assign_by_loading(model: nn.Module, whole: torch.Tensor) -> None:
    model.load_state_dict({"0.weight": whole, "1.weight": torch.ones(1, DIM)}, assign=True, strict=False)


def assign_a_parameter(model: Any, whole: torch.Tensor) -> None:
    model[0].weight = nn.Parameter(whole[hvd.rank() :: hvd.size()].clone())


@pytest.mark.parametrize("assign", [assign_by_loading, assign_a_parameter])
def test_an_assigned_weight_is_a_table_too(world: Ranks, assign: Callable[[nn.Module, torch.Tensor], None]) -> None:
    rows = 6 * 2  # equally many on each of two or three ranks

    def fn() -> None:
        whole = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(1))
        model = nn.Sequential(hvd.ShardedEmbedding(rows, DIM), nn.Linear(DIM, 1))
        assign(model, whole)
        model, optimizer = hvd.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        assert torch.equal(model[0].weight, whole[hvd.rank() :: hvd.size()])  # not those of rank 0
        loss = model[0](torch.tensor([hvd.rank()])).sum() * (hvd.rank() + 1)
        loss.backward()
        optimizer.step()
        expected = whole.clone()
        for rank in range(hvd.size()):
            expected[rank] -= (rank + 1) / hvd.size()
        state = hvd.whole_state_dict(model[0])
        assert state is not None
        torch.testing.assert_close(state["weight"], expected)
        model[0].weight = nn.Parameter(whole)
        with pytest.raises(ValueError, match="has 12 rows, and this rank has"):
            model[0](torch.tensor([0]))

    world.run(fn)


def test_state_that_has_as_many_entries_as_a_rank_has_rows(world: Ranks) -> None:
    rows = torch.tensor([2])

    def fn() -> None:
        table = hvd.ShardedEmbedding(hvd.size() + 1, DIM, sparse=False)  # the last rank has one row
        optimizer = torch.optim.Adafactor(table.parameters())
        table(rows).square().sum().backward()
        optimizer.step()
        state = hvd.whole_state_dict(optimizer)
        assert state is not None
        assert {name: len(value) for name, value in state["state"][0].items() if value.dim()} == {
            "row_var": hvd.size() + 1,
            "col_var": 1,
        }

    world.run(fn)


def test_clipping_by_the_norm_of_all_ranks(world: Ranks) -> None:
    """As in docs/embeddings.md."""

    def fn() -> None:
        whole = torch.randn(8, DIM, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(0)
        layer = nn.Linear(DIM, 1)
        plain = nn.Sequential(nn.Embedding.from_pretrained(whole.clone(), freeze=False), copy.deepcopy(layer))
        table = hvd.ShardedEmbedding(8, DIM, sparse=False)
        table.load_state_dict({"weight": whole})
        model, optimizer = hvd.prepare(
            nn.Sequential(table, layer), torch.optim.SGD([table.weight, *layer.parameters()], lr=1.0)
        )
        ids = [torch.tensor([0, 2, 3]) + rank for rank in range(hvd.size())]

        def square(params: list[nn.Parameter]) -> torch.Tensor:
            return torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None]) ** 2

        model(ids[hvd.rank()]).square().sum().backward()
        norm = (hvd.allreduce(square([table.weight]), op=hvd.Sum) + square(list(layer.parameters()))).sqrt()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        optimizer.step()

        sum(plain(each).square().sum() for each in ids).div(hvd.size()).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.optim.SGD(plain.parameters(), lr=1.0).step()
        torch.testing.assert_close(layer.weight, plain[1].weight)
        torch.testing.assert_close(table.weight, plain[0].weight[hvd.rank() :: hvd.size()])

    world.run(fn)
