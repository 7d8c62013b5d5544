"""Elastic worlds of real processes: they move from world to world, with correct results."""

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
from spark_hvd.context import global_state
from spark_hvd.elastic.run import run
from tests.elastic_ranks import TrainState, elastic_job
from tests.elastic_training import batch, model_of, resources, train_a_step, weights

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# ---- from generation to generation -----------------------------------------------------------------------------------


def comes_and_goes(steps: int, last_generation: int) -> dict[str, Any]:
    """The last rank of the world dies during a step, in each generation but the last."""
    model = torch.nn.Sequential(model_of(hvd.rank()), hvd.SyncBatchNorm(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=2)
    state = TrainState(model, optimizer)
    evens = hvd.ProcessSet([0, 2])
    found: list[dict[str, int]] = []

    @run
    def train(state: TrainState) -> None:
        assert evens.process_set_id is None
        hvd.add_process_set(evens)
        if evens.included():
            total = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="evens", process_set=evens)
            assert total.tolist() == [2.0] * 3
        norm = hvd.SyncBatchNorm(4)  # one that newcomers make for the first time
        first = state.step
        while state.step < steps or hvd.generation() < last_generation:
            step = state.step
            if step == first + 3 and hvd.generation() < last_generation:
                if hvd.rank() == hvd.size() - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.02)
            norm(torch.randn(3, 4)).sum().backward()
            optimizer.zero_grad()
            for part in range(2):
                model(batch(2 * step + part, hvd.rank())).square().mean().backward()
            optimizer.step()
            scheduler.step()
            hvd.allreduce(torch.ones(1 << 19), name="through shared memory")
            state.step += 1
            state.commit()
        found.append({})

    place_before = hvd.rank(), hvd.size()
    on_reset = state.on_reset

    def reset() -> None:
        on_reset()
        found.append(resources())

    state.on_reset = reset  # type: ignore[method-assign]
    train(state)
    return {
        "weights": weights(model),
        "momentum": [entry["momentum_buffer"].tolist() for entry in optimizer.state_dict()["state"].values()],
        "step": state.step,
        "resources": found,
        "before": place_before,
    }


def through_generations(count: int) -> None:
    with elastic_job(comes_and_goes, 3 * count + 6, count, count=4, timeout=30.0) as job:
        members = list(job.ranks)
        for _ in range(count):
            job.form(members)
            (newcomer,) = job.start()  # it prepares while the others train
            members[-1].await_end()
            job.abort(members[:-1])
            members = [*members[:-1], newcomer]
        job.form(members)
        results = job.finish(members)
    assert len({str((result["weights"], result["momentum"], result["step"])) for result in results}) == 1
    assert results[0]["step"] == 3 * count + 6
    # What Gloo loses on the way (see spark_hvd.transport.waits) is held until the collective timeout.
    found = [each for each in results[0]["resources"] if each and not each["teardowns"]]
    half, some = len(found) // 2, max(1, len(found) // 5)
    for kind in found[0]:
        numbers = [each[kind] for each in found]
        # For a generation or two, connections of the previous one are still being closed; a leak stays in all.
        assert min(numbers[-some:]) <= max(numbers[half - some : half + 1]) + 2, (kind, numbers)


@pytest.mark.slow
def test_members_change_and_weights_agree() -> None:
    through_generations(4)


@pytest.mark.night
@pytest.mark.timeout(900)
def test_nothing_is_left_of_fifty_generations() -> None:
    through_generations(50)


def grows(steps: int) -> dict[str, Any]:
    model = model_of(hvd.rank())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    state = TrainState(model, optimizer)
    calls: list[tuple[int, int, int]] = []

    @run
    def train(state: TrainState) -> int:
        calls.append((hvd.generation(), hvd.size(), state.step))
        while state.step < steps or hvd.generation() == 0:
            train_a_step(state, state.step)
            state.step += 1
            state.commit()
        return hvd.size()

    size = train(state)
    again = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item()
    return {"size": size, "again": again, "calls": calls, "weights": weights(model), "restored": state.restored}


def test_a_newcomer_is_taken_in_at_a_commit() -> None:
    with elastic_job(grows, 20, count=1) as job:
        job.form(job.ranks)
        job.ranks[0].await_("committed")
        newcomers = job.start(2)
        job.ranks[0].say("update")
        assert job.ranks[0].await_("yielded")[1] == 0
        job.form([*job.ranks[:1], *newcomers])
        results = job.finish(job.ranks)
    assert [result["size"] for result in results] == [result["again"] for result in results] == [3] * 3
    stood_at = results[0]["calls"][1][2]
    assert stood_at > 0
    assert results[0]["restored"] == 0
    assert all(result["calls"][-1] == (1, 3, stood_at) for result in results)
    assert results[0]["weights"] == results[1]["weights"] == results[2]["weights"]


