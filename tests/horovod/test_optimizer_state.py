"""broadcast_parameters and broadcast_optimizer_state around a DistributedOptimizer, for every kind of optimizer."""

from __future__ import annotations

import copy
import sys
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import spark_hvd.torch as hvd
from tests.horovod.models import accepted, equal, make, on_all_ranks, optimizer_classes, train
from tests.horovod.support import LastingWorld

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(
    "options", [{"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1, "centered": True}, {"lr": 0.2}], ids=["many", "lr"]
)
@pytest.mark.slow
def test_broadcast_state_after_loading_a_checkpoint(three: LastingWorld, options: dict[str, Any]) -> None:
    def fn(options: dict[str, Any]) -> None:
        for cls in optimizer_classes():
            model, optimizer = make(cls, options)
            train(model, optimizer, seed=0)
            checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            wanted = hvd.broadcast_object(checkpoint)

            model, optimizer = make(cls, options)
            if hvd.rank() == 0:
                model.load_state_dict(checkpoint[0])
                optimizer.load_state_dict(checkpoint[1])
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            assert equal(model.state_dict(), wanted[0]), cls
            assert equal(optimizer.state_dict(), wanted[1]), cls

    three.run(fn, options)


def test_broadcast_state_takes_the_options_of_the_root(three: LastingWorld) -> None:
    def fn() -> None:
        roots: dict[str, Any] = {
            "lr": 0.1,
            "momentum": 0.8,
            "weight_decay": 0.2,
            "nesterov": True,
            "betas": (0.9, 0.999),
            "etas": (0.8, 2.4),
            "step_sizes": (1e-5, 100),
        }
        others: dict[str, Any] = {
            "lr": 0.2,
            "momentum": 0.9,
            "weight_decay": 0.1,
            "nesterov": False,
            "betas": (0.8, 0.9),
            "etas": (0.25, 1.75),
            "step_sizes": (1e-7, 5),
        }
        for cls in optimizer_classes():
            if cls.__name__ == "Adafactor":
                continue  # accepts no such pairs, and refuses some of these numbers
            model, optimizer = make(cls, roots if hvd.rank() == 0 else others)
            train(model, optimizer, seed=hvd.rank())
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for name, wanted in accepted(cls, roots).items():
                if name in optimizer.param_groups[0]:
                    value = optimizer.param_groups[0][name]
                    assert type(value) is type(wanted), (cls, name)
                    assert value == wanted, (cls, name)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            train(model, optimizer, seed=hvd.rank())  # and they can be used
            zero, *rest = on_all_ranks(model.state_dict())
            assert all(equal(zero, other) for other in rest), cls

    three.run(fn)


class Frozen(nn.Module):
    def __init__(self, index: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.index = nn.Parameter(index.int(), requires_grad=False)
        self.values = nn.Parameter(values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.index_select(self.values, 0, self.index.long()) * x


def test_broadcast_state_with_a_frozen_parameter(three: LastingWorld) -> None:
    def fn() -> None:
        torch.manual_seed(hvd.rank())
        model = Frozen(torch.tensor([1, 3]), torch.rand(4))
        inner = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.0, momentum=0.9, nesterov=True)
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        before = model.values.detach().clone()
        assert equal(before, hvd.broadcast(before, 0))
        model(torch.tensor([1.0, 3.0]) * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        assert model.index.grad is None
        assert model.index.tolist() == [1, 3]
        # the average gradient is [0, 2, 0, 6]; nesterov's first step is (1 + 0.9) of it
        expected = before - 0.5 * 1.9 * torch.tensor([0.0, 2.0, 0.0, 6.0])
        torch.testing.assert_close(model.values.detach(), expected)

    three.run(fn)
