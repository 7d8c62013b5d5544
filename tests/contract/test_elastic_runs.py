"""Elastic runs in which ranks fail: the survivors continue from the last commit, and the final model is correct."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.runner import RankFailedError, ResetLimitError, StateLostError, run_elastic_local
from spark_hvd.testing import FaultPlan
from tests.elastic_jobs import SAMPLES, Job, Result, checked, read, train

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS = 12
"""Two epochs on two ranks."""


def launch(job: Job, **options: Any) -> list[Result]:
    """Train on two ranks, and check what must hold in any case."""
    results = run_elastic_local(train, [job], timeout=60, verbose=0, **{"num_proc": 2, **options})
    first = checked(results, job.every)
    assert sum(map(len, first.seen)) == job.epochs * SAMPLES
    return results


@pytest.fixture(scope="module")
def unbroken() -> Result:
    """The result of a run without faults."""
    result = launch(Job(), reset_limit=0)[0]
    assert result.worlds == [(0, 2)] * STEPS
    return result


def survivors_steps(log: Path) -> dict[int, list[int]]:
    """The steps after which each process has committed."""
    steps = defaultdict(list)
    for line in read(log):
        steps[line.process].append(line.step)
    return steps


KINDS = ("kill", "stop", "raises", "segfault", "exit", "partition")


@pytest.mark.parametrize(("kind", "rank"), [*((kind, 0) for kind in KINDS), ("kill", 1)])
def test_a_fault_costs_nothing_that_was_committed(kind: str, rank: int, unbroken: Result, tmp_path: Path) -> None:
    log = tmp_path / "log"
    faults = getattr(FaultPlan(), kind)(rank=rank, step=4)
    results = launch(Job(faults, log=str(log)), reset_limit=1)

    # The fault happened once. The survivor is rank 0, and a new process replaced the lost one.
    assert results[0].worlds == [(0, 2)] * 4 + [(1, 2)] * (STEPS - 4)
    assert [result.started for result in results] == ([0, 0] if kind == "partition" else [0, 1])
    # If each step has the same members, the weights are bitwise those of the run without faults.
    assert (results[0].seen, results[0].weights) == (unbroken.seen, unbroken.weights)
    # No commit is made twice: ranks never go back behind a commit.
    everybodys = survivors_steps(log)
    assert len(everybodys) == (2 if kind == "partition" else 3)
    for steps in everybodys.values():
        assert steps == list(range(steps[0], steps[-1] + 1))
    assert max(steps[0] for steps in everybodys.values()) in (1, 5)


def test_steps_since_the_last_commit_are_made_again(unbroken: Result) -> None:
    job = Job(FaultPlan().kill(rank=0, step=5), every=3)
    first = launch(job)[0]
    assert first.worlds == [(0, 2)] * 3 + [(1, 2)] * (STEPS - 3)
    assert (first.seen, first.weights) == (unbroken.seen, unbroken.weights)


def test_the_same_fault_in_each_generation_is_survived_when_there_are_commits_between(unbroken: Result) -> None:
    """A host is excluded after two failures without a commit, and the run fails after three: neither happens here."""
    plan = FaultPlan.random(1, 5, ["kill"], size=1, min_step=1, max_step=2)
    first = launch(Job(plan), reset_limit=5)[0]
    assert first.generation == 5
    assert (first.seen, first.weights) == (unbroken.seen, unbroken.weights)


def test_a_smaller_world_goes_on_at_once_and_grows_again(tmp_path: Path) -> None:
    """The replacement arrives after the survivor has made a step alone; the survivor makes one more, and then waits."""
    job = Job(FaultPlan().kill(rank=0, step=4), epochs=5, log=str(tmp_path / "log"), late=(2, 1), stay=(1, 6))
    first = launch(job, min_num_proc=1)[0]
    assert first.sizes == [2, 1, 2]
    generations = sorted({generation for generation, _ in first.worlds})
    assert generations == [0, 1, 2]
    assert torch.tensor(first.weights).allclose(torch.ones(7) - torch.eye(7)[6], atol=0.05)


@pytest.mark.slow
def test_a_survivor_that_does_not_come_back_is_taken_for_hung() -> None:
    """Only then: given more time than the step takes, the others wait for it."""
    import time

    def fn(seconds: float) -> tuple[int, int]:
        state: Any = hvd.elastic.ObjectState(step=0)
        faults = FaultPlan().kill(rank=1, step=2)

        @hvd.elastic.run
        def steps(state: Any) -> None:
            while state.step < 4:
                faults.at(state.step)
                if state.step == 2 and hvd.generation() == 0:
                    time.sleep(seconds)
                hvd.allreduce(torch.ones(1))
                state.step += 1
                state.commit()

        steps(state)
        return hvd.generation(), state.commits

    assert run_elastic_local(fn, [1.5], rejoin_timeout=10.0) == [(1, 4), (1, 4)]
    with pytest.raises(StateLostError, match=r"all ranks that had the state are gone \(2 commits are lost\)"):
        run_elastic_local(fn, [50.0], rejoin_timeout=1.0, timeout=60)  # it ends long before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_notice_is_no_failure(rank: int, unbroken: Result) -> None:
    """The rank leaves at a commit and hands over its state; the task returns with a new rank."""
    first = launch(Job(FaultPlan().notice(rank=rank, step=4), stay=(0, 5)), reset_limit=0)[0]
    assert first.generation >= 1
    assert first.sizes == [2]
    assert (first.seen, first.weights) == (unbroken.seen, unbroken.weights)
    with pytest.raises(ResetLimitError):  # as for a kill
        launch(Job(FaultPlan().kill(rank=rank, step=4)), reset_limit=0)


def test_a_world_grows_at_a_commit_and_that_is_no_failure(tmp_path: Path) -> None:
    job = Job(epochs=3, log=str(tmp_path / "log"), late=(1, 1), stay=(0, 5))
    first = launch(job, num_proc=1, max_num_proc=2, reset_limit=0)[0]
    assert first.size == 2
    assert first.sizes == [1, 2]


def test_process_sets_are_registered_anew_in_each_world() -> None:
    def fn(faults: FaultPlan) -> tuple[int, list[float]]:
        state: Any = hvd.elastic.ObjectState(step=0, sums=[])

        @hvd.elastic.run
        def steps(state: Any) -> None:
            alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())][hvd.rank()]
            everyone = hvd.add_process_set(range(hvd.size())) if hvd.size() > 2 else hvd.global_process_set
            while state.step < 6:
                faults.at(state.step)
                own = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=alone)
                both = hvd.allreduce(own, op=hvd.Sum, process_set=everyone)
                state.sums = [*state.sums, both.item()]
                state.step += 1
                state.commit()

        steps(state)
        return hvd.generation(), state.sums

    faults = FaultPlan().kill(rank=0, step=2).raises(rank=1, step=4, generation=1)
    assert run_elastic_local(fn, [faults], timeout=60) == [(2, [2.0] * 6)] * 2


def test_a_second_elastic_function_in_the_same_fn() -> None:
    def fn(faults: FaultPlan) -> list[int]:
        totals = []
        for offset in (0, 100):
            state: Any = hvd.elastic.ObjectState(step=0, total=0)

            @hvd.elastic.run
            def steps(state: Any, offset: int = offset) -> int:
                while state.step < 4:
                    faults.at(offset + state.step)
                    state.total += int(hvd.allreduce(torch.ones(1), op=hvd.Sum))
                    state.step += 1
                    state.commit()
                return int(state.total)

            totals.append(steps(state))
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()  # in the world that remains
        return totals

    assert run_elastic_local(fn, [FaultPlan()], reset_limit=0) == [[8, 8], [8, 8]]
    assert run_elastic_local(fn, [FaultPlan().kill(rank=1, step=2)], timeout=60) == [[8, 8], [8, 8]]
    kill = FaultPlan().kill(rank=1, step=102, generation=1)
    assert run_elastic_local(fn, [kill], min_num_proc=1, timeout=60) == [[8, 6]]
    with pytest.raises(RankFailedError, match="rank 1 is in elastic function number 1 of fn, and rank 0 in number 2"):
        run_elastic_local(fn, [kill], timeout=60)
