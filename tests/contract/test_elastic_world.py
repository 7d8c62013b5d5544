"""Elastic worlds of real processes: ranks die, stop, come and leave; those that are left go on with right results."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.elastic_run import run
from tests.elastic_ranks import TrainState, elastic_job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECONDS = 5.0
"""Within which ranks must be free of one that is gone."""


def model_of(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 8, generator=generator)


def weights(model: torch.nn.Module) -> list[float]:
    return torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()


# ---- what a rank dies in

VICTIM_STEP = 5


def by_name(state: TrainState, step: int) -> None:
    mean = hvd.allreduce(torch.full((10,), float(hvd.rank())), name="mean")
    assert mean[0] == (hvd.size() - 1) / 2
    total = hvd.allreduce(torch.ones(1 << 20), name="large", op=hvd.Sum)
    assert bool((total == hvd.size()).all())


def by_optimizer(state: TrainState, step: int) -> None:
    """The optimizer was made outside."""
    before = [param.detach().clone() for param in state.model.parameters()]
    state.optimizer.zero_grad()
    state.model(batch(step, hvd.rank())).square().mean().backward()
    state.optimizer.step()
    after = [param.detach().clone() for param in state.model.parameters()]
    expected = model_of()
    for param, value in zip(expected.parameters(), before, strict=True):
        param.data.copy_(value)
    for rank in range(hvd.size()):
        (expected(batch(step, rank)).square().mean() / hvd.size()).backward()
    for param, value, new in zip(expected.parameters(), before, after, strict=True):
        torch.testing.assert_close(new, value - 0.1 * param.grad)


def by_ddp(state: TrainState, step: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(state.model)
    model.zero_grad()
    model(batch(step, hvd.rank())).square().mean().backward()


def by_barrier(state: TrainState, step: int) -> None:
    hvd.barrier()


WORK: dict[str, Callable[[TrainState, int], None]] = {
    "named": by_name,
    "optimizer": by_optimizer,
    "ddp": by_ddp,
    "barrier": by_barrier,
}


def in_the_midst(work: str, step: int) -> None:
    """A victim ends when the others are in the collective already."""
    time.sleep(0.2)


def train_with_victim(work: str, end: str, victim: int, steps: int = 10) -> dict[str, Any]:
    me = hvd.rank()
    model = model_of(me)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if work == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = TrainState(model, optimizer)

    @run
    def train(state: TrainState) -> tuple[int, int]:
        while state.step < steps:
            if state.step == VICTIM_STEP and hvd.generation() == 0 and me == victim:
                time.sleep(0.2)  # the others are in the collective already
                os.kill(os.getpid(), getattr(signal, end))
            WORK[work](state, state.step)
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
        return hvd.rank(), hvd.size()

    place = train(state)
    return {"place": place, "resets": state.resets, "weights": weights(model), "commits": state.commits}


@pytest.mark.parametrize("victim", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("work", list(WORK))
def test_others_go_on_without_a_rank(work: str, end: str, victim: int) -> None:
    with elastic_job(train_with_victim, work, end, victim, count=3) as job:
        job.form(job.ranks)
        others = [rank for rank in job.ranks if rank.number != victim]
        if end == "SIGKILL":
            job.ranks[victim].process.join(30)
        else:
            time.sleep(1.0)
        if end == "SIGSTOP" or work == "ddp":
            began = time.monotonic()
            job.abort(others)
            for rank in others:
                rank.await_("broken")
            assert time.monotonic() - began < SECONDS
        job.form(others)
        results = job.finish(others)
        assert [result["place"] for result in results] == [(0, 2), (1, 2)]
        assert [result["resets"][-1] for result in results] == [(1, 0, 2), (1, 1, 2)]
        assert results[0]["weights"] == results[1]["weights"]
        assert results[0]["commits"] == results[1]["commits"] == 5
