"""What a user may do to gradients and parameters between two steps: the weights stay those of one process."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from spark_hvd.torch.optimizer.distributed import DistributedOptimizer
from spark_hvd.torch.outer.local_sgd import LocalSGD
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.world.errors import PlanMismatchError
from tests.contract.optimizer_cases import assert_matches, assert_same_bits, batch, loss_of, net, reducer_of, sgd

STEPS = 6
Change = Callable[[nn.Sequential], object]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def _loss(model: nn.Sequential, rank: int, step: int) -> torch.Tensor:
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    for layer in model:
        weight = getattr(layer, "weight", rows)
        rows = layer(rows.to(weight.dtype))
    return rows.square().mean().double()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _distance(model: nn.Module, oracle: nn.Module) -> float:
    pairs = zip(model.parameters(), oracle.parameters(), strict=True)
    return max(float((ours.double() - theirs.double()).detach().abs().max()) for ours, theirs in pairs)


def _trained_alike(
    rank: int, size: int, change: Change, when: int, *, to_none: bool, cap_mb: float = 25.0, skip: int = -1
) -> None:
    model, oracle = _net(), _net()
    optimizer = DistributedOptimizer(_sgd(model), model.named_parameters(), bucket_cap_mb=cap_mb)
    plain = _sgd(oracle)
    for step in range(STEPS):
        if step == when:
            change(model)
            change(oracle)
        optimizer.zero_grad(set_to_none=to_none)
        plain.zero_grad(set_to_none=to_none)
        _loss(model, rank, step).backward()
        (torch.stack([_loss(oracle, r, step) for r in range(size)]).sum() / size).backward()
        if step != skip:  # as GradScaler skips one
            optimizer.step()
            plain.step()
    assert _distance(model, oracle) < 1e-6


def _graded(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.grad is not None]


def _repointed(model: nn.Module) -> None:
    for param in _graded(model):
        param.grad.data = param.grad.data.clone()  # type: ignore[union-attr]


def _cleared(model: nn.Module) -> None:
    for param in _graded(model):
        param.grad.set_(torch.zeros_like(param))  # type: ignore[union-attr]


def _cloned(model: nn.Module) -> None:
    for param in _graded(model):
        param.grad = param.grad.clone()  # type: ignore[union-attr]


def _detached(model: nn.Module) -> None:
    for param in _graded(model):
        param.grad = param.grad.detach()  # type: ignore[union-attr]


def _deleted(model: nn.Module) -> None:
    for param in _graded(model):
        param.grad = None


def _swapped(model: nn.Sequential) -> None:
    first, last = model[0].weight, model[2].weight
    first.grad, last.grad = last.grad, first.grad


def _moved(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def _hooked(model: nn.Module) -> None:
    """Hooks of the program that run after those of an optimizer created earlier."""

    def double(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(2)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(double)


CHANGES: list[Change] = [
    lambda model: (model.double(), model.float()),
    lambda model: (model.bfloat16(), model.float()),
    lambda model: model.double(),
    lambda model: model[2].double(),
    _repointed,
    _cleared,
    _cloned,
    _detached,
    _deleted,
    _swapped,
    _moved,
    _hooked,
]


def changed_before_the_first_step(rank: int, size: int) -> None:
    for change in CHANGES:
        _trained_alike(rank, size, change, 0, to_none=True)


def changed_between_two_steps(rank: int, size: int) -> None:
    for change, to_none in itertools.product(CHANGES, (True, False)):
        _trained_alike(rank, size, change, 2, to_none=to_none)


def changed_in_many_small_buckets(rank: int, size: int) -> None:
    for number, change in enumerate(CHANGES):
        _trained_alike(rank, size, change, 2, to_none=number % 2 == 0, cap_mb=1e-5)


def stepped_within_backward(rank: int, size: int) -> None:
    """One optimizer per parameter; a hook of the program steps it as soon as there is a gradient."""
    model, oracle = _net(), _net()
    optimizers = {param: DistributedOptimizer(torch.optim.SGD([param], lr=0.1)) for param in model.parameters()}
    plain = torch.optim.SGD(oracle.parameters(), lr=0.1)

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for number in range(STEPS):
        plain.zero_grad()
        _loss(model, rank, number).backward()
        (torch.stack([_loss(oracle, r, number) for r in range(size)]).sum() / size).backward()
        plain.step()
    assert _distance(model, oracle) < 1e-6


def gradients_that_somebody_else_holds(rank: int, size: int) -> None:
    """Another parameter, or a list, holds a reduced gradient while its own parameter continues with others."""
    for to_none, cap_mb, shared_memory in itertools.product((True, False), (25.0, 1e-5), (True, False)):
        model, oracle = _net(), _net()
        optimizer = DistributedOptimizer(
            _sgd(model), model.named_parameters(), bucket_cap_mb=cap_mb, shared_memory=shared_memory
        )
        plain = _sgd(oracle)
        others = [[nn.Parameter(param.detach().clone()) for param in each.parameters()] for each in (model, oracle)]
        kept: list[list[torch.Tensor]] = [[], []]
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=to_none)
            plain.zero_grad(set_to_none=to_none)
            _loss(model, rank, step).backward()
            (torch.stack([_loss(oracle, r, step) for r in range(size)]).sum() / size).backward()
            optimizer.step()
            plain.step()
            for each, theirs, list_ in zip((model, oracle), others, kept, strict=True):
                list_.append(each[0].weight.grad)
                if step % 2 == 0:
                    for param, other in zip(each.parameters(), theirs, strict=True):
                        other.grad = param.grad
            for ours, its in zip(kept[0] + [each.grad for each in others[0]],
                                 kept[1] + [each.grad for each in others[1]], strict=True):  # fmt: skip
                torch.testing.assert_close(ours, its, rtol=1e-5, atol=1e-6)
        assert _distance(model, oracle) < 1e-6


def gradients_go_round_with_one_of_no_optimizer(rank: int, size: int) -> None:
    """One parameter accumulates where the gradient of a second one has its place, which has that of a third one.

    The third one, which the optimizer does not have, accumulates in the place of the first one.
    """
    for detached, cap_mb, shared_memory in itertools.product((False, True), (25.0, 1e-5), (True, False)):
        model, oracle = _net(), _net()
        optimizer = DistributedOptimizer(
            _sgd(model), model.named_parameters(), bucket_cap_mb=cap_mb, shared_memory=shared_memory
        )
        plain = _sgd(oracle)
        others = {each: nn.Parameter(torch.full((4, 4), 0.5)) for each in (model, oracle)}
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            plain.zero_grad(set_to_none=False)
            if step == 2:
                for each, other in others.items():
                    first, second = each[0].weight, each[2].weight
                    grads = [param.grad.detach() if detached else param.grad for param in (first, second)]
                    first.grad, second.grad, other.grad = grads[1], torch.full_like(first, 0.5), grads[0]
            (_loss(model, rank, step) + others[model].sum()).backward()
            every = [_loss(oracle, r, step) + others[oracle].sum() for r in range(size)]
            (torch.stack(every).sum() / size).backward()
            optimizer.step()
            plain.step()
        assert _distance(model, oracle) < 1e-6


def cast_again_and_again(rank: int, size: int) -> None:
    model, oracle = _net(), _net()
    optimizer, plain = DistributedOptimizer(_sgd(model), model.named_parameters()), _sgd(oracle)
    for step in range(STEPS):
        for each in (model, oracle):
            each[2 * (step % 3)].to(torch.float64 if step < 3 else torch.float32)
        optimizer.zero_grad()
        plain.zero_grad()
        _loss(model, rank, step).backward()
        (torch.stack([_loss(oracle, r, step) for r in range(size)]).sum() / size).backward()
        optimizer.step()
        plain.step()
    assert _distance(model, oracle) < 1e-6
    places = [name for bucket in reducer_of(optimizer).buckets for name in bucket]
    assert sorted(places) == sorted(
        name for name, _ in model.named_parameters()
    )  # each has one, and no bucket is empty


def a_step_is_skipped_and_gradients_are_zeroed(rank: int, size: int) -> None:
    for to_none in (True, False):
        _trained_alike(rank, size, lambda model: None, 0, to_none=to_none, skip=2)


def gradients_of_a_skipped_step_are_not_silently_added(rank: int, size: int) -> None:
    model = _net()
    optimizer = DistributedOptimizer(_sgd(model), model.named_parameters())
    for step in range(2):
        _loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    _loss(model, rank, 2).backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step=1"):
        _loss(model, rank, 3).backward()
    optimizer.zero_grad()


def cast_on_one_rank_alone_is_an_error_on_all(rank: int, size: int) -> None:
    model = _net()
    optimizer = DistributedOptimizer(_sgd(model), model.named_parameters())
    for step in range(3):
        if step == 2 and rank == 1:
            model[2].double()
        optimizer.zero_grad()
        if step == 2:
            with pytest.raises(PlanMismatchError, match=r"'2\.weight'"):
                _loss(model, rank, step).backward()
        else:
            _loss(model, rank, step).backward()
            optimizer.step()


def cast_to_different_dtypes_is_an_error_on_all(rank: int, size: int) -> None:
    for when in (0, 2):
        model = _net()
        optimizer = DistributedOptimizer(_sgd(model), model.named_parameters())
        for step in range(when + 1):
            if step == when:
                model.to(torch.float64 if rank else torch.bfloat16)
                with pytest.raises(PlanMismatchError, match=r"dtype .*'torch\.bfloat16'"):
                    _loss(model, rank, step).backward()
            else:
                optimizer.zero_grad()
                _loss(model, rank, step).backward()
                optimizer.step()


def parameters_put_into_groups(rank: int, size: int) -> None:
    """A parameter that a program puts into a group by itself is not reduced, so there is no step."""
    puts: tuple[Callable[[torch.optim.Optimizer, nn.Parameter], object], ...] = (
        lambda optimizer, param: optimizer.param_groups[0]["params"].append(param),
        lambda optimizer, param: optimizer.param_groups[0].update(params=[param]),
        lambda optimizer, param: optimizer.param_groups.append({**optimizer.param_groups[0], "params": [param]}),
    )
    wrong = pytest.raises(ValueError, match=r"\(3,\) was put into param_groups\[[01]\].*add_param_group")
    for put in puts:
        model, extra = net(), nn.Parameter(torch.ones(3))
        optimizer = DistributedOptimizer(_sgd(model))
        loss_of(model, batch(rank, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        put(optimizer, extra)
        (loss_of(model, batch(rank, 1)) + extra.sum()).backward()
        for step in (optimizer.step, optimizer.synchronize, lambda own=optimizer: own.step(lambda: 0.0)):
            with wrong:
                step()
        averaged = LocalSGD(model := net(), _sgd(model), sync_every=2)
        put(averaged, extra)
        with wrong:
            averaged.step()


def a_parameter_of_two_optimizers(rank: int, size: int) -> None:
    """Only the later optimizer reduces its gradient; the earlier one steps from that, or raises on all ranks."""
    model, oracle = net(), net()
    makers = [sgd, lambda params: torch.optim.AdamW(params, eps=1e-3)]
    first, second = [DistributedOptimizer(make(model.parameters())) for make in makers]
    plain = [make(oracle.parameters()) for make in makers]
    for step in range(STEPS):
        for optimizer in (second, plain[0]):
            optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        loss_of(oracle, torch.cat([batch(r, step) for r in range(size)])).backward()
        plain[step % 2].step()
        if step % 2:
            second.step()
            continue
        with pytest.raises(RuntimeError, match="made later trains a parameter of this one"):
            first.step()
        second.synchronize()
        with first.skip_synchronize():
            first.step()
    assert_matches(model, oracle, 1e-5)


def copies(rank: int, size: int) -> None:
    """A copy is plain, and raises rather than step alone; once made distributed, it trains like the original."""
    makers = [
        lambda each, net: DistributedOptimizer(each, net.named_parameters()),
        lambda each, net: DistributedOptimizer(each, net.named_parameters(), op=ReduceOp.ADASUM),
        lambda each, net: LocalSGD(net, each, 2),
    ]
    for make in makers:
        model = net()
        optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        for step in range(2 * STEPS):
            if step == STEPS:  # after a full round of LocalSGD
                copied, again = copy.deepcopy(copy.deepcopy((model, optimizer)))
                pickled, loaded = pickle.loads(pickle.dumps((model, optimizer)))
                for other, there in ((again, copied), (loaded, pickled)):
                    assert isinstance(other, torch.optim.SGD)
                    other.zero_grad()
                    with pytest.raises(RuntimeError, match=r"is a copy of a distributed one"):
                        other.step()
                    assert_same_bits(there)
                again = make(again, copied)
                with pytest.raises(ValueError, match=r"already an hvd\."):
                    make(again, copied)
            for each, there in [(optimizer, model), *([(again, copied)] if step >= STEPS else [])]:
                each.zero_grad()
                loss_of(there, batch(rank, step)).backward()
                each.step()
        assert_matches(copied, model, 1e-6)
