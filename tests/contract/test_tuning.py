"""Autotuning changes how gradients are reduced, at the same step on all ranks, and never the result."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.context.global_state import current
from tests.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(steps: int, **options: Any) -> tuple[list[float], set[int], bool]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 512), torch.nn.Linear(512, 4))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), **options)
    torch.manual_seed(1 + hvd.rank())
    caps = set()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        hvd.allreduce(torch.ones(3), name="metric")
        caps.add(optimizer._reducer._plan._cap_bytes)
    return (
        [float(param.detach().double().sum()) for param in model.parameters()],
        caps,
        optimizer._reducer.tuner is None,
    )


@pytest.mark.slow
def test_training_goes_on_unchanged(tmp_path: Path) -> None:
    def fn(log: str) -> Any:
        plain = train(60)
        settings = {"autotune_warmup_samples": 1, "autotune_steps_per_sample": 2, "autotune_max_samples": 10}
        hvd.init(autotune=True, autotune_log=log if hvd.rank() == 0 else None, **settings)
        tuned = train(60)
        fixed = train(60, bucket_cap_mb=0.5)
        return plain, tuned, fixed, current().queue.planner.threshold

    log = tmp_path / "autotune.csv"
    with ranks(2) as world:
        (plain, tuned, fixed, threshold), other = world.run(fn, str(log))
    assert (plain, tuned, fixed, threshold) == other
    assert tuned[0] == pytest.approx(plain[0], rel=1e-5)  # summed in another order
    assert len(tuned[1]) > 1, "no other size of buckets was tried"
    assert tuned[2], "it never ended"
    assert len(fixed[1]) == 1, "a size that the user gave is not changed"
    rows = list(csv.DictReader(log.open()))
    assert {row["phase"] for row in rows} == {"warmup", "trial", "final"}
    assert {row["bucket_cap_mb"] for row in rows} == {"0.5"}  # the log of the last run
