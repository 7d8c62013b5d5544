"""Restarts of run_local on real processes: fn continues from its checkpoint, and ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd import run_local
from spark_hvd.runner import RankFailedError

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
STEPS = 6


def train(folder: str, deaths: dict[int, int], wait: bool = True) -> dict[str, Any]:
    """Six steps of SGD with a checkpoint after each. Rank 1 is killed at the step that `deaths` has for this start."""
    torch.manual_seed(hvd.rank())  # all ranks get rank 0's weights
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = hvd.checkpoint.load(folder)
    first = 0 if saved is None else saved.step
    if saved is not None:
        model.load_state_dict(saved.state["model"])
        optimizer.load_state_dict(saved.state["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    reduced = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    generation = hvd.generation()
    for step in range(first, STEPS):
        if hvd.rank() == 1 and deaths.get(generation) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(step * 100 + hvd.rank())
        reduced.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        reduced.step()
        state = {"model": model.state_dict(), "optimizer": reduced.state_dict()}
        hvd.checkpoint.save(folder, state, step + 1, wait=wait)
    return {
        "first": first,
        "generation": generation,
        "count": os.environ["TORCHELASTIC_RESTART_COUNT"],
        "size": hvd.size(),
        "weights": [param.detach().clone() for param in model.parameters()],
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one["weights"], other["weights"], strict=True))


@pytest.mark.parametrize(
    "wait", [pytest.param(True, id="waiting"), pytest.param(False, id="in the background", marks=pytest.mark.slow)]
)
def test_a_killed_rank_is_started_again_and_ends_with_the_same_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wait: bool
) -> None:
    (whole, _) = run_local(train, (str(tmp_path / "whole"), {}), verbose=0)
    assert (whole["generation"], whole["count"]) == (0, "0")
    again = run_local(train, (str(tmp_path / "again"), {0: 3, 1: 5}, wait), verbose=0, max_restarts=2)
    assert [(one["generation"], one["count"]) for one in again] == [(2, "2")] * 2
    assert all(4 - (not wait) <= one["first"] <= 5 for one in again)
    assert all(same(one, whole) for one in again)
    assert [record.message[:12] for record in caplog.records] == ["restart 1 of", "restart 2 of"]
    assert "rank 1 on host 127.0.0.1: the process was killed by SIGKILL" in caplog.records[0].message


def test_the_limit(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"(?s)SIGKILL.*This was after 1 restart \(max_restarts=1\)"):
        run_local(train, (str(tmp_path), {0: 1, 1: 2, 2: 3}), verbose=0, max_restarts=1)


def test_an_exception_is_the_programs_own(tmp_path: Path) -> None:
    def fn() -> None:
        with open(tmp_path / f"{hvd.rank()}-{hvd.generation()}", "w"):
            pass
        hvd.barrier()
        raise ValueError("mine")

    with pytest.raises(RankFailedError, match="ValueError: mine"):
        run_local(fn, verbose=0, max_restarts=3)
    assert sorted(os.listdir(tmp_path)) == ["0-0", "1-0"]
