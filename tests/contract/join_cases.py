"""Uneven numbers of steps: ranks that have joined contribute nothing, and the others train as if alone."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd.context.global_state import current
from spark_hvd.torch.optimizer.distributed import DistributedOptimizer
from tests.contract.optimizer_cases import assert_matches, assert_same_bits, batch, loss_of, net, reducer_of, sgd


class Training:
    """A model on all ranks, and one in a single process that has all ranks' batches."""

    def __init__(self, passes: int = 1, **options: Any) -> None:
        self.model, self.oracle = net(), net()
        self.passes = passes
        self.optimizer = DistributedOptimizer(sgd(self.model.parameters()), backward_passes_per_step=passes, **options)
        self.plain = sgd(self.oracle.parameters())

    def uneven(self, shares: Sequence[int], rank: int, *, tolerance: float = 1e-6, **how: Any) -> None:
        """Make this rank's share of steps, join, continue from the last rank's state, and compare."""
        divisor, total = how.get("divisor"), how.get("total", False)
        for step in range(shares[rank]):
            self.optimizer.zero_grad()
            for number in range(self.passes):
                loss_of(self.model, batch(rank, step * self.passes + number)).backward()
            self.optimizer.step()
        for step in range(max(shares)):
            here = [other for other, share in enumerate(shares) if share > step]
            self.plain.zero_grad()
            for other in here:
                for number in range(self.passes):
                    loss = loss_of(self.oracle, batch(other, step * self.passes + number))
                    (loss if total else loss / (divisor or len(here))).backward()
            self.plain.step()
        last = hvd.join(count_in_average=divisor is not None)
        assert shares[last] == max(shares)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=last)
        assert_matches(self.model, self.oracle, tolerance)


def steps_are_uneven(rank: int, size: int) -> None:
    """Any rank may join first, however gradients are reduced; several rounds use the same optimizer."""
    ways: list[dict[str, Any]] = [{}, {"shared_memory": False}, {"bucket_cap_mb": 200 / 2**20}, {"groups": 2}]
    for options in ways:
        training = Training(**options)
        for shift in range(size):
            training.uneven([1 + 2 * ((other + shift) % size) for other in range(size)], rank)


def a_join_that_is_heard_of_late(rank: int, size: int) -> None:
    """The coordinator takes rank 0 for the last one, but another has made the most steps."""
    queue = type(current().queue)
    join: Any = queue.join

    class Handle:
        def __init__(self, handle: Any) -> None:
            self._handle = handle

        @property
        def done(self) -> bool:
            return bool(self._handle.done)

        def wait(self) -> int:
            self._handle.wait()
            return 0

    with mock.patch.object(queue, "join", lambda self, *args: Handle(join(self, *args))):
        Training().uneven([1 + 2 * other for other in range(size)], rank)


def some_have_no_data_at_all(rank: int, size: int) -> None:
    """The plan is made without these ranks, even without rank 0, whose order of readiness it would follow."""
    for idle in range(size):
        training = Training()
        training.uneven([0 if other == idle else 2 for other in range(size)], rank)
        assert len(reducer_of(training.optimizer).buckets) > 0
        training.uneven([2] * size, rank)
    assert hvd.join() in range(size)


def random_shares(rank: int, size: int) -> None:
    """The order in which ranks end is unknown."""
    training, shares = Training(), random.Random(7)
    for _ in range(12):
        training.uneven([shares.randrange(5) for _ in range(size)], rank, tolerance=1e-5)


def several_passes(rank: int, size: int) -> None:
    """Gradients that a rank has accumulated for a step that it does not make are dropped."""
    training = Training(passes=3)
    for _ in range(2):
        training.uneven([1 + 2 * other for other in range(size)], rank)
        loss_of(training.model, batch(rank, 0)).backward()  # one of three passes
        hvd.join()
        training.model.zero_grad()


def ways_to_count(rank: int, size: int) -> None:
    """Sum gets nothing from joined ranks; Average counts them if asked to, before the sum or after."""
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"op": hvd.Sum}, {"total": True}),
        ({}, {"divisor": size}),
        ({"gradient_predivide_factor": 3.0}, {}),
        ({"compression": hvd.Compression.fp16}, {"tolerance": 1e-2}),
        ({"compression": hvd.Compression.bf16}, {"tolerance": 5e-2}),
    ]
    for options, how in cases:
        Training(**options).uneven(list(range(1, size + 1)), rank, **how)


