"""Everything that the table of reports names exists; and the reports that no other test covers."""

from __future__ import annotations

import ast
import copy
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import spark_hvd.torch as hvd
from tests.ranks import Ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])
HERE = Path(__file__).parent
LINK = re.compile(r"\[(test_\w+)\]\(([\w./]+)\)")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def test_each_report_has_a_test_that_exists() -> None:
    rows = [line for line in (HERE / "README.md").read_text().splitlines() if line.startswith("| [")]
    assert len(rows) >= 20
    for row in rows:
        report, *_, tests = row.strip("| ").split(" | ")
        assert re.match(r"\[[\w.-]+/[\w.-]+#\d+\]\(https://github\.com/[\w./-]+/\d+\)", report), row
        links = LINK.findall(tests)
        assert links, row
        for name, file in links:
            tree = ast.parse((HERE / file).read_text())
            assert name in {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}, (name, file)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(3, 1)


def rows(step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))


def test_broadcasting_the_state_of_an_optimizer_changes_nothing_of_it(two: Ranks) -> None:
    """It makes no step, which Adam would count."""

    def fn() -> bool:
        net = model()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        before = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        net(rows(hvd.rank() * 0)).sum().backward()
        plain = copy.deepcopy(net), None
        first = torch.optim.Adam(plain[0].parameters(), lr=0.1)
        for mine, its in zip(plain[0].parameters(), net.parameters(), strict=True):
            assert its.grad is not None
            mine.grad = its.grad.clone()
        assert all(
            torch.equal(one, two) for one, two in zip(net.state_dict().values(), before[0].values(), strict=True)
        )
        assert optimizer.state_dict()["param_groups"] == before[1]["param_groups"]
        for each in (optimizer, first):
            each.step()
        return all(torch.equal(one, two) for one, two in zip(net.parameters(), plain[0].parameters(), strict=True))

    assert two.run(fn) == [True, True]


def test_a_last_step_of_fewer_passes_and_the_next_epoch(two: Ranks) -> None:
    """Ten batches in steps of four, twice: the last two of an epoch form their own step, as in one process."""

    def train(net: nn.Module, optimizer: Any, parts: list[slice]) -> dict[str, torch.Tensor]:
        for _ in range(2):
            for batch in range(10):
                for part in parts:
                    (net(rows(batch)[part]).square().mean() / 4 / len(parts)).backward()
                if batch % 4 == 3 or batch == 9:
                    optimizer.step()
                    optimizer.zero_grad()
        return net.state_dict()

    def fn() -> dict[str, torch.Tensor]:
        net = model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), backward_passes_per_step=4)
        return train(net, optimizer, [slice(2 * hvd.rank(), 2 * hvd.rank() + 2)])

    net = model()
    alone = train(net, torch.optim.SGD(net.parameters(), lr=0.1), [slice(0, 2), slice(2, 4)])
    for found in two.run(fn):
        for name, wanted in alone.items():
            torch.testing.assert_close(found[name], wanted)
