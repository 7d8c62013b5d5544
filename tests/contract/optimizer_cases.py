"""What DistributedOptimizer promises, run by every rank; the oracle is one process on the joined batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spark_hvd.collectives.compression import Compression
from spark_hvd.torch.optimizer.distributed import DistributedOptimizer, ReducedOptimizer
from spark_hvd.torch.optimizer.reducer import GradientReducer
from spark_hvd.transport.communicator import ReduceOp

STEPS = 4
ROWS = 6


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows) - rows[:, :3].sin()).square().mean()


def sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def reducer_of(optimizer: ReducedOptimizer) -> GradientReducer:
    assert optimizer._reducer is not None
    return optimizer._reducer


def assert_same_bits(model: nn.Module) -> None:
    for param in model.parameters():
        theirs = param.detach().clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(theirs, param), "ranks differ"


def assert_matches(model: nn.Module, oracle: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert_same_bits(model)


def compare(
    rank: int,
    size: int,
    *,
    make: Callable[[Iterable[Any]], torch.optim.Optimizer] = sgd,
    build: Callable[[], nn.Module] = net,
    set_to_none: bool = True,
    loss_scale: float = 1.0,
    tolerance: float = 1e-6,
    **options: Any,
) -> ReducedOptimizer:
    """Train on this rank's rows and, without communication, an oracle on all rows; the weights must agree."""
    model, oracle = build(), build()
    optimizer = DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)
    plain = make(oracle.parameters())
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        plain.zero_grad(set_to_none=set_to_none)
        (loss_scale * loss_of(oracle, torch.cat([batch(r, step) for r in range(size)]))).backward()
        plain.step()
    assert_matches(model, oracle, tolerance)
    return optimizer


def average(rank: int, size: int) -> None:
    optimizer = compare(rank, size)
    assert type(optimizer).__name__ == "SGD"
    assert isinstance(optimizer, torch.optim.SGD)


def average_keeping_gradients(rank: int, size: int) -> None:
    compare(rank, size, set_to_none=False)


def adam(rank: int, size: int) -> None:
    compare(rank, size, make=lambda params: torch.optim.AdamW(params, lr=0.01), tolerance=1e-4)


def sum_of_gradients(rank: int, size: int) -> None:
    compare(rank, size, op=ReduceOp.SUM, loss_scale=float(size))


def predivide(rank: int, size: int) -> None:
    compare(rank, size, gradient_predivide_factor=3.0)


def tiny_buckets(rank: int, size: int) -> None:
    optimizer = compare(rank, size, bucket_cap_mb=200 / 2**20)
    assert len(reducer_of(optimizer).buckets) > 2


def compression_fp16(rank: int, size: int) -> None:
    compare(rank, size, compression=Compression.fp16, tolerance=2e-3)


def compression_bf16(rank: int, size: int) -> None:
    compare(rank, size, compression=Compression.bf16, tolerance=1e-2)


class Doubling:
    """Sends float64, and counts calls to prove that it is used on whole buckets."""

    calls = 0

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        assert tensor.dim() == 1
        self.calls += 1
        return tensor.double(), tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


def compression_custom(rank: int, size: int) -> None:
    doubling = Doubling()
    optimizer = compare(rank, size, compression=doubling)
    assert doubling.calls == STEPS * len(reducer_of(optimizer).buckets)


def groups_by_number(rank: int, size: int) -> None:
    assert len(reducer_of(compare(rank, size, groups=3)).buckets) == 3


def groups_by_list(rank: int, size: int) -> None:
    model = net()
    first, last = list(model[0].parameters()), list(model[4].parameters())
    optimizer = DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), groups=[first + last])
    loss_of(model, batch(rank, 0)).backward()
    optimizer.step()
    assert {"0.weight", "0.bias", "4.weight", "4.bias"} in [set(names) for names in reducer_of(optimizer).buckets]


