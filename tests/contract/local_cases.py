"""Rank-local parameters, run by every rank."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd.torch.optimizer.distributed import DistributedOptimizer
from spark_hvd.world.errors import PlanMismatchError
from tests.contract.optimizer_cases import batch, loss_of, net, reducer_of, sgd


def train(optimizer: torch.optim.Optimizer, model: nn.Module, rank: int, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()


def oracle_gradient(model: nn.Module, rank: int, place: int) -> torch.Tensor:
    """The gradient that autograd computes here, before any exchange."""
    return torch.autograd.grad(loss_of(model, batch(rank, 0)), list(model.parameters()))[place]


def same_on_all(tensor: torch.Tensor) -> bool:
    gathered = hvd.allgather(tensor.detach()[None])
    return all(torch.equal(each, gathered[0]) for each in gathered)


def local_parameters_are_not_reduced(rank: int, size: int) -> None:
    model = net()
    own = model[2].weight
    mine = oracle_gradient(model, rank, 2)
    optimizer = DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), local_parameters=[own])
    loss_of(model, batch(rank, 0)).backward()
    assert own.grad is not None
    torch.testing.assert_close(own.grad, mine / size)
    optimizer.step()
    reducer = optimizer._reducer
    assert reducer is not None
    assert "2.weight" not in [name for bucket in reducer.buckets for name in bucket]
    train(optimizer, model, rank)
    assert not same_on_all(own)
    assert same_on_all(model[0].weight)


def a_later_optimizer_scales_and_reduces_alone(rank: int, size: int) -> None:
    model = net()
    own, mine = model[2].weight, oracle_gradient(model, rank, 2)
    first, second = [DistributedOptimizer(sgd(model.parameters()), local_parameters=[own]) for _ in range(2)]
    loss_of(model, batch(rank, 0)).backward()
    torch.testing.assert_close(own.grad, mine / size)
    second.step()
    third = DistributedOptimizer(sgd(net().parameters()))
    third.add_param_group({"params": [model[0].weight]})
    for replaced in (first, second):
        with pytest.raises(RuntimeError, match="made later trains a parameter of this one"):
            replaced.step()
    with pytest.raises(ValueError, match="LBFGS decides by all gradients"):
        DistributedOptimizer(torch.optim.LBFGS(model.parameters()))


def local_gradients_unscaled_and_summed_over_passes(rank: int, size: int) -> None:
    for options, factor in (({"scale_local_gradients": False}, 1.0), ({}, 1 / size), ({"op": hvd.Sum}, 1.0)):
        model = net()
        own, mine = model[0].bias, oracle_gradient(model, rank, 1)
        DistributedOptimizer(
            optimizer := sgd(model.parameters()), backward_passes_per_step=2, local_parameters=[own], **options
        )
        for _ in range(2):
            loss_of(model, batch(rank, 0)).backward()
        assert own.grad is not None
        torch.testing.assert_close(own.grad, 2 * factor * mine)
        optimizer.step()


def a_second_optimizer_does_not_scale_twice(rank: int, size: int) -> None:
    model = net()
    own, mine = model[0].bias, oracle_gradient(model, rank, 1)
    # A dropped one must end at once: if it had to be collected, it would still reduce on some ranks, and they hang.
    gc.disable()
    for _ in range(2):
        optimizer = DistributedOptimizer(sgd(model.parameters()), local_parameters=[own])
        model.zero_grad()
        loss_of(model, batch(rank, 0)).backward()
        assert own.grad is not None
        torch.testing.assert_close(own.grad, mine / size)
        optimizer.zero_grad()
        dropped = weakref.ref(reducer_of(optimizer))
        del optimizer
        assert dropped() is None
    gc.enable()


def registered_variables_are_local(rank: int, size: int) -> None:
    model = net()
    optimizer = DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), groups=2)
    optimizer.register_local_var(model[2].weight)
    optimizer.register_local_var(model[4].bias)
    train(optimizer, model, rank)
    assert not same_on_all(model[2].weight)
    assert same_on_all(model[4].weight)
    with pytest.raises(RuntimeError, match="after the first backward"):
        optimizer.register_local_var(model[0].weight)
    with pytest.raises(ValueError, match="not a parameter of the optimizer"):
        optimizer.register_local_var(nn.Parameter(torch.zeros(1)))


def all_parameters_local(rank: int, size: int) -> None:
    model = net()
    optimizer = DistributedOptimizer(sgd(model.parameters()), local_parameters=model.parameters())
    train(optimizer, model, rank)
    more = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [more]})
    optimizer.zero_grad()
    (more * (rank + 1.0)).sum().backward()
    optimizer.synchronize()
    assert more.grad is not None
    assert more.grad.tolist() == [(size + 1) / 2] * 3


def different_local_parameters_are_an_error(rank: int, size: int) -> None:
    model = net()
    with pytest.raises(PlanMismatchError):
        DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), local_parameters=[model[2 if rank else 0].weight]
        )


def local_parameters_with_adasum(rank: int, size: int) -> None:
    model = net()
    optimizer = DistributedOptimizer(sgd(model.parameters()), op=hvd.Adasum, local_parameters=[model[0].weight])
    train(optimizer, model, rank)
    assert not same_on_all(model[0].weight)
    assert same_on_all(model[2].weight)


def local_parameters_and_their_state_are_not_broadcast(rank: int, size: int) -> None:
    model = net()
    own = model[0].weight
    optimizer = DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), local_parameters=[own])
    train(optimizer, model, rank)
    momentum = optimizer.state[own]["momentum_buffer"].clone()
    before = own.detach().clone()
    with torch.no_grad():
        model[2].weight.add_(rank)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(own, before)
    assert torch.equal(optimizer.state[own]["momentum_buffer"], momentum)
    assert same_on_all(model[2].weight)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert torch.equal(saved["model"]["0.weight"], before)
    train(optimizer, model, rank)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(optimizer, model, rank)
    assert same_on_all(model[2].weight)
