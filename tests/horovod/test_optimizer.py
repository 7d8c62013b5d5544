"""DistributedOptimizer as Horovod's tests use it; tests/contract tests how it plans its buckets."""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import spark_hvd.torch as hvd
from tests.horovod.models import accepted, equal, make, network, on_all_ranks, optimizer_classes, train
from tests.horovod.support import LastingWorld, alive, halves, needs_gpus

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 5), nn.Linear(5, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = self.left(torch.relu(self.trunk(x)))
        return left, self.right(torch.relu(left))


def test_parameters_that_one_rank_does_not_use(three: LastingWorld) -> None:
    def fn() -> None:
        options = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1, "centered": True}
        for cls in optimizer_classes():
            model = Branches()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            inner = cls(model.parameters(), **accepted(cls, options))
            optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
            torch.manual_seed(hvd.rank())
            left, right = model(torch.randn(6, 8))
            optimizer.zero_grad()
            (left if hvd.rank() == 0 else right).sum().backward()
            optimizer.synchronize()
            # each row adds one to the bias of `right`, on two ranks of three
            torch.testing.assert_close(model.right.bias.grad, torch.full((4,), 6 * 2 / 3))
            with optimizer.skip_synchronize():
                optimizer.step()
            zero, *rest = on_all_ranks(model.state_dict())
            assert all(equal(zero, other) for other in rest), cls

    three.run(fn)


def test_gradients_turned_on_and_off(three: LastingWorld) -> None:
    def fn() -> None:
        torch.manual_seed(hvd.rank())
        parts = {"generator": nn.Conv2d(1, 10, 1), "discriminator": nn.Conv2d(10, 1, 1)}
        optimizers = {}
        for name, part in parts.items():
            hvd.broadcast_parameters(part.state_dict(), root_rank=0)
            inner = torch.optim.SGD(part.parameters(), lr=1e-3)
            optimizers[name] = hvd.DistributedOptimizer(inner, named_parameters=part.named_parameters())
        rows = torch.rand(1, 1, 10, 10)
        for trained in ["generator", "discriminator"] * 5:
            before = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
            for name, part in parts.items():
                part.requires_grad_(name == trained)
                optimizers[name].zero_grad()
            parts["discriminator"](parts["generator"](rows)).sum().backward()
            for name, part in parts.items():
                for param in part.parameters():
                    assert (param.grad is not None and bool(param.grad.any())) == (name == trained)
            optimizers[trained].step()
            for name, part in parts.items():
                assert equal(part.state_dict(), before[name]) == (name != trained)
        states = on_all_ranks({name: part.state_dict() for name, part in parts.items()})
        assert all(equal(states[0], other) for other in states[1:])

    three.run(fn)


def one_weight(lr: float) -> tuple[nn.Linear, Any]:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def test_gradient_clipping(three: LastingWorld) -> None:
    def fn() -> None:
        model, optimizer = one_weight(lr=0.1)
        optimizer.zero_grad()
        # d/dw (w - y)^2 = 2 (0.5 - y): 1, -1, -3 on the ranks, -1 on average
        F.mse_loss(model(torch.ones(1, 1)), torch.full((1, 1), float(hvd.rank()))).backward()
        optimizer.synchronize()
        assert model.weight.grad.item() == pytest.approx(-1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert model.weight.grad.item() == pytest.approx(-0.1 / 2**0.5, rel=1e-4)
        with optimizer.skip_synchronize():
            optimizer.step()
        assert model.weight.item() == pytest.approx(0.5 + 0.01 / 2**0.5, rel=1e-5)

    three.run(fn)


def test_step_after_synchronize_does_not_reduce_again(three: LastingWorld) -> None:
    def fn() -> None:
        model, optimizer = one_weight(lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (model.weight * (hvd.rank() + 1)).sum().backward()
            optimizer.synchronize()
            model.weight.grad.fill_(float(hvd.rank()))  # later changes stay local
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.step()
        assert model.weight.item() == pytest.approx(0.5 - 0.2 * hvd.rank())

    three.run(fn)


def test_without_names(three: LastingWorld) -> None:
    def fn() -> None:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1))
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1.0)
        groups: list[dict[str, Any]] = [{"params": part.parameters(), "lr": 1.0 + n} for n, part in enumerate(model)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))
        model(torch.full((1, 1), float(hvd.rank()))).sum().backward()  # gradients: rank, rank, 1
        optimizer.step()
        assert [param.item() for param in model.parameters()] == pytest.approx([0.0, -1.0, -1.0])

    three.run(fn)