def several_passes(rank: int, size: int) -> None:
    model, oracle = net(), net()
    optimizer = DistributedOptimizer(sgd(model.parameters()), backward_passes_per_step=2)
    plain = sgd(oracle.parameters())
    for step in range(STEPS):
        if step == 2:
            optimizer.set_backward_passes_per_step(3)
        passes = 3 if step >= 2 else 2
        optimizer.zero_grad()
        plain.zero_grad()
        for part in range(passes):
            loss_of(model, batch(rank, 10 * step + part)).backward()
            loss_of(oracle, torch.cat([batch(r, 10 * step + part) for r in range(size)])).backward()
        optimizer.step()
        plain.step()
    assert_matches(model, oracle)


def parameter_groups_grow(rank: int, size: int) -> None:
    """A group added later and a layer unfrozen later are trained like the rest."""
    model, oracle = net(), net()
    for each in (model, oracle):
        each[2].requires_grad_(False)
    optimizer = DistributedOptimizer(sgd([*model[0].parameters(), *model[2].parameters()]))
    plain = sgd([*oracle[0].parameters(), *oracle[2].parameters()])
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.02})
            plain.add_param_group({"params": list(oracle[4].parameters()), "lr": 0.02})
        if step == 4:
            model[2].requires_grad_(True)
            oracle[2].requires_grad_(True)
        for param in [*model.parameters(), *oracle.parameters()]:
            param.grad = None
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        loss_of(oracle, torch.cat([batch(r, step) for r in range(size)])).backward()
        plain.step()
    assert_matches(model, oracle)


def schedulers(rank: int, size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, oracle = net(), net()
        inner = sgd(model.parameters())
        before = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)
        optimizer = DistributedOptimizer(inner, model.named_parameters())
        assert optimizer is inner
        after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        plain = sgd(oracle.parameters())
        plain_schedulers = [
            torch.optim.lr_scheduler.StepLR(plain, 2, 0.5),
            torch.optim.lr_scheduler.ExponentialLR(plain, 0.9),
        ]
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
            plain.zero_grad()
            loss_of(oracle, torch.cat([batch(r, step) for r in range(size)])).backward()
            plain.step()
            for scheduler in [before, after, *plain_schedulers]:
                scheduler.step()
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert_matches(model, oracle)


def state_dict_round_trip(rank: int, size: int) -> None:
    models = [net(), net()]
    optimizers = [DistributedOptimizer(sgd(model.parameters())) for model in models]
    for step in range(STEPS):
        if step == 2:
            models[1].load_state_dict(models[0].state_dict())
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))  # torch would share momentum
        for model, optimizer in list(zip(models, optimizers, strict=True))[: 1 if step < 2 else 2]:
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
    assert set(optimizers[0].state_dict()) == {"state", "param_groups"}
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)


def closures(rank: int, size: int) -> None:
    """LBFGS also uses the loss to decide how often to evaluate, so a step's loss is that of all ranks."""
    for op in (ReduceOp.AVERAGE, ReduceOp.SUM):
        for equal in (False, True):
            _search_lines(rank, size, op, equal)


def _search_lines(rank: int, size: int, op: ReduceOp, equal: bool) -> None:
    """With ``equal``, all ranks have the same rows and so the same loss, which is summed anyway."""
    model, oracle = net(), net()
    search: dict[str, Any] = {"max_iter": 10, "line_search_fn": "strong_wolfe", "tolerance_change": 1e-3}
    optimizer = DistributedOptimizer(torch.optim.LBFGS(model.parameters(), **search), op=op)
    plain = torch.optim.LBFGS(oracle.parameters(), **search)
    divisor = size if op is ReduceOp.AVERAGE else 1

    def mine() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(0 if equal else rank, 0))
        loss.backward()
        return loss if equal else loss.detach()

    def everybodys() -> torch.Tensor:
        plain.zero_grad()
        loss = torch.stack([loss_of(oracle, batch(0 if equal else r, 0)) for r in range(size)]).sum() / divisor
        loss.backward()
        return loss

    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of numbers made of tensors that require gradients
            found = optimizer.step(mine)
        assert found.item() == pytest.approx(plain.step(everybodys).item(), rel=1e-3)
    assert_matches(model, oracle, 1e-2)
    assert_same_bits(model)


