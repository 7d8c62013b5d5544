"""Unusual steps: unused parameters, several losses, clipping, inf, errors, a rank that dies."""

from __future__ import annotations

import gc
import os
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.process_set import global_process_set
from spark_hvd.torch.optimizer.distributed import DistributedOptimizer
from spark_hvd.torch.optimizer.recipe import ExternalGradients, Recipe, placeholder
from spark_hvd.torch.optimizer.reducer import Phase
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.world.errors import CollectiveError, PlanMismatchError
from tests.contract.optimizer_cases import (
    STEPS,
    assert_matches,
    assert_same_bits,
    average,
    batch,
    loss_of,
    net,
    reducer_of,
    sgd,
)


class Branches(nn.Module):
    """`left` or `right` or both; `never` is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right, self.never = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, rows: torch.Tensor, left: bool = True, right: bool = True) -> torch.Tensor:
        out = rows.new_zeros(rows.shape[0], 3)
        return out + (self.left(rows) if left else 0) + (self.right(rows) if right else 0)


def unused_parameters(rank: int, size: int) -> None:
    """Rank 0 skips `right` in odd steps, so the average takes zeros for it; `never` is unused: its grad stays None."""
    model, oracle = Branches(), Branches()
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), weight_decay=0.5), model.named_parameters())
    plain = torch.optim.AdamW(oracle.parameters(), weight_decay=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step), right=rank > 0 or step % 2 == 0).square().mean().backward()
        optimizer.step()
        assert model.never.weight.grad is None
        plain.zero_grad()
        losses = [oracle(batch(r, step), right=r > 0 or step % 2 == 0).square().mean() for r in range(size)]
        (torch.stack(losses).sum() / size).backward()
        plain.step()
    assert_matches(model, oracle, 1e-5)


def used_first_and_unused_later(rank: int, size: int) -> None:
    """The first step is complete; later rank 0 lacks a branch, and must not hang or read stale buffers."""
    model, oracle = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)]), nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
    oracle.load_state_dict(model.state_dict())
    optimizer, plain = DistributedOptimizer(sgd(model.parameters())), sgd(oracle.parameters())
    for step in range(STEPS):
        both = [step == 0 or r > 0 for r in range(size)]
        optimizer.zero_grad()
        rows = batch(rank, step)
        (model[0](rows) + (model[1](rows) if both[rank] else 0)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        plain.zero_grad()
        for r in range(size):
            rows = batch(r, step)
            ((oracle[0](rows) + (oracle[1](rows) if both[r] else 0)).square().mean() / size).backward()
        nn.utils.clip_grad_norm_(oracle.parameters(), 0.1)
        plain.step()
    assert_matches(model, oracle, 1e-5)


def handed_over_by_some_ranks(rank: int, size: int) -> None:
    """Gradients that a rank does not pass count as zeros, also in the step after one in which other ranks had them."""
    recipe = Recipe(
        ["both", "first"],
        [],
        ReduceOp.AVERAGE,
        Compression.none,
        passes=1,
        gradient_predivide_factor=1.0,
        sparse_as_dense=False,
        process_set=global_process_set,
        bucket_cap_mb=None,
        shared_memory=True,
    )
    external = ExternalGradients(recipe, [placeholder((3,), torch.float32, torch.device("cpu")) for _ in range(2)])
    for step in range(1, 4):
        gradients = [torch.full((3,), float(step)), torch.full((3,), float(step))]
        places = [0, 1] if rank == 0 else [0]
        found = external.reduce(places, gradients[: len(places)])
        assert [each.tolist() for each in found if each is not None] == [[step] * 3, [step / size] * 3][: len(places)]
        external.forget()


def two_losses(rank: int, size: int) -> None:
    """They have different parameters; `never` has none, or does not exist."""
    for all_used in (False, True):
        model, oracle = Branches(), Branches()
        if all_used:
            del model.never, oracle.never
        optimizer, plain = DistributedOptimizer(sgd(model.parameters())), sgd(oracle.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(rank, step), right=False).square().mean().backward()
            model(batch(rank, step), left=False).square().mean().backward()
            optimizer.step()
            plain.zero_grad()
            joined = torch.cat([batch(r, step) for r in range(size)])
            (oracle(joined, right=False).square().mean() + oracle(joined, left=False).square().mean()).backward()
            plain.step()
        assert_matches(model, oracle)


def clip_after_backward(rank: int, size: int) -> None:
    """If all parameters are used, gradients are reduced when backward returns, even in the first step."""
    model, oracle = net(), net()
    optimizer, plain = DistributedOptimizer(sgd(model.parameters())), sgd(oracle.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        ours = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        plain.zero_grad()
        loss_of(oracle, torch.cat([batch(r, step) for r in range(size)])).backward()
        torch.testing.assert_close(ours, nn.utils.clip_grad_norm_(oracle.parameters(), 0.01))
        plain.step()
    assert_matches(model, oracle)


def clip_with_synchronize(rank: int, size: int) -> None:
    model, oracle = Branches(), Branches()
    optimizer, plain = DistributedOptimizer(sgd(model.parameters())), sgd(oracle.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step), right=rank == 0).square().mean().backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if step % 2:
            optimizer.step()
        else:
            with optimizer.skip_synchronize():
                optimizer.step()
        plain.zero_grad()
        losses = [oracle(batch(r, step), right=r == 0).square().mean() for r in range(size)]
        (torch.stack(losses).sum() / size).backward()
        nn.utils.clip_grad_norm_(oracle.parameters(), 0.01)
        plain.step()
    assert_matches(model, oracle, 1e-5)


def clip_too_early_is_an_error(rank: int, size: int) -> None:
    model = Branches()
    optimizer = DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    model(batch(rank, 0), right=False).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    with pytest.raises(ValueError, match=r"left.*synchronize"):
        optimizer.step()


def zero_grad_in_flight_is_an_error(rank: int, size: int) -> None:
    model = Branches()
    optimizer = DistributedOptimizer(sgd(model.parameters()), bucket_cap_mb=1 / 2**20)
    for _ in range(2):
        model(batch(rank, 0), right=False).square().mean().backward()
        model(batch(rank, 0), left=False).square().mean().backward()
        if _ == 1:
            assert reducer_of(optimizer).in_flight
            with pytest.raises(AssertionError, match="zero_grad"):
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


def too_many_backwards_is_an_error(rank: int, size: int) -> None:
    model = net()
    optimizer = DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    for _ in range(2):
        loss_of(model, batch(rank, 0)).backward()
        with pytest.raises(AssertionError, match=r"4\.\w+.*backward_passes_per_step"):
            loss_of(model, batch(rank, 0)).backward()
        optimizer.zero_grad()
        loss_of(model, batch(rank, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def grad_scaler(rank: int, size: int) -> None:
    """An inf on one rank makes all ranks skip the step; the next step counts again, however gradients are cleared."""
    model, oracle = net(), net()
    optimizer, plain = DistributedOptimizer(sgd(model.parameters())), sgd(oracle.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(6):
        model.zero_grad() if step % 2 else optimizer.zero_grad()
        scaler.scale(loss_of(model, batch(rank, step)) * (torch.inf if step == 2 and rank == 0 else 1)).backward()
        if step > 3:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            plain.zero_grad()
            loss_of(oracle, torch.cat([batch(r, step) for r in range(size)])).backward()
            if step > 3:
                nn.utils.clip_grad_norm_(oracle.parameters(), 0.1)
            plain.step()
    assert scaler.get_scale() == 4.0
    assert_matches(model, oracle)


def grad_scaler_and_unused_parameters(rank: int, size: int) -> None:
    """As above, but ranks use different parameters in each step, with synchronize() before the scaler checks."""
    model, oracle = Branches(), Branches()
    optimizer, plain = DistributedOptimizer(sgd(model.parameters())), sgd(oracle.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    branches = [(True, False), (True, True), (True, False), (False, True), (True, False), (False, True)]
    for step, (left, right) in enumerate(branches):
        model.zero_grad()
        own = [(left, right and (r > 0 or not left)) for r in range(size)]
        out = model(batch(rank, step), *own[rank]).square().mean()
        scaler.scale(out * (torch.inf if step == 2 and rank == 0 else 1)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            plain.zero_grad()
            for r in range(size):
                (oracle(batch(r, step), *own[r]).square().mean() / size).backward()
            nn.utils.clip_grad_norm_(oracle.parameters(), 0.1)
            plain.step()
    assert scaler.get_scale() == 4.0
    assert_matches(model, oracle, 1e-5)


def a_backward_after_the_reduction_is_an_error(rank: int, size: int) -> None:
    """It comes after synchronize(), or after the only backward() of a step if the first step had one."""
    for synchronizes in (True, False):
        model = Branches()
        del model.never
        optimizer = DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        if not synchronizes:
            model(batch(rank, 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(batch(rank, 1), right=False).square().mean().backward()
        if synchronizes:
            optimizer.synchronize()
        with pytest.raises(AssertionError, match=r"'right\.\w+' got .* reduced, by synchronize\(\).* once, on the sum"):
            model(batch(rank, 1), left=False).square().mean().backward()


def overlap(rank: int, size: int) -> None:
    """A bucket is in flight before backward reaches the first layer."""
    model = net()
    optimizer = DistributedOptimizer(sgd(model.parameters()), bucket_cap_mb=200 / 2**20)
    seen = []
    for step in range(3):
        rows = batch(rank, step).requires_grad_()
        rows.register_hook(lambda _: seen.append(reducer_of(optimizer).launched))
        hidden = model[0](rows)
        hidden.register_hook(lambda _: seen.append(reducer_of(optimizer).launched))
        model[1:](hidden).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen[0] == 0
    assert seen[2] >= 1
    assert seen[4] >= 1


def plan_mismatch(rank: int, size: int) -> None:
    model = nn.Linear(4, 3 if rank == 0 else 2)
    with pytest.raises(PlanMismatchError, match=r"'weight' on rank 0 has shape \[3, 4\].*\[2, 4\]"):
        DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(rank == 0)
    for op in (ReduceOp.AVERAGE, ReduceOp.ADASUM):
        with pytest.raises(PlanMismatchError, match="'bias' on rank 0 has requires_grad True"):
            DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=op)
    with pytest.raises(PlanMismatchError, match="op is 'AVERAGE' on rank 0"):
        DistributedOptimizer(sgd(net().parameters()), op=ReduceOp.AVERAGE if rank == 0 else ReduceOp.SUM)
    average(rank, size)


def unfrozen_differently(rank: int, size: int) -> None:
    """The error names the parameters on every rank, even if one rank has nothing new and would wait for no other."""
    for choice in ([["left"], []], [[], ["left", "right"]], [["left"], ["right"]]):
        model = Branches()
        model.left.requires_grad_(False)
        model.right.requires_grad_(False)
        optimizer = DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        for step in range(2):
            names = choice[min(rank, 1)] if step else []
            for name in names:
                getattr(model, name).requires_grad_(True)
            optimizer.zero_grad()
            loss = (model(batch(rank, step)) + model.never(batch(rank, step))).square().mean()
            if not step:
                loss.backward()
                optimizer.step()
                continue
            words = [
                rf"rank {first} trains .*'{name}\.weight', '{name}\.bias'" for first in (0, 1) for name in choice[first]
            ]
            with pytest.raises(PlanMismatchError, match="Unfreeze the same parameters") as caught:
                loss.backward()
            for word in words:
                assert re.search(word, str(caught.value)), (word, str(caught.value))
    average(rank, size)


def a_dropped_optimizer_lets_go(rank: int, size: int) -> None:
    model, oracle = net(), net()
    for _ in range(2):
        optimizer = DistributedOptimizer(sgd(model.parameters()))
        loss_of(model, batch(rank, 0)).backward()
        model.zero_grad()
        del optimizer
        gc.collect()
    optimizer, plain = DistributedOptimizer(sgd(model.parameters())), sgd(oracle.parameters())
    loss_of(model, batch(rank, 0)).backward()
    optimizer.step()
    loss_of(oracle, torch.cat([batch(r, 0) for r in range(size)])).backward()
    plain.step()
    assert_matches(model, oracle)


def checkpointing(rank: int, size: int) -> None:
    """Reentrant checkpoints nest backward passes, whose ends are not the end of the step."""
    from torch.utils.checkpoint import checkpoint

    for reentrant, last in ((False, 4), (True, 4), (True, 5)):  # in the last all parameters are in checkpoints
        model, oracle = net(), net()
        optimizer, plain = DistributedOptimizer(sgd(model.parameters())), sgd(oracle.parameters())
        for step in range(STEPS):
            rows = batch(rank, step).requires_grad_()
            optimizer.zero_grad()
            hidden = checkpoint(model[:2], rows, use_reentrant=reentrant)
            hidden = checkpoint(model[2:last], hidden, use_reentrant=reentrant)
            (model[last:](hidden) - rows[:, :3].sin()).square().mean().backward()
            assert optimizer._reducer is not None
            assert optimizer._reducer.phase is Phase.EAGER
            optimizer.step()
            plain.zero_grad()
            loss_of(oracle, torch.cat([batch(r, step) for r in range(size)])).backward()
            plain.step()
        assert_matches(model, oracle)


def one_rank_does_something_else_first(rank: int, size: int) -> None:
    """A rank that lacks a parameter reduces its loss before step(), so no rank may wait inside backward."""
    model = Branches()
    optimizer = DistributedOptimizer(sgd(model.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(rank, step), right=rank == 0).square().mean()
        loss.backward()
        dist.all_reduce(loss.detach())
        optimizer.step()
    assert_same_bits(model)


def peer_dies(rank: int, size: int) -> None:
    """The last rank dies in its third step: the others' backward raises instead of waiting."""
    model = net()
    optimizer = DistributedOptimizer(sgd(model.parameters()))
    for step in range(2):
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == size - 1:
        os._exit(3)
    with pytest.raises(CollectiveError, match="reducing gradients failed"):
        loss_of(model, batch(rank, 2)).backward()
