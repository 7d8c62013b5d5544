"""What LocalSGD and DiLoCo do on real ranks; the oracle is one process that trains a copy for each rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import spark_hvd.torch as hvd

STEPS, EVERY = 13, 4


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def averages(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.flatten() for each in model.buffers() if each.is_floating_point()])


def put(values: torch.Tensor, tensors: Any) -> None:
    for tensor in tensors:
        part, values = values[: tensor.numel()], values[tensor.numel() :]
        tensor.data.copy_(part.view_as(tensor))


class Oracle:
    """All ranks in one process. The outer step is written out: SGD with Nesterov momentum, or none."""

    def __init__(self, size: int, rate: float = 0.7, momentum: float = 0.9, overlap: int = 0) -> None:
        self.models = [net() for _ in range(size)]
        self.optimizers = [inner(model) for model in self.models]
        self.rate, self.momentum, self.overlap = rate, momentum, overlap
        self.anchor = weights(self.models[0])
        self.velocity = torch.zeros_like(self.anchor)

    def train(self, steps: int = STEPS, every: int = EVERY) -> None:
        since, begun = 0, None
        for number in range(steps):
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                step(model, optimizer, batch(rank, number))
            since += 1
            if begun is None and since >= every:
                begun = [weights(model) for model in self.models]
            if begun is not None and since >= every + self.overlap:
                self.outer_step(begun)
                since, begun = since - every, None
        if begun is not None:
            self.outer_step(begun)
        if since:
            self.outer_step([weights(model) for model in self.models])

    def outer_step(self, begun: list[torch.Tensor]) -> None:
        gradient = self.anchor - torch.stack(begun).mean(0)
        self.velocity = self.momentum * self.velocity + gradient
        self.anchor = self.anchor - self.rate * (gradient + self.momentum * self.velocity)
        statistics = torch.stack([averages(model) for model in self.models]).mean(0)
        for model, start in zip(self.models, begun, strict=True):
            put(self.anchor + (weights(model) - start), model.parameters())
            if not self.overlap:
                put(statistics, [each for each in model.buffers() if each.is_floating_point()])


def same_everywhere(model: nn.Module) -> None:
    everywhere = hvd.allgather(torch.cat([weights(model), averages(model)])[None])
    assert all(torch.equal(row, everywhere[0]) for row in everywhere)


def train(model: nn.Module, optimizer: hvd.OuterOptimizer, rank: int, steps: int = STEPS) -> None:
    for number in range(steps):
        step(model, optimizer, batch(rank, number))


def local_sgd_is_the_average(rank: int, size: int) -> None:
    """Of parameters and of batch norm's statistics; schedulers made before see the same optimizer."""
    model, oracle = net(), Oracle(size, rate=1.0, momentum=0.0)
    plain = inner(model)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1000)
    optimizer = hvd.LocalSGD(model, plain, EVERY)
    assert optimizer is plain
    for number in range(EVERY):
        step(model, optimizer, batch(rank, number))
        scheduler.step()
        assert optimizer.local_steps == (number + 1) % EVERY
    same_everywhere(model)
    for number in range(EVERY, STEPS):
        step(model, optimizer, batch(rank, number))
    assert (optimizer.rounds, optimizer.local_steps) == (3, 1)
    optimizer.synchronize()
    same_everywhere(model)
    oracle.train()
    torch.testing.assert_close(weights(model), weights(oracle.models[0]))
    torch.testing.assert_close(averages(model), averages(oracle.models[0]))
    count = optimizer.rounds
    optimizer.synchronize()
    assert optimizer.rounds == count


def diloco_is_the_paper(rank: int, size: int) -> None:
    """With its outer optimizer, with one that is given, and with exchanges that are applied late."""
    for overlap, given in ((0, False), (0, True), (2, False)):
        model, oracle = net(), Oracle(size, overlap=overlap)
        outer = None
        if given:
            oracle.rate, oracle.momentum = 0.5, 0.0
            outer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = hvd.DiLoCo(
            model, inner(model), EVERY, outer_optimizer=outer, overlap=overlap, average_buffers=overlap == 0
        )
        train(model, optimizer, rank)
        optimizer.synchronize()
        oracle.train()
        torch.testing.assert_close(weights(model), weights(oracle.models[0]), rtol=1e-4, atol=1e-5)
        assert optimizer.local_steps == 0
        optimizer = None  # type: ignore[assignment]


def compression_loses_nothing_for_good(rank: int, size: int) -> None:
    """What a row lacks is in the next ones: a constant change arrives whole, whatever is sent of it at a time."""
    kinds: list[tuple[Any, float, int]] = [
        (hvd.Compression.fp16, 1e-3, 8),
        (hvd.Compression.bf16, 1e-2, 8),
        (hvd.Int8Compressor(block_size=7), 1e-2, 8),
        (hvd.TopKCompressor(ratio=0.3), 0.5, 40),
    ]
    for compression, tolerance, steps in kinds:
        param = nn.Parameter(torch.zeros(20))
        optimizer = hvd.LocalSGD([param], torch.optim.SGD([param], lr=1.0), 1, compression=compression)
        slope = torch.linspace(0.1, 2.0, 20).roll(5) * (1 + rank)
        for _ in range(steps):
            param.grad = -slope
            optimizer.step()
        expected = torch.linspace(0.1, 2.0, 20).roll(5) * (size + 1) / 2 * steps
        # What is still owed is bounded, however long it went on.
        assert float(((param.detach() - expected).abs() / steps).max()) < tolerance * float(expected.max() / steps)
        everywhere = hvd.allgather(param.detach()[None])
        assert all(torch.equal(row, everywhere[0]) for row in everywhere)