def test_names_that_do_not_fit(three: LastingWorld) -> None:
    def fn() -> None:
        nets = [nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)]
        params = list(itertools.chain(*(net.parameters() for net in nets)))
        twice = list(itertools.chain(*(net.named_parameters() for net in nets)))
        with pytest.raises(ValueError, match="unique"):
            hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), named_parameters=twice)
        with pytest.raises(ValueError, match="cover all"):
            hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), named_parameters=twice[:1])
        alive()

    three.run(fn)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_embeddings(three: LastingWorld, as_dense: bool) -> None:
    def fn(as_dense: bool) -> None:
        words = [torch.tensor([[1, 2, 4, 5], [4, 3, 2, 9]]), torch.tensor([[1, 3, 4], [4, 7, 9]])]
        mine = words[min(hvd.rank(), 1)]
        embedding = nn.Embedding(10, 3, sparse=True)
        nn.init.zeros_(embedding.weight)
        inner = torch.optim.SGD(embedding.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner, sparse_as_dense=as_dense)
        for step in (1, 2):
            optimizer.zero_grad()
            embedding(mine).sum().backward()
            optimizer.step()
            uses = sum(torch.bincount(words[n].flatten(), minlength=10) for n in (0, 1, 1))
            expected = (-step * uses / 3).unsqueeze(1).expand(10, 3)
            torch.testing.assert_close(embedding.weight.detach(), expected)

    three.run(fn, as_dense)


def test_sparse_adam(three: LastingWorld) -> None:
    def fn() -> None:
        torch.manual_seed(0)
        embedding, oracle = nn.Embedding(10, 3, sparse=True), nn.Embedding(10, 3, sparse=True)
        oracle.load_state_dict(embedding.state_dict())
        optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(list(embedding.parameters()), lr=0.1))
        plain = torch.optim.SparseAdam(list(oracle.parameters()), lr=0.1)
        words = [torch.tensor([1, 2, 4, 5]), torch.tensor([4, 3, 2, 9]), torch.tensor([1, 3, 4, 4])]
        for _ in range(3):
            optimizer.zero_grad()
            embedding(words[hvd.rank()]).square().sum().backward()
            optimizer.step()
            plain.zero_grad()
            (oracle(torch.cat(words)).square().sum() / 3).backward()
            plain.step()
        torch.testing.assert_close(embedding.weight, oracle.weight)

    three.run(fn)


def test_process_set(three: LastingWorld) -> None:
    def fn() -> None:
        rank, inputs = hvd.rank(), [1.0, 5.0, 3.0]
        for half in (0, 1):
            even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set([1])
            chosen = (even, odd)[half]
            torch.manual_seed(0)
            model = nn.Linear(3, 2)
            inner = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), process_set=chosen)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            before = copy.deepcopy(model.state_dict())
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.full((1, 3), inputs[rank])).sum().backward()
                optimizer.step()
            # ranks 0 and 2 average 1 and 3 if they form the set; a rank alone or outside keeps its own
            average = 2.0 if half == 0 and rank != 1 else inputs[rank]
            steps = 0.25 * (1 + 1.9)
            torch.testing.assert_close(model.weight.detach(), before["weight"] - steps * average)
            torch.testing.assert_close(model.bias.detach(), before["bias"] - steps)
            assert hvd.remove_process_set(odd)
            assert hvd.remove_process_set(even)

    three.run(fn)


def test_broadcast_and_gather_beside_an_optimizer_of_a_set(three: LastingWorld) -> None:
    def fn() -> None:
        with halves() as mine:
            model = nn.Linear(2, 1, bias=False)
            nn.init.zeros_(model.weight)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), process_set=mine)
            handle = hvd.allreduce_async(torch.tensor([1.0]), op=hvd.Sum, name="beside")
            model(torch.full((1, 2), 1.0 + hvd.rank())).sum().backward()
            optimizer.step()
            assert hvd.synchronize(handle).tolist() == [3.0]
            rows = hvd.allgather(model.weight.detach(), process_set=mine)
            assert rows.tolist() == [[-2.0, -2.0]] * mine.size()

    three.run(fn)