def losses_of_closures(rank: int, size: int) -> None:
    """LBFGS compares losses with gradients, so Average divides both by the same number."""
    search: dict[str, Any] = {"lr": 1, "max_iter": 10, "line_search_fn": "strong_wolfe"}
    shares = [4, *[1] * (size - 1)]
    for counts in (False, True):
        model, oracle = net().double(), net().double()
        optimizer = DistributedOptimizer(torch.optim.LBFGS(model.parameters(), **search))
        plain = torch.optim.LBFGS(oracle.parameters(), **search)

        def closure(
            of: nn.Module, its: torch.optim.Optimizer, step: int, ranks: list[int], divisor: int
        ) -> torch.Tensor:
            its.zero_grad()
            loss = torch.stack([loss_of(of, batch(each, step).double()) for each in ranks]).sum() / divisor
            loss.backward()
            return loss.detach()

        for step in range(shares[rank]):
            optimizer.step(partial(closure, model, optimizer, step, [rank], 1))
        for step in range(max(shares)):
            here = [other for other, share in enumerate(shares) if share > step]
            plain.step(partial(closure, oracle, plain, step, here, size if counts else len(here)))
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join(count_in_average=counts))
        assert_matches(model, oracle)


def two_optimizers(rank: int, size: int) -> None:
    """The other ranks step them in another order, and one optimizer is not used."""
    models, oracles = [net(), net(), net()], [net(), net(), net()]
    optimizers = [DistributedOptimizer(sgd(model.parameters())) for model in models]
    plains = [sgd(oracle.parameters()) for oracle in oracles]
    for step in range(2 * rank):
        for number in (step % 2, (step + 1) % 2):
            optimizers[number].zero_grad()
            loss_of(models[number], batch(rank, step)).backward()
            optimizers[number].step()
    for step in range(2 * (size - 1)):
        here = [other for other in range(size) if 2 * other > step]
        for oracle, plain in zip(oracles[:2], plains, strict=False):
            plain.zero_grad()
            for other in here:
                (loss_of(oracle, batch(other, step)) / len(here)).backward()
            plain.step()
    assert hvd.join() == size - 1
    for model, oracle in zip(models, oracles, strict=True):
        hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
        assert_matches(model, oracle)


def unused_parameters(rank: int, size: int) -> None:
    """Steps that reduce in step() and not in backward; the joined rank has seen less of the model than the others."""
    for first in (0, 2):
        model = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
        oracle = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
        hvd.broadcast_parameters(model.state_dict())
        oracle.load_state_dict(model.state_dict())
        optimizer, plain = DistributedOptimizer(sgd(model.parameters())), sgd(oracle.parameters())
        shares = [first + 2 * other for other in range(size)]
        for step in range(shares[rank]):
            optimizer.zero_grad()
            model[(step + rank) % 2](batch(rank, step)).square().mean().backward()
            optimizer.step()
        for step in range(max(shares)):
            plain.zero_grad()
            here = [other for other in range(size) if shares[other] > step]
            for other in here:
                (oracle[(step + other) % 2](batch(other, step)).square().mean() / len(here)).backward()
            plain.step()
        assert hvd.join() == size - 1
        hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
        assert_matches(model, oracle)


def sparse_gradients(rank: int, size: int) -> None:
    """Sparse gradients are gathered, alone or next to dense ones, or written into buckets."""
    for dense, as_dense in ((True, False), (False, False), (True, True)):
        torch.manual_seed(1)
        model, oracle = words(dense), words(dense)
        oracle.load_state_dict(model.state_dict())
        optimizer = DistributedOptimizer(sgd(model.parameters()), sparse_as_dense=as_dense)
        plain = sgd(oracle.parameters())
        for step in range(3 * rank):
            optimizer.zero_grad()
            model(tokens(rank, step)).square().sum().backward()
            optimizer.step()
        for step in range(3 * (size - 1)):
            plain.zero_grad()
            here = [other for other in range(size) if 3 * other > step]
            for other in here:
                (oracle(tokens(other, step)).square().sum() / len(here)).backward()
            plain.step()
        assert hvd.join() == size - 1
        hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
        assert_matches(model, oracle)


def words(dense: bool) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(7, 3, sparse=True), *([nn.Linear(3, 2)] if dense else []))


def tokens(rank: int, step: int) -> torch.Tensor:
    return (torch.arange(4) * (rank + 2) + step) % 7