def kinds_of_memory(rank: int, size: int) -> None:
    """Several dtypes, a complex one, and channels_last weights: one bucket per dtype, with strides kept."""
    conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    params = [
        nn.Parameter(torch.ones(3, dtype=torch.float64)),
        nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        conv.weight,
    ]
    optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        weight = conv.weight
        total = sum((param.abs().sum() * (rank + 1)).float() for param in params[:3])
        (total + (weight * (rank + 1)).sum()).backward()
        mean = (size + 1) / 2
        for param in params[:2]:
            assert param.grad is not None
            assert torch.equal(param.grad, torch.full_like(param, mean))
        assert params[2].grad is not None
        assert params[2].grad[0] == mean
        assert weight.grad is not None
        assert weight.grad.stride() == weight.stride()
        assert torch.equal(weight.grad, torch.full_like(weight, mean))
    assert len(reducer_of(optimizer).buckets) == 4


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(20, 4, sparse=sparse)
        self.out = nn.Linear(4, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(words))


def _train_words(rank: int, size: int, **options: Any) -> torch.Tensor:
    model, oracle = Words(sparse=True), Words(sparse=False)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), **options)
    plain = torch.optim.SGD(oracle.parameters(), lr=0.5)
    words = [torch.arange(3 + r) * (r + 2) % 20 for r in range(size)]  # a different number of rows on each rank
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(words[rank]).square().mean().backward()
        grad = model.table.weight.grad
        optimizer.step()
        plain.zero_grad()
        (torch.stack([oracle(each).square().mean() for each in words]).sum() / size).backward()
        plain.step()
    assert_matches(model, oracle, 1e-5)
    assert grad is not None
    return grad


def sparse_gradients(rank: int, size: int) -> None:
    assert _train_words(rank, size).is_sparse


def sparse_as_dense(rank: int, size: int) -> None:
    assert not _train_words(rank, size, sparse_as_dense=True).is_sparse


def sparse_as_dense_with_sparse_adam(rank: int, size: int) -> None:
    """It accepts no dense gradients, not even from a closure."""
    _train_table(rank, size, sparse_as_dense=False, by_closure=False)
    _train_table(rank, size, sparse_as_dense=True, by_closure=False)
    _train_table(rank, size, sparse_as_dense=True, by_closure=True)


def _train_table(rank: int, size: int, *, sparse_as_dense: bool, by_closure: bool) -> None:
    table, oracle = (nn.Embedding(20, 4, sparse=True) for _ in range(2))
    torch.manual_seed(2)
    nn.init.normal_(table.weight)
    oracle.load_state_dict(table.state_dict())
    optimizer = DistributedOptimizer(torch.optim.SparseAdam(table.parameters()), sparse_as_dense=sparse_as_dense)
    plain = torch.optim.SparseAdam(oracle.parameters())
    words: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = table(words[rank]).square().mean()
        loss.backward()
        return loss

    for step in range(STEPS):
        words = [torch.arange(3 + r) * (r + 2 + step) % 20 for r in range(size)]
        if by_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        plain.zero_grad()
        (torch.stack([oracle(each).square().mean() for each in words]).sum() / size).backward()
        plain.step()
    assert_matches(table, oracle, 1e-5)


def new_sparse_gradient_is_an_error(rank: int, size: int) -> None:
    table = nn.Parameter(torch.ones(4, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD([table], lr=0.1), [("table", table)])
    nn.functional.embedding(torch.tensor([1]), table).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"'table'.*sparse_as_dense"):
        nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum().backward()


def gradients_are_views(rank: int, size: int) -> None:
    model = net()
    optimizer = DistributedOptimizer(sgd(model.parameters()))
    loss_of(model, batch(rank, 0)).backward()
    storages = {param.grad.untyped_storage().data_ptr() for param in model.parameters() if param.grad is not None}
    assert len(storages) == len(reducer_of(optimizer).buckets) == 1
