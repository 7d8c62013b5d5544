"""What LocalSGD and DiLoCo do on real ranks; the oracle is one process that trains a copy for each rank."""

from __future__ import annotations

import copy
import itertools
import math
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

    def __init__(
        self,
        size: int,
        rate: float = 0.7,
        momentum: float = 0.9,
        overlap: int = 0,
        alpha: float | None = None,
        bounds: tuple[int, ...] = (),
    ) -> None:
        self.models = [net() for _ in range(size)]
        self.optimizers = [inner(model) for model in self.models]
        self.rate, self.momentum, self.overlap, self.alpha = rate, momentum, overlap, alpha
        self.anchor = weights(self.models[0])
        self.velocity = torch.zeros_like(self.anchor)
        edges = (0, *bounds, len(self.anchor))
        self.parts = [slice(*pair) for pair in itertools.pairwise(edges)]
        """The places of each fragment."""

    def train(self, steps: int = STEPS, every: int = EVERY) -> None:
        count = len(self.parts)
        since = [0] * count
        begun: list[tuple[int, list[torch.Tensor]] | None] = [None] * count
        due = [math.ceil(every * (number + 1) / count) for number in range(count)]

        def begin(number: int) -> None:
            begun[number] = since[number], [weights(model)[self.parts[number]] for model in self.models]

        def end(number: int) -> None:
            at, start = begun[number] or (0, [])
            self.outer_step(number, start, more=since[number] > at)
            since[number], begun[number], due[number] = since[number] - at, None, every

        for step_number in range(steps):
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                step(model, optimizer, batch(rank, step_number))
            for number in range(count):
                since[number] += 1
                if begun[number] is None and since[number] >= due[number]:
                    begin(number)
                if (flying := begun[number]) is not None and since[number] - flying[0] >= self.overlap:
                    end(number)
        for number in range(count):
            if begun[number] is not None:
                end(number)
        for number in range(count):
            if since[number]:
                begin(number)
                end(number)

    def outer_step(self, number: int, begun: list[torch.Tensor], *, more: bool) -> None:
        part = self.parts[number]
        gradient = self.anchor[part] - torch.stack(begun).mean(0)
        self.velocity[part] = self.momentum * self.velocity[part] + gradient
        self.anchor[part] -= self.rate * (gradient + self.momentum * self.velocity[part])
        statistics = torch.stack([averages(model) for model in self.models]).mean(0)
        for model, start in zip(self.models, begun, strict=True):
            values = weights(model)
            if self.alpha is None or not more:
                values[part] += self.anchor[part] - start
            else:
                values[part] = self.alpha * values[part] + (1 - self.alpha) * self.anchor[part]
            put(values, model.parameters())
            if not self.overlap and number == len(self.parts) - 1:
                put(statistics, [each for each in model.buffers() if each.is_floating_point()])


def same_everywhere(model: nn.Module) -> None:
    everywhere = hvd.allgather(torch.cat([weights(model), averages(model)])[None])
    assert all(torch.equal(row, everywhere[0]) for row in everywhere)


def train(model: nn.Module, optimizer: hvd.OuterOptimizer, rank: int, steps: int = STEPS) -> None:
    for number in range(steps):
        step(model, optimizer, batch(rank, number))


def local_sgd_is_the_average(rank: int, size: int) -> None:
    """This covers parameters and batch norm's statistics; schedulers created earlier see the same optimizer."""
    model, oracle = net(), Oracle(size, rate=1.0, momentum=0.0)
    plain = inner(model)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1000)
    optimizer = hvd.LocalSGD(model, plain, EVERY)
    assert optimizer is plain
    model.double().float()  # gives the module other buffers
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
    """With its default outer optimizer, with another one, and with exchanges that are applied late."""
    for overlap, given in ((0, False), (0, True), (2, False)):
        oracle = Oracle(size, overlap=overlap)
        if given:
            oracle.rate, oracle.momentum = 0.5, 0.0
        as_one_process(oracle, rank, given=given)


