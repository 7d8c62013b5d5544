"""LocalSGD and DiLoCo on real ranks, and in elastic runs."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd import run_elastic_local
from tests.contract import local_sgd_cases
from tests.contract.local_sgd_cases import EVERY, batch, inner, net, step, weights
from tests.contract.optimizer_ranks import Ranks
from tests.elastic_jobs import await_update

cloudpickle.register_pickle_by_value(local_sgd_cases)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CASES = [
    value
    for value in vars(local_sgd_cases).values()
    if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["rank", "size"]
]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_ranks(world: Ranks, case: Callable[[int, int], None]) -> None:
    world.run(case)


@pytest.mark.slow
def test_a_rank_that_leaves_between_two_exchanges_loses_its_local_steps_alone(tmp_path: Path) -> None:
    """The others continue from the last commit, and a newcomer gets their state.

    The first of two fragments is in flight when the rank leaves.
    """

    def train() -> torch.Tensor:
        model = net(hvd.rank())
        compression = hvd.Int4Compressor(16)
        optimizer = hvd.DiLoCo(model, inner(model), EVERY, compression=compression, overlap=1, fragments=2)
        state = hvd.elastic.TorchState(model, optimizer, number=0)

        @hvd.elastic.run
        def go(state: Any) -> None:
            note = (weights(model), optimizer.state_dict(), state.number)
            torch.save(note, tmp_path / f"{hvd.generation()}.{hvd.rank()}")
            while state.number < 4 * EVERY:
                if hvd.generation() == 0 and hvd.rank() == 1 and state.number == 2 * EVERY + 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                if hvd.size() == 1:
                    await_update()
                step(model, optimizer, batch(hvd.rank(), state.number))
                state.number += 1
                if state.number % EVERY == 0:
                    optimizer.synchronize()
                    torch.save(weights(model), tmp_path / f"{hvd.generation()}.{hvd.rank()}.{state.number}")
                    state.commit()

        go(state)
        return weights(model)

    results = run_elastic_local(train, num_proc=2, min_num_proc=1, max_num_proc=2)
    assert torch.equal(results[0], results[1])
    synchronised = torch.load(tmp_path / f"0.0.{2 * EVERY}")
    after, state, number = torch.load(tmp_path / "1.0")
    assert (number, state["outer"]["rounds"], state["outer"]["steps"]) == (2 * EVERY, 8, [0, 0])
    assert torch.equal(after, synchronised)
    # If the survivor returns slowly, the newcomer is already in the first generation after the loss.
    at_once = (tmp_path / "1.1").exists()
    grown = [torch.load(tmp_path / f"{1 if at_once else 2}.{rank}") for rank in range(2)]
    assert [each[2] for each in grown] == [(2 if at_once else 3) * EVERY] * 2
    before = synchronised if at_once else torch.load(tmp_path / f"1.0.{3 * EVERY}")
    assert all(torch.equal(each[0], before) for each in grown)
    assert all(torch.equal(each[1]["outer"]["anchors"][0], grown[0][1]["outer"]["anchors"][0]) for each in grown)