def states_go_on_to_the_bit(rank: int, size: int) -> None:
    """Saved between two rounds, loaded into new objects: outer momentum, anchors and what compression owes."""

    def made() -> tuple[nn.Module, hvd.OuterOptimizer]:
        model = net()
        return model, hvd.DiLoCo(model, inner(model), EVERY, compression=hvd.Int8Compressor(), overlap=1)

    model, optimizer = made()
    train(model, optimizer, rank, EVERY + 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, other = made()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert (other.rounds, other.local_steps) == (1, 2)
    for each, its in ((model, optimizer), (again, other)):
        for number in range(20, 20 + STEPS):
            step(each, its, batch(rank, number))
        its.synchronize()
    assert torch.equal(weights(model), weights(again))
    with pytest.raises(ValueError, match=r"lacks 'outer'.*Load it before"):
        other.load_state_dict(inner(net()).state_dict())


def ranks_that_have_less(rank: int, size: int) -> None:
    """They join; the others go on among themselves, and synchronize() gives their parameters to all."""
    model = net()
    optimizer = hvd.DiLoCo(model, inner(model), EVERY, average_buffers=False)
    train(model, optimizer, rank, STEPS if rank == size - 1 else EVERY + 1)
    assert hvd.join() == size - 1
    mine = weights(model)
    optimizer.synchronize()
    assert (optimizer.local_steps, optimizer.rounds) == (0, 4)
    everywhere = hvd.allgather(weights(model)[None])
    assert all(torch.equal(row, everywhere[0]) for row in everywhere)
    assert not torch.equal(mine, weights(model))


def a_process_set_of_one(rank: int, size: int) -> None:
    """Others stay local."""
    alone = hvd.add_process_set([0])
    model, plain = net(), net()
    optimizer = hvd.DiLoCo(model, inner(model), EVERY, process_set=alone)
    train(model, optimizer, rank)
    optimizer.synchronize()
    assert optimizer.rounds == (4 if rank == 0 else 0)
    reference = inner(plain)
    for number in range(STEPS):
        step(plain, reference, batch(rank, number))
    assert torch.equal(weights(plain), weights(model)) is (rank != 0)
    hvd.remove_process_set(alone)


def what_is_wrong_is_said(rank: int, size: int) -> None:
    """Value, what was expected, what to do."""
    model = net()
    plain, reduced = inner(model), hvd.DistributedOptimizer(inner(net()))
    for error, said, call in (
        (ValueError, "sync_every=0: expected", lambda: hvd.LocalSGD(model, plain, 0)),
        (
            ValueError,
            "overlap=4: expected a number of steps from 0 to 3",
            lambda: hvd.DiLoCo(model, plain, 4, overlap=4),
        ),
        (ValueError, "compression='int8': expected", lambda: hvd.LocalSGD(model, plain, 4, compression="int8")),
        (TypeError, "optimizer=.*SGD.*: expected", lambda: hvd.LocalSGD(model, torch.optim.SGD, 4)),
        (TypeError, "outer_optimizer=0.7: expected", lambda: hvd.DiLoCo(model, plain, 4, outer_optimizer=0.7)),
        (
            ValueError,
            "outer_optimizer has 6 parameters",
            lambda: hvd.DiLoCo(model, plain, 4, outer_optimizer=inner(net())),
        ),
        (ValueError, "do not belong to the model", lambda: hvd.LocalSGD(net(), plain, 4)),
        (TypeError, "model is int; expected", lambda: hvd.LocalSGD(3, plain, 4)),
        (ValueError, "ratio=2: expected", lambda: hvd.TopKCompressor(2)),
        (ValueError, "block_size=0: expected", lambda: hvd.Int8Compressor(0)),
        (ValueError, "already an hvd.DistributedOptimizer", lambda: hvd.LocalSGD(model, reduced, 4)),
    ):
        with pytest.raises(error, match=said):
            call()
    optimizer = hvd.LocalSGD(model, inner(model), 4)
    with pytest.raises(RuntimeError, match=r"add_param_group\(\) after"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match=r"already an hvd.LocalSGD"):
        hvd.DiLoCo(model, optimizer, 4)
    apart = net(rank)
    optimizer = hvd.LocalSGD(apart, inner(apart), 4)
    with pytest.raises(hvd.MismatchError, match=r"start from different weights.*broadcast_parameters"):
        step(apart, optimizer, batch(rank, 0))
    unlike = net()
    optimizer = hvd.LocalSGD(unlike, inner(unlike), 4 + rank)
    with pytest.raises(hvd.PlanMismatchError, match="LocalSGD needs the same"):
        step(unlike, optimizer, batch(rank, 0))


def low_precision_keeps_small_steps(rank: int, size: int) -> None:
    """The common parameters are float32, so outer steps below bfloat16's precision add up."""
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    plain = torch.optim.SGD([param], lr=1.0)
    optimizer = hvd.DiLoCo([param], plain, 1, outer_optimizer=torch.optim.SGD([param], lr=0.1))
    for _ in range(10):
        param.grad = torch.full_like(param, 1 / 128)
        optimizer.step()
    torch.testing.assert_close(param.float(), torch.full((4,), 1 - 1 / 128), rtol=0, atol=1 / 256)
    assert param.dtype == torch.bfloat16
    assert bool((param < 1).all())
