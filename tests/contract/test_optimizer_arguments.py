"""DistributedOptimizer's arguments, and its behaviour in a world of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from spark_hvd.context.init import init
from spark_hvd.context.leave import shutdown
from spark_hvd.torch.optimizer.distributed import DistributedOptimizer, ReducedOptimizer
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.world.errors import NotInitializedError


@pytest.fixture
def alone() -> Iterator[None]:
    init()
    yield
    shutdown()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_a_world_of_one_trains_as_the_plain_optimizer_does(alone: None) -> None:
    torch.manual_seed(0)
    model, oracle = nn.Linear(3, 2), nn.Linear(3, 2)
    oracle.load_state_dict(model.state_dict())
    optimizer, plain = DistributedOptimizer(sgd(model), model.named_parameters(), groups=1), sgd(oracle)
    rows = torch.randn(4, 3)
    for _ in range(3):
        for each, inner in ((model, optimizer), (oracle, plain)):
            inner.zero_grad()
            each(rows).square().mean().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.step()
    optimizer.set_backward_passes_per_step(2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert type(optimizer).__name__ == "SGD"
    assert isinstance(optimizer, (torch.optim.SGD, ReducedOptimizer))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), oracle.parameters(), strict=True))


def test_needs_init() -> None:
    with pytest.raises(NotInitializedError):
        DistributedOptimizer(sgd(nn.Linear(3, 2)))


FOREIGN = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"op": ReduceOp.MAX}, "Average, Sum and Adasum"),
        ({"op": ReduceOp.SUM, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor=2.0"),
        ({"named_parameters": [FOREIGN]}, "tuples"),
        ({"named_parameters": nn.Linear(3, 2)}, "pass model.named_parameters"),
        ({"named_parameters": [("a", FOREIGN), ("a", FOREIGN)]}, "unique.*a"),
        ({"named_parameters": [("a", FOREIGN)]}, "lacks 2"),
        ({"groups": -1}, "groups=-1"),
        ({"groups": [FOREIGN]}, "lists of parameters"),
        ({"groups": [[FOREIGN]]}, r"groups\[0\].*not a parameter"),
    ],
)
def test_arguments_that_do_not_fit(alone: None, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DistributedOptimizer(sgd(nn.Linear(3, 2)), **options)


def test_the_class_of_an_optimizer_is_none(alone: None) -> None:
    with pytest.raises(TypeError, match=r"optimizer=.*SGD'>: expected a torch optimizer, such as"):
        DistributedOptimizer(torch.optim.SGD)  # type: ignore[arg-type]


def test_a_parameter_is_in_one_group_and_an_optimizer_is_wrapped_once(alone: None) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="already in a group"):
        DistributedOptimizer(sgd(model), groups=[[model.weight], [model.bias, model.weight]])
    optimizer = DistributedOptimizer(sgd(model))
    with pytest.raises(ValueError, match="wrap it once"):
        DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="must be 1 or more"):
        optimizer.set_backward_passes_per_step(-1)