def fragments_are_exchanged_at_times_of_their_own(rank: int, size: int) -> None:
    """The result equals that of one process: at once or late, with the rank's own steps kept or mixed."""
    first = net()[0]
    bound = first.weight.numel() + first.bias.numel()  # type: ignore[operator, union-attr]
    for overlap, alpha in ((0, None), (1, None), (3, None), (1, 0.5), (3, 0.25), (2, 0.0)):
        rounds = as_one_process(Oracle(size, overlap=overlap, alpha=alpha, bounds=(bound,)), rank)
        if not overlap:
            # With 8 + 48 and 25 parameters: one after 2, 6 and 10 steps, the other after 4, 8 and 12.
            assert rounds == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def as_one_process(oracle: Oracle, rank: int, *, given: bool = False) -> list[int]:
    """Compare DiLoCo with the oracle, including the number of exchanges applied after each step."""
    model = net()
    layers = [list(model[0].parameters()), list(model[1].parameters())] if len(oracle.parts) > 1 else 1
    optimizer = hvd.DiLoCo(
        model,
        inner(model),
        EVERY,
        outer_optimizer=torch.optim.SGD(model.parameters(), lr=oracle.rate) if given else None,
        overlap=oracle.overlap,
        alpha=oracle.alpha,
        fragments=layers if layers == 1 else layers[:1],
        average_buffers=oracle.overlap == 0,
    )
    rounds = []
    for number in range(STEPS):
        step(model, optimizer, batch(rank, number))
        rounds.append(optimizer.rounds)
    optimizer.synchronize()
    oracle.train()
    torch.testing.assert_close(weights(model), weights(oracle.models[0]), rtol=1e-4, atol=1e-5)
    assert optimizer.local_steps == 0
    same_everywhere(model) if not oracle.overlap else None
    return rounds


def compression_loses_nothing_for_good(rank: int, size: int) -> None:
    """The next rows contain what a row lacks: a constant change arrives completely, however little is sent at once."""
    kinds: list[tuple[Any, float, int]] = [
        (hvd.Compression.fp16, 1e-3, 8),
        (hvd.Compression.bf16, 1e-2, 8),
        (hvd.Int8Compressor(block_size=7), 1e-2, 8),
        (hvd.Int4Compressor(block_size=6), 0.1, 8),
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
        # The compression error is bounded, however long training lasts.
        assert float(((param.detach() - expected).abs() / steps).max()) < tolerance * float(expected.max() / steps)
        everywhere = hvd.allgather(param.detach()[None])
        assert all(torch.equal(row, everywhere[0]) for row in everywhere)


def states_go_on_to_the_bit(rank: int, size: int) -> None:
    """Saved between two rounds and loaded into new objects: outer momentum, anchors and compression errors."""
    for fragments, compression, alpha in ((1, hvd.Int8Compressor(), None), (2, hvd.Int4Compressor(16), 0.5)):

        def made(*options: Any) -> tuple[nn.Module, hvd.OuterOptimizer]:
            model, (parts, kind, share) = net(), options
            return model, hvd.DiLoCo(
                model, inner(model), EVERY, compression=kind, overlap=1, fragments=parts, alpha=share
            )

        model, optimizer = made(fragments, compression, alpha)
        train(model, optimizer, rank, EVERY + 3)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        again, other = made(fragments, compression, alpha)
        again.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        assert (other.rounds, other.local_steps) == ((1, 3) if fragments == 1 else (3, 3))
        for each, its in ((model, optimizer), (again, other)):
            for number in range(20, 20 + STEPS):
                step(each, its, batch(rank, number))
            its.synchronize()
        assert torch.equal(weights(model), weights(again))
    with pytest.raises(ValueError, match=r"lacks 'outer'.*Load it before"):
        other.load_state_dict(inner(net()).state_dict())


def what_was_in_flight_is_sent_again(rank: int, size: int) -> None:
    """A state is loaded while each fragment's exchange is in flight: each step finally counts once."""
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5))]
    optimizer = hvd.LocalSGD(params, torch.optim.SGD(params, lr=1.0), 2, overlap=1, fragments=2)
    for number in range(6):
        for param in params:
            param.grad = torch.full_like(param, -(rank + 1.0))
        optimizer.step()
        if number == 2:  # after an odd number one is in flight, after an even number the other
            saved = copy.deepcopy((params, optimizer.state_dict()))
            put(torch.cat(saved[0]).detach(), params)
            optimizer.load_state_dict(saved[1])
    optimizer.synchronize()
    for param in params:
        torch.testing.assert_close(param.detach(), torch.full_like(param, 6 * (size + 1) / 2))


