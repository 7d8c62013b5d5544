"""The coordinator of named collectives under seeds: every call ends once, as required, in order, never too early."""

from __future__ import annotations

import os
from collections import defaultdict
from random import Random

import pytest

from spark_hvd.engine import coordinator
from tests.world.collectives import Collectives
from tests.world.programs import Call, epoch_of

SEEDS, PARTS = 200, 2
NIGHT = int(os.environ.get("SPARK_HVD_NIGHT", "0"))


def check(seed: int) -> None:
    """Run a seed."""
    order = Random(f"collectives {seed}")
    size = order.choice([1, 2, 3, 3, 4, 5, 9])
    parts = [epoch_of(order, size) for _ in range(order.choice([1, 2]))]
    programs = [[step for part in parts for step in part.program(place, size, order)] for place in range(size)]
    stall_timeout = order.choice([None, None, 1.0, 5.0, 20.0])
    remembered = order.choice([1, 2, 4096])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "_REMEMBERED", remembered if stall_timeout is None else 4096)
        simulated = Collectives(
            programs,
            order,
            order.choice([1024, 1024, 2, 1, 0]),
            stall_timeout,
            coordinator._REMEMBERED,
            horovod=order.random() < 0.2,
            leaves=order.random() < 0.1,
        )
        simulated.run()
        while stall_timeout is not None and simulated.fail_what_waits():
            simulated.run()
    if simulated.gone is not None:
        return
    assert not simulated.coordinator.has_waiting
    for rank, program in zip(simulated.ranks, programs, strict=True):
        assert not rank.calls
        assert rank.joins == len(parts)
        ended = sum(map(len, rank.ended.values()))
        assert ended == sum(isinstance(step, Call) for step in program)
        if stall_timeout is None and not simulated.coordinator.horovod:
            expected: dict[str, list[str]] = defaultdict(list)
            for part in parts:
                for name, outcomes in part.outcomes(rank.place).items():
                    expected[name] += outcomes
            assert rank.ended == expected


@pytest.mark.timeout(7200 if NIGHT else 600)  # on a busy machine
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_seeds(part: int) -> None:
    for seed in range(part, SEEDS + NIGHT, PARTS):
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