def test_named_collectives_during_backward(three: LastingWorld) -> None:
    def fn() -> None:
        torch.manual_seed(0)
        model, optimizer = make(torch.optim.SGD, {"lr": 0.01})
        hvd.broadcast_parameters(model.state_dict())
        for step in range(5):
            order = ["loss", "accuracy", "count"]
            order = order[hvd.rank() :] + order[: hvd.rank()]
            handles = {name: hvd.allreduce_async(torch.tensor([step + 1.0]), op=hvd.Sum, name=name) for name in order}
            train(model, optimizer, seed=hvd.rank() + 10 * step)
            assert [hvd.synchronize(handles[name]).item() for name in sorted(order)] == [3.0 * (step + 1)] * 3
        zero, *rest = on_all_ranks(model.state_dict())
        assert all(equal(zero, other) for other in rest)

    three.run(fn)


def test_num_groups_is_groups(three: LastingWorld) -> None:
    def fn() -> None:
        model = network()
        hvd.broadcast_parameters(model.state_dict())
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.warns(DeprecationWarning, match="num_groups"):
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), num_groups=2)
        before = copy.deepcopy(model.state_dict())
        for param in model.parameters():
            param.grad = None
        sum((param * (hvd.rank() + 1)).sum() for param in model.parameters()).backward()
        optimizer.step()
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.detach(), before[name] - 0.2)

    three.run(fn)


def test_adasum(two: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        apart, along = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(3))
        inner = torch.optim.SGD([apart, along], lr=0.5)
        optimizer = hvd.DistributedOptimizer(inner, [("apart", apart), ("along", along)], op=hvd.Adasum)
        assert isinstance(optimizer, torch.optim.SGD)
        for step in (1, 2):
            optimizer.zero_grad()
            (4 * apart[rank] + along.sum() * 2 * (rank + 1)).backward()
            optimizer.step()
            # the steps -(2, 0) and -(0, 2) add up; -1 and -2 in one direction are averaged
            torch.testing.assert_close(apart.detach(), torch.full((2,), -2.0 * step))
            torch.testing.assert_close(along.detach(), torch.full((3,), 1 - 1.5 * step))

    two.run(fn)


def test_adasum_reduces_steps_and_not_gradients(two: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        weight = nn.Parameter(torch.zeros(4))
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam([weight], lr=0.1), [("weight", weight)], op=hvd.Adasum)
        for step in (1, 2, 3):
            optimizer.zero_grad()
            (weight[2 * rank : 2 * rank + 2] * torch.tensor([1.0, 100.0])).sum().backward()
            optimizer.step()
            # Adam steps by its rate whatever the gradient; the ranks' steps are orthogonal
            torch.testing.assert_close(weight.detach(), torch.full((4,), -0.1 * step), rtol=1e-4, atol=1e-5)

    two.run(fn)


@needs_gpus(2)
def test_gpu(two: LastingWorld) -> None:
    def fn() -> None:
        device = torch.device("cuda", hvd.local_rank())
        for op, expected in ((hvd.Average, -1.5), (hvd.Sum, -3.0), (hvd.Adasum, -1.5)):
            model = nn.Conv2d(1, 10, 1).to(device)
            for param in model.parameters():
                nn.init.zeros_(param)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=op)
            optimizer.zero_grad()
            (model(torch.ones(1, 1, 1, 1, device=device)).sum() * (hvd.rank() + 1)).backward()
            optimizer.step()
            torch.testing.assert_close(model.bias.detach(), torch.full((10,), expected, device=device))

    two.run(fn)


@needs_gpus(4)
def test_a_model_on_two_gpus(two: LastingWorld) -> None:
    def fn() -> None:
        devices = [torch.device("cuda", 2 * hvd.local_rank() + n) for n in range(2)]
        parts = [nn.Conv2d(1, 10, 1).to(devices[0]), nn.Conv2d(10, 1, 1).to(devices[1])]
        params = [(f"{n}.{name}", param) for n, part in enumerate(parts) for name, param in part.named_parameters()]
        hvd.broadcast_parameters(dict(params))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param for _, param in params], lr=0.1), params)
        rows = torch.rand(1, 1, 10, 10, device=devices[0])
        optimizer.zero_grad()
        parts[1](parts[0](rows).to(devices[1])).sum().backward()
        optimizer.step()
        zero, one = on_all_ranks({name: param.detach().cpu() for name, param in params})
        assert equal(zero, one)

    two.run(fn)