def layers_unfrozen_by_those_who_go_on(rank: int, size: int) -> None:
    """The joined rank has not seen the layer."""
    model, oracle = net(), net()
    for frozen in (model[0], oracle[0]):
        frozen.requires_grad_(False)
    optimizer, plain = DistributedOptimizer(sgd(model.parameters())), sgd(oracle.parameters())
    for step in range(2 + 2 * rank):
        model[0].requires_grad_(step >= 2)
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
    for step in range(2 * size):
        oracle[0].requires_grad_(step >= 2)
        plain.zero_grad()
        here = [other for other in range(size) if 2 + 2 * other > step]
        for other in here:
            (loss_of(oracle, batch(other, step)) / len(here)).backward()
        plain.step()
    assert hvd.join() == size - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
    assert_matches(model, oracle)
    hvd.broadcast_optimizer_state(optimizer, root_rank=size - 1)
    model[0].requires_grad_(True)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
    assert_same_bits(model)


def named_collectives_between_steps(rank: int, size: int) -> None:
    """Losses are averaged over the ranks that have one."""
    model = net()
    optimizer = DistributedOptimizer(sgd(model.parameters()))
    for step in range(1 + 2 * rank):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        here = [other for other in range(size) if 1 + 2 * other > step]
        averaged = hvd.allreduce(torch.tensor([float(rank)]), name="loss")
        torch.testing.assert_close(averaged, torch.tensor([sum(here) / len(here)]))
    assert hvd.join() == size - 1


def an_optimizer_that_one_rank_has_dropped(rank: int, size: int) -> None:
    """No rank waits for its steps, whether it was dropped before the others joined or afterwards."""
    training = Training()
    for late in (False, True):
        dropped: Any = DistributedOptimizer(sgd(net().parameters()))
        if rank == 0 and not late:
            dropped = None
        if late:
            for step in range(2 * rank):
                training.optimizer.zero_grad()
                loss_of(training.model, batch(rank, step)).backward()
                training.optimizer.step()
            if rank == size - 1:
                dropped = None
        assert hvd.join() in range(size)
        assert dropped is not None or rank in (0, size - 1)
    hvd.broadcast_parameters(training.model.state_dict())
    assert_same_bits(training.model)


def what_needs_every_rank(rank: int, size: int) -> None:
    """A joined rank cannot add parameters."""
    training = Training()
    training.uneven([1] * size, rank)
    if rank > 0:
        with pytest.raises(hvd.MismatchError, match=r"add_param_group cannot run: rank 0 called join\(\)"):
            training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        assert len(training.optimizer.param_groups) == 1
    hvd.join()
    training.uneven([2 + other for other in range(size)], rank)


def join_after_a_backward_that_failed(rank: int, size: int) -> None:
    """Buckets with gradients may be in flight then."""
    training = Training(bucket_cap_mb=200 / 2**20)
    training.uneven([1] * size, rank)
    rows = batch(rank, 0)

    def fail(_: torch.Tensor) -> None:
        assert reducer_of(training.optimizer).in_flight
        raise KeyError("out of data")

    hidden = training.model[0](rows)
    hidden.register_hook(fail)
    with pytest.raises(KeyError):
        training.model[1:](hidden).sum().backward()
    with pytest.raises(AssertionError, match=r"join\(\) was called while gradients are being reduced"):
        hvd.join()
    training.optimizer.step()
    hvd.join()


def a_rank_dies_while_others_have_joined(rank: int, size: int) -> None:
    """The other ranks raise an error that names the dead rank."""
    training = Training()
    training.uneven([1] * size, rank)
    if rank == size - 1:
        loss_of(training.model, batch(rank, 1)).backward()
        os._exit(3)
    with pytest.raises(hvd.CollectiveError, match=f"rank {size - 1} "):
        hvd.join()


def nothing_more_is_sent(rank: int, size: int) -> None:
    """A step has one all-reduce per bucket, whether a rank has joined or not."""
    training = Training(shared_memory=False, bucket_cap_mb=200 / 2**20)
    training.uneven([1] * size, rank)
    optimizer, model = training.optimizer, training.model
    with pytest.MonkeyPatch.context() as patch:
        sent: list[torch.Tensor] = []
        send = dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda tensor, **how: (sent.append(tensor), send(tensor, **how))[1])
        patch.setattr(dist, "all_gather", None)
        for step in range(2 + rank):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
        buckets = len(reducer_of(optimizer).buckets)
        assert buckets > 1
        assert len(sent) == buckets * (2 + rank)
    hvd.join()
