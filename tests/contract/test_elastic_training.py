"""A whole training with losses and growth ends with the weights and samples of an undisturbed one."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from tests.elastic_jobs import await_update
from tests.elastic_ranks import elastic_job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

COUNT, BLOCK, EPOCHS = 50, 8, 2


def train(victim: int | None, every: int, grows_at: int | None = None) -> dict[str, Any]:
    """Train with blocks of samples that do not depend on the number of ranks; `victim` dies once, during a step.

    The first generation stays at step `grows_at` until other ranks should take part.
    """
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    rows = torch.randn(COUNT, 3, generator=torch.Generator().manual_seed(1))
    sampler = hvd.elastic.ElasticSampler(range(COUNT), seed=2)
    state = hvd.elastic.TorchState(
        model,
        optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9),
        sampler=sampler,
        epoch=0,
        steps=0,
        seen=[],
        sizes=[],
    )
    process = os.getpid()

    @hvd.elastic.run
    def go(state: Any) -> None:
        while state.epoch < EPOCHS:
            sampler.set_epoch(state.epoch)
            loader = torch.utils.data.DataLoader(range(COUNT), batch_size=BLOCK // hvd.size(), sampler=sampler)  # type: ignore[arg-type]
            for number, batch in enumerate(loader):
                if (hvd.generation(), state.steps) == (0, grows_at):
                    await_update()
                loss = model(rows[batch]).square().mean()
                loss.backward()
                if victim == hvd.rank() and hvd.generation() == 0 and state.steps == 4:
                    os.kill(process, signal.SIGKILL)
                optimizer.step()
                state.scheduler.step()
                sampler.record_batch(number, len(batch))
                state.seen.append(sorted(hvd.allgather(batch).tolist()))
                state.sizes.append(hvd.size())
                state.steps += 1
                if state.steps % every == 0:
                    state.commit()
                optimizer.zero_grad()  # at the end, because a gradient from before a failure must not remain afterwards
            state.epoch += 1

    go(state)
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    return {"weights": weights.numpy().tobytes(), "seen": state.seen, "sizes": state.sizes, "steps": state.steps}


def unbroken(count: int) -> dict[str, Any]:
    with elastic_job(train, None, 1, count=count) as job:
        job.form(job.ranks)
        results = job.finish(job.ranks)
    assert all(result == results[0] for result in results)
    return dict(results[0])


@pytest.mark.parametrize(("victim", "every"), [(1, 3)])
@pytest.mark.slow
def test_a_lost_rank_is_replaced_without_a_trace(victim: int, every: int) -> None:
    expected = unbroken(2)
    assert expected["steps"] == 2 * 7
    with elastic_job(train, victim, every, count=2) as job:
        fresh = job.start()
        job.form(job.ranks[:2])
        job.ranks[victim].await_end()
        members = [job.ranks[1 - victim], *fresh]
        job.form(members)
        results = job.finish(members)
    assert results == [expected, expected]


def test_growth_in_an_epoch_repeats_and_loses_nothing() -> None:
    expected = unbroken(1)
    with elastic_job(train, None, 1, 3, count=1) as job:
        fresh = job.start()
        job.form(job.ranks[:1])
        for _ in range(3):
            job.ranks[0].await_("committed")
        job.ranks[0].say("update")
        job.ranks[0].await_("yielded")
        job.form([job.ranks[0], *fresh])
        results = job.finish([job.ranks[0], *fresh])
    assert results[0] == results[1]
    sizes = results[0]["sizes"]
    assert sizes == sorted(sizes)
    assert {1, 2} == set(sizes)
    for mine, theirs in zip(results[0]["seen"], expected["seen"], strict=True):
        assert set(mine) == set(theirs)
