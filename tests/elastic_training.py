"""A training step for elastic ranks, and the resources that must not grow from generation to generation."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch

import spark_hvd.torch as hvd
from tests.elastic_ranks import TrainState


def model_of(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 8, generator=generator)


def weights(model: torch.nn.Module) -> list[float]:
    return torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()


def train_a_step(state: TrainState, step: int) -> None:
    """Make a step with a DistributedOptimizer of SGD, rate 0.1. Raise if gradients are not the ranks' average."""
    before = [param.detach().clone() for param in state.model.parameters()]
    state.optimizer.zero_grad()
    state.model(batch(step, hvd.rank())).square().mean().backward()
    state.optimizer.step()
    after = [param.detach().clone() for param in state.model.parameters()]
    expected = model_of()
    for param, value in zip(expected.parameters(), before, strict=True):
        param.data.copy_(value)
    for rank in range(hvd.size()):
        (expected(batch(step, rank)).square().mean() / hvd.size()).backward()
    for param, value, new in zip(expected.parameters(), before, after, strict=True):
        torch.testing.assert_close(new, value - 0.1 * param.grad)


def resources() -> dict[str, int]:
    """Return the resources that a rank must not accumulate over generations."""
    maps = Path("/proc/self/maps").read_text()
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "memory segments": maps.count("memfd:spark_hvd"),
        "teardowns": sum(thread.name == "spark_hvd-teardown" for thread in threading.enumerate()),
    }
