"""A thread that waits for a work that never ends is released when its world is over; the work is not destroyed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from spark_hvd.transport import waits
from spark_hvd.world.errors import CollectiveError
from tests.conftest import wait_until
from tests.ranks import Ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def one_comes_late(given_up: Path) -> str:
    """Rank 0 waits for an all-reduce that rank 1 enters only after rank 0 has given up."""
    over: list[str] = []
    said, error = torch.zeros(1), ""
    if dist.get_rank() == 0:
        waits.set_abort_check(lambda: over[0] if over else None)
        work = dist.all_reduce(said, async_op=True)
        threading.Timer(0.6, lambda: over.append("rank 1 has gone")).start()
        try:
            waits.wait_for(work, dist.group.WORLD)
        except CollectiveError as caught:
            error = str(caught)
        waits.set_abort_check(None)
        assert not work.is_completed()
        assert any(thread.name == "spark_hvd-teardown" for thread in threading.enumerate())
        given_up.touch()
    else:
        wait_until(given_up.exists, 60)
        dist.all_reduce(said)
    if dist.get_rank() == 0:
        work.wait()  # the abandoned work continues, and its group still exists
        deadline = time.monotonic() + 5
        while any(thread.name == "spark_hvd-teardown" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    return error


def all_come(rounds: int) -> list[float]:
    waits.set_abort_check(lambda: None)
    sums = []
    for number in range(rounds):
        if dist.get_rank() == number % 2:
            time.sleep(0.3)  # longer than between two checks
        tensor = torch.ones(1)
        waits.wait_for(dist.all_reduce(tensor, async_op=True), dist.group.WORLD)
        sums.append(tensor.item())
    waits.set_abort_check(None)
    return sums


def test_the_end_of_a_world_frees_who_waits(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(one_comes_late, tmp_path / "given up") == ["rank 1 has gone", ""]


def test_slow_ranks_are_waited_for(ranks: Ranks) -> None:
    assert ranks.run(all_come, 4) == [[2.0] * 4] * 2
