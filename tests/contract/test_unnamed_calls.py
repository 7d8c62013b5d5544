"""Calls without a name: matched by their order, fast when repeated, any number in flight."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.collectives.names import RING
from tests.conftest import wait_until
from tests.contract.small_calls import by_coordinator, mine, total, wait_in_memory
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks(request.param) as started:
        yield started


def calls_without_a_name(turn: int) -> None:
    """Four all-reduces, an all-gather, a broadcast and a barrier."""
    for shape, op, expected in (
        ((2,), hvd.Sum, total(turn)),
        ((), hvd.Max, turn * hvd.size()),
        ((3, 2), hvd.Average, total(turn) / hvd.size()),
        ((2,), hvd.Sum, total(turn)),
    ):
        result = hvd.allreduce(mine(shape) * turn, op=op)
        torch.testing.assert_close(result, torch.full(shape, float(expected)))
    assert hvd.allgather(mine((1,)) * turn).tolist() == [turn * (rank + 1) for rank in range(hvd.size())]
    assert hvd.broadcast(mine((1,)) * turn, turn % 2).item() == turn * (turn % 2 + 1)
    hvd.barrier()


def test_calls_without_a_name_go_through_memory_when_they_come_back(world: Ranks) -> None:
    def fn() -> None:
        wait_in_memory(10.0)
        for turn in range(2 * RING):  # each generated name twice, those of barriers as well
            calls_without_a_name(turn)
        decided = by_coordinator()
        for turn in range(20):
            calls_without_a_name(turn)
        assert by_coordinator() == decided

        for turn in range(3 * RING):  # in a loop of seven calls, a call never gets the same name again
            shape = (turn % 7 + 1,)
            assert torch.equal(hvd.allreduce(mine(shape) * turn, op=hvd.Sum), torch.full(shape, total(turn)))

    world.run(fn)


def test_any_number_of_calls_without_a_name_may_be_in_flight(world: Ranks) -> None:
    def fn() -> None:
        wait_in_memory(0.1)
        many = 2 * RING + 30

        def start() -> list[Any]:
            return [hvd.allreduce_async(mine((2,)) * number, op=hvd.Sum) for number in range(many)]

        def check(handles: list[Any], order: list[int]) -> None:
            for number in order:
                assert torch.equal(handles[number].wait(), torch.full((2,), total(number))), number

        for turn in range(3):
            check(start(), random.Random(hvd.rank() + turn).sample(range(many), many))
        # They do not block the caller, for which other ranks may wait.
        handles = start() if hvd.rank() == 0 else []
        hvd.allreduce(mine((1,)), name="meanwhile")
        handles = handles or start()
        check(handles, list(reversed(range(many))))
        assert hvd.allreduce(mine((1,)), op=hvd.Sum).item() == total()

    world.run(fn)


def test_calls_that_wait_for_a_name_count_before_a_join(world: Ranks) -> None:
    def fn() -> list[float]:
        wait_in_memory(0.1)
        handles = [hvd.allreduce_async(torch.ones(1), op=hvd.Sum) for _ in range(2 * RING + 10 * hvd.rank())]
        hvd.join()
        results = [handle.wait().item() for handle in handles]
        assert hvd.allreduce(mine((1,)), op=hvd.Sum).item() == total()  # the names restart from the first
        return results

    for rank, results in enumerate(world.run(fn)):
        counts = [2 * RING + 10 * other for other in range(world.size)]
        assert results == [sum(number < count for count in counts) for number in range(counts[rank])]


def test_calls_without_a_name_that_do_not_fit_are_an_error_everywhere(world: Ranks) -> None:
    def fn() -> None:
        wait_in_memory(10.0)
        for last in (hvd.size() - 1, 0):
            for _ in range(3 * RING):
                hvd.allreduce(torch.ones(3))
            given = torch.ones(5 if hvd.rank() == last else 3)
            with pytest.raises(hvd.MismatchError, match=r"'allreduce\.noname\.\d+'.*shape"):
                hvd.allreduce(given)
            assert hvd.allreduce(mine((3,)), op=hvd.Sum)[0].item() == total()

    world.run(fn)


def test_calls_that_wait_for_a_name_fail_with_the_others(tmp_path: Path) -> None:
    def fn() -> str:
        if hvd.rank() == 1:
            wait_until((tmp_path / "called").exists)
            hvd.shutdown()
            return ""
        handles = [hvd.allreduce_async(torch.ones(1)) for _ in range(RING + 5)]
        (tmp_path / "called").touch()
        for handle in handles:
            with pytest.raises(hvd.CollectiveError, match="rank 1"):
                handle.wait()
        return "all failed"

    with ranks(2) as two:
        assert two.run(fn)[0] == "all failed"