def what_is_lost_is_sent_once(rank: int, size: int) -> None:
    """By an optimizer without compression, and by synchronize(), after which one rank's state serves all."""

    def made(compression: Any) -> tuple[nn.Parameter, hvd.OuterOptimizer]:
        param = nn.Parameter(torch.zeros(6))
        return param, hvd.LocalSGD([param], torch.optim.SGD([param], lr=1.0), 1, compression=compression)

    def go(param: nn.Parameter, optimizer: hvd.OuterOptimizer, slope: float) -> float:
        param.grad = -slope * torch.arange(1.0, 7.0)
        optimizer.step()
        return float(param.detach().sum())

    first, second = made(hvd.TopKCompressor(0.3)), made(hvd.Compression.none)
    assert go(*first, 1.0) == 11
    state = first[1].state_dict()
    lost = state["outer"]["lost"][0].clone()
    second[1].load_state_dict(copy.deepcopy(state))
    put(first[0].detach(), [second[0]])
    assert [go(*second, 0.0) for _ in range(3)] == [21, 21, 21]
    first[1].synchronize()
    assert float(first[0].detach().sum()) == 21
    assert torch.equal(lost, state["outer"]["lost"][0])
    assert not first[1].state_dict()["outer"]["lost"][0].any()


def ranks_that_have_less(rank: int, size: int) -> None:
    """They join; the others continue among themselves, and synchronize() gives their parameters to all."""
    for fragments, steps, rounds in ((1, STEPS, 4), (2, STEPS, 8), (1, STEPS - 1, 3)):
        model = net()
        optimizer = hvd.DiLoCo(model, inner(model), EVERY, fragments=fragments)
        train(model, optimizer, rank, steps if rank == size - 1 else EVERY + 1)
        assert hvd.join() == size - 1
        mine = weights(model)
        optimizer.synchronize()
        assert (optimizer.local_steps, optimizer.rounds) == (0, rounds)
        same_everywhere(model)
        assert torch.equal(mine, weights(model)) is (rank == size - 1 and steps < STEPS)


def a_process_set_of_one(rank: int, size: int) -> None:
    """Other ranks stay local."""
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
    """The message has the value, the expectation and the next step."""
    model = net()
    plain, reduced = inner(model), hvd.DistributedOptimizer(inner(net()))
    for error, said, call in (
        (ValueError, "sync_every=0: expected", lambda: hvd.LocalSGD(model, plain, 0)),
        (
            ValueError,
            "overlap=4: expected a number of steps from 0 to 3",
            lambda: hvd.DiLoCo(model, plain, 4, overlap=4),
        ),
        (ValueError, "alpha=0.5 with overlap=0: expected", lambda: hvd.DiLoCo(model, plain, 4, alpha=0.5)),
        (ValueError, "alpha=1 with overlap=1: expected", lambda: hvd.DiLoCo(model, plain, 4, overlap=1, alpha=1)),
        (ValueError, "alpha=False with", lambda: hvd.DiLoCo(model, plain, 4, overlap=1, alpha=False)),
        *(
            (ValueError, "expected how many", lambda parts=parts: hvd.LocalSGD(model, plain, 4, fragments=parts))
            for parts in (0, None, 2.0, [], [[], []])
        ),
        (ValueError, "fragments: 5 of them with sync_every=2", lambda: hvd.LocalSGD(model, plain, 2, fragments=9)),
        (
            ValueError,
            "not a parameter of the optimizer",
            lambda: hvd.LocalSGD(model, plain, 4, fragments=[[nn.Parameter(torch.ones(1))]]),
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
