"""Each rank draws its own random numbers, different in each run; a seed makes them repeatable."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

import spark_hvd
from spark_hvd.runner.rank.process import RandomState


def draws(preloaded: bool = False) -> dict[str, Any]:
    import random
    import sys

    import numpy as np
    import torch

    found = {
        "random": random.random(),
        "numpy": np.random.rand(),
        "initial_seed": torch.initial_seed(),
        "torch": torch.rand(()).item(),
        "dropout": tuple(torch.nn.functional.dropout(torch.ones(64)).tolist()),
        "weights": torch.nn.Linear(2, 2).weight[0, 0].item(),
        "loader": tuple(int(each) for each in torch.utils.data.DataLoader(range(64), shuffle=True)),  # type: ignore[arg-type]
    }
    if preloaded:
        found["tensorflow"] = float(sys.modules["tensorflow"].random.uniform(()))
    return found


def assert_all_differ(drawn: list[dict[str, Any]]) -> None:
    for name in drawn[0]:
        assert len({each[name] for each in drawn}) == len(drawn), name


def test_ranks_and_runs_draw_others() -> None:
    first = spark_hvd.run_local(draws, num_proc=2, verbose=0)
    again = spark_hvd.run_local(draws, num_proc=2, verbose=0)
    assert_all_differ([*first, *again])


def test_a_seed_makes_them_repeatable() -> None:
    first = spark_hvd.run_local(draws, num_proc=2, seed=7, verbose=0)
    again = spark_hvd.run_local(draws, num_proc=3, seed=7, verbose=0)
    other = spark_hvd.run_local(draws, num_proc=1, seed=8, verbose=0)
    assert again[:2] == first
    assert_all_differ([*again, *other])


def test_by_mpi() -> None:
    pytest.importorskip("mpi4py")
    first = spark_hvd.run_local(draws, num_proc=2, backend="mpi", seed=7, verbose=0)
    assert first == spark_hvd.run_local(draws, num_proc=2, seed=7, verbose=0)
    assert_all_differ([*first])


@pytest.mark.night  # by day: tests/contract/test_tensorflow.py, whose ranks have TensorFlow loaded
def test_tensorflow() -> None:
    pytest.importorskip("tensorflow")
    env = {"SPARK_HVD_PRELOAD": "tensorflow"}
    job: dict[str, Any] = {"kwargs": {"preloaded": True}, "num_proc": 2, "env": env, "verbose": 0}
    first = spark_hvd.run_local(draws, seed=7, **job)
    assert first == spark_hvd.run_local(draws, seed=7, **job)
    assert_all_differ([*first, *spark_hvd.run_local(draws, **job)])


def once_more(folder: str) -> dict[str, Any]:
    import os

    import spark_hvd.torch as hvd

    mine = draws()
    if hvd.generation() == 0:
        Path(folder, str(hvd.rank())).write_text(repr(mine))
        hvd.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return mine


def test_a_restart_draws_the_same_with_a_seed_only(tmp_path: Path) -> None:
    job: dict[str, Any] = {"args": [str(tmp_path)], "num_proc": 2, "max_restarts": 1, "verbose": 0}
    seeded = spark_hvd.run_local(once_more, seed=7, **job)
    assert [repr(each) for each in seeded] == [(tmp_path / str(rank)).read_text() for rank in range(2)]
    free = spark_hvd.run_local(once_more, **job)
    assert all(repr(free[rank]) != (tmp_path / str(rank)).read_text() for rank in range(2))


def lost(folder: str) -> float:
    import os

    import torch

    import spark_hvd.torch as hvd

    drawn = torch.rand(()).item()
    state = hvd.elastic.ObjectState(batch=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.commit()
        if not os.path.exists(folder + "/lost") and hvd.rank() == 1:
            Path(folder, "lost").write_text(repr(drawn))
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.zeros(1))

    train(state)
    return drawn


def test_a_rank_that_joins_draws_its_own(tmp_path: Path) -> None:
    ended = spark_hvd.run_elastic_local(lost, [str(tmp_path)], num_proc=2, seed=7, verbose=0)
    former = float((tmp_path / "lost").read_text())
    assert len({*ended, former}) == 3


def test_what_was_seeded_is_left_alone() -> None:
    state = random.getstate()
    try:
        RandomState(3, 0).start()
        drawn = random.random()
        mine = RandomState(3, 0)
        mine.start()
        assert random.random() == drawn
        after = random.getstate()
        mine.start()
        assert random.getstate() == after
    finally:
        random.setstate(state)
