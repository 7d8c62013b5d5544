"""Commits of a training on a GPU: copied at the same time, and exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import spark_hvd.torch as hvd


def training(device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(1024, 1024), torch.nn.BatchNorm1d(1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024)]
    net = torch.nn.Sequential(*layers, *copy.deepcopy(layers)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    step(net, optimizer, device)
    return net, optimizer, hvd.elastic.TorchState(net, optimizer, loss=torch.zeros((), device=device))


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    optimizer.zero_grad()
    net(torch.randn(256, 1024, device=device)).square().mean().backward()
    optimizer.step()


def contents(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [*net.state_dict().values()]
    return [each.clone() for each in tensors + [item for one in optimizer.state.values() for item in one.values()]]


def test_commits_are_exact(device: str) -> None:
    net, optimizer, state = training(device)
    for number in range(5):
        step(net, optimizer, device)
        state.loss += 1
        expected = contents(net, optimizer)
        state.save()
        state.loss += 1
        for _ in range(3):  # at once, while the copy is under way
            step(net, optimizer, device)
        state.restore()
        restored = contents(net, optimizer)
        assert len(restored) == len(expected)
        for mine, theirs in zip(restored, expected, strict=True):
            assert mine.device == theirs.device
            assert torch.equal(mine, theirs)
        assert (state.loss.item(), state.loss.device.type, state.commits) == (number + 1, device, number)


def test_a_change_by_others_makes_a_commit_void(device: str) -> None:
    net, optimizer, state = training(device)
    state.save()
    expected = contents(net, optimizer)
    step(net, optimizer, device)
    state.save()
    with torch.no_grad():
        net[0].weight.zero_()  # type: ignore[operator]
    with pytest.warns(UserWarning, match="changed between state.commit"):
        state.restore()
    assert state.commits == 0
    for mine, theirs in zip(contents(net, optimizer), expected, strict=True):
        assert torch.equal(mine, theirs)
