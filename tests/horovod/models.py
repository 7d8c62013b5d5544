"""Models, every kind of optimizer, and comparison of their state, for the tests of the optimizer."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import spark_hvd.torch as hvd

# LBFGS needs a closure, SparseAdam sparse gradients, Muon matrices.
SPECIAL = {"Optimizer", "LBFGS", "SparseAdam", "Muon"}


def optimizer_classes() -> list[Any]:
    found = {value for value in vars(torch.optim).values() if inspect.isclass(value) and value.__name__ not in SPECIAL}
    return sorted((cls for cls in found if issubclass(cls, torch.optim.Optimizer)), key=lambda cls: cls.__name__)


def accepted(cls: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in inspect.signature(cls.__init__).parameters}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 4))


def make(cls: Any, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(hvd.rank())  # different weights on every rank
    model = network()
    inner = cls(model.parameters(), **accepted(cls, options))
    return model, hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())


def train(model: nn.Module, optimizer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features, targets = torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)
    optimizer.zero_grad()
    F.mse_loss(model(features), targets, reduction="sum").backward()
    optimizer.step()


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(equal, left, right))
    return type(left) is type(right) and left == right


def on_all_ranks(state: Any) -> list[Any]:
    return hvd.allgather_object(copy.deepcopy(state))