def test_a_generation_that_is_over_before_all_have_returned() -> None:
    """Ranks that have returned do the rest together with the others, from the last commit on."""
    with elastic_job(grows, 5, count=3) as job:
        job.form(job.ranks)
        first, second, lost = job.ranks
        for rank in (first, second):
            rank.say("update")
            rank.await_("yielded")
        job.form(job.ranks)
        for rank in (first, second):
            rank.await_("finished")
        lost.kill()
        for rank in (first, second):
            rank.say("verdict", False)
        job.form([second, first])
        results = job.finish([second, first])
    assert [result["size"] for result in results] == [2, 2]
    assert results[0]["weights"] == results[1]["weights"]


# ---- outside the worlds ----------------------------------------------------------------------------------------------


def prepares() -> list[str]:
    errors = []

    def fails(kind: type[Exception], call: Callable[[], Any]) -> None:
        with pytest.raises(kind) as caught:
            call()
        errors.append(str(caught.value))

    place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
    assert place == (1, 2, 1, 2, 0, 1)
    assert hvd.is_initialized()
    assert hvd.is_homogeneous()
    assert hvd.generation() == 0
    hvd.init(fusion_threshold=12345)
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    adasum = hvd.DistributedOptimizer(torch.optim.SGD(model_of().parameters(), lr=0.1), op=hvd.Adasum)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    optimizer.set_backward_passes_per_step(2)
    model(batch(0, 0)).sum().backward()
    fails(hvd.NotInitializedError, optimizer.step)
    fails(hvd.NotInitializedError, optimizer.synchronize)
    fails(hvd.NotInitializedError, adasum.step)
    fails(hvd.NotInitializedError, lambda: hvd.allreduce(torch.ones(1)))
    fails(hvd.NotInitializedError, hvd.barrier)
    fails(hvd.NotInitializedError, lambda: hvd.broadcast_object(1))
    fails(hvd.NotInitializedError, lambda: hvd.add_process_set([0]))
    fails(ValueError, lambda: hvd.init(process_sets=[hvd.ProcessSet([0])]))
    fails(ValueError, lambda: hvd.DistributedOptimizer(optimizer))
    kept = []

    @run
    def train(state: TrainState, number: int, *, word: str) -> tuple[int, str]:
        """Make the steps."""
        assert global_state.current().engine.config.fusion_threshold == 12345
        state.optimizer.zero_grad()
        for part in range(2):
            model(batch(part, hvd.rank())).sum().backward()
        state.optimizer.step()
        kept.append(hvd.DistributedOptimizer(torch.optim.SGD(model_of().parameters(), lr=0.1)))
        if hvd.generation() == 1:
            with pytest.raises(hvd.NotInitializedError, match="anew in each call"):
                kept[0].step()
        kept[-1].step()
        return number, word

    state = TrainState(model, optimizer)
    assert train.__name__ == "train"
    assert train.__doc__ == "Make the steps."
    assert train(state, 7, word="first") == (7, "first")
    assert train(state, 8, word="second") == (8, "second")
    fails(TypeError, lambda: train(model, 1, word="no state"))  # type: ignore[type-var]
    return errors


def test_a_provisional_place() -> None:
    with elastic_job(prepares, count=2) as job:
        (lonely,) = job.ranks[1:]
        for _ in range(2):  # a second elastic function enters again
            job.form([lonely])
            lonely.await_("finished")
            lonely.say("verdict", True)
        errors = lonely.await_("value")[1]
    assert all("decorated with hvd.elastic.run" in error for error in errors[:8]), errors
    assert "wrap it once" in errors[8]
    assert "got Sequential, which has no sync and no restore and no on_reset" in errors[9]


def makes_other_optimizers() -> str:
    models = [model_of() for _ in range(1 + hvd.rank())]
    kept = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    try:
        run(lambda state: None)(TrainState(models[0], kept[0]))
    except hvd.MismatchError as error:
        return str(error)
    return ""


def test_ranks_with_other_optimizers() -> None:
    with elastic_job(makes_other_optimizers, count=2) as job:
        job.form(job.ranks)
        errors = [rank.await_("value")[1] for rank in job.ranks]
    assert errors[0] == errors[1]
    assert "rank 0 made 1 DistributedOptimizers that still exist, but rank 1 made 2" in errors[0]


def fails_by_itself() -> None:
    @run
    def train(state: TrainState) -> None:
        raise RuntimeError("a fault of the user's")

    model = model_of()
    train(TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def test_an_error_of_the_users_is_raised() -> None:
    with elastic_job(fails_by_itself, count=1) as job:
        job.form(job.ranks)
        with pytest.raises(AssertionError, match="a fault of the user's"):
            job.ranks[0].await_("value")


def test_without_a_launcher() -> None:
    """In this process the world has one rank, and the function is called once."""
    model = model_of()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        assert run(lambda state, number: (number, hvd.size()))(state, 3) == (3, 1)
        assert hvd.generation() == 0
        inner = run(lambda state: None)
        with pytest.raises(RuntimeError, match="cannot be nested"):
            run(lambda state: inner(state))(state)
    finally:
        hvd.shutdown()
