"""Ranks of elastic worlds die or stop, during training or while they join: the others are released and continue."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.context import init as context
from spark_hvd.elastic.run import run
from spark_hvd.world import launcher as elastic_launcher
from spark_hvd.world.layout import World
from tests.elastic_ranks import PipeLauncher, TrainState, elastic_job
from tests.elastic_training import batch, model_of, resources, train_a_step, weights

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECONDS = 20.0
"""Seconds within which ranks must be released; the timeout of collectives, a minute, would be too late."""


# ---- what a rank dies in ---------------------------------------------------------------------------------------------

VICTIM_STEP = 5


def by_name(state: TrainState, step: int) -> None:
    mean = hvd.allreduce(torch.full((10,), float(hvd.rank())), name="mean")
    assert mean[0] == (hvd.size() - 1) / 2
    total = hvd.allreduce(torch.ones(1 << 20), name="large", op=hvd.Sum)
    assert bool((total == hvd.size()).all())


def by_ddp(state: TrainState, step: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(state.model)
    model.zero_grad()
    model(batch(step, hvd.rank())).square().mean().backward()


def by_barrier(state: TrainState, step: int) -> None:
    hvd.barrier()


WORK: dict[str, Callable[[TrainState, int], None]] = {
    "named": by_name,
    "optimizer": train_a_step,
    "ddp": by_ddp,
    "barrier": by_barrier,
}


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
                time.sleep(0.2)  # the others are already in the collective
                os.kill(os.getpid(), getattr(signal, end))
            WORK[work](state, state.step)
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
        return hvd.rank(), hvd.size()

    place = train(state)
    return {"place": place, "resets": state.resets, "weights": weights(model), "commits": state.commits}


@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("work", list(WORK))
def test_others_go_on_without_a_rank(work: str, end: str) -> None:
    victim = 0
    with elastic_job(train_with_victim, work, end, victim, count=3) as job:
        job.form(job.ranks)
        others = [rank for rank in job.ranks if rank.number != victim]
        if end == "SIGKILL":
            job.ranks[victim].await_end()
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


# ---- joining ---------------------------------------------------------------------------------------------------------


def ends_while_it_joins(end: str, victims: list[int], milliseconds: list[int]) -> list[dict[str, int]]:
    """In each generation but the last, one rank ends this many milliseconds after it was told to go."""
    launcher = elastic_launcher.installed()
    assert isinstance(launcher, PipeLauncher)
    me, found = hvd.rank(), []
    join = context.join

    def joining(world: World, *args: Any, **kwargs: Any) -> None:
        if me in victims and world.generation == victims.index(me):
            pause = milliseconds[world.generation] / 1000

            def strike() -> None:
                time.sleep(pause)
                os.kill(os.getpid(), getattr(signal, end))

            threading.Thread(target=strike, daemon=True).start()
        join(world, *args, **kwargs)
        if me in victims and world.generation == victims.index(me):
            time.sleep(10)  # it was faster

    context.join = joining  # what the launcher calls
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    state = TrainState(model, optimizer)

    @run
    def train(state: TrainState) -> None:
        train_a_step(state, 0)
        found.append(resources())
        if hvd.generation() < len(victims):
            hvd.barrier()

    train(state)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "first"),
    [pytest.param("SIGSTOP", False, id="a member"), pytest.param("SIGKILL", True, id="who serves the store")],
)
def test_a_rank_ends_while_it_joins(end: str, first: bool) -> None:
    """This covers every moment of joining: the others are released soon after they have been told."""
    moments = [0, 1, 2, 4, 6, 8, 10, 13, 16, 20, 25, 30, 40, 60]
    victims = list(range(2, 2 + len(moments)))
    with elastic_job(ends_while_it_joins, end, victims, moments, count=2 + len(moments)) as job:
        two = job.ranks[:2]
        for victim in victims:
            struck = job.ranks[victim]
            job.form([struck, *two] if first else [*two, struck], join=False)
            if end == "SIGKILL":
                struck.await_end()
            else:
                time.sleep(0.3)
            job.abort(two)
            for rank in two:
                rank.await_("not joined", "broken", seconds=SECONDS)
        job.form(two)
        assert all(job.finish(two))
