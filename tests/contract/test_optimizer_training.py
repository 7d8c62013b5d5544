"""DistributedOptimizer on real ranks: every case on two processes, the core ones on three."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from tests.contract import (
    changed_gradient_cases,
    join_cases,
    local_cases,
    optimizer_cases,
    optimizer_odd_cases,
    shared_memory_cases,
)
from tests.contract.optimizer_ranks import Ranks

Case = Callable[[int, int], None]
ALONE = (optimizer_odd_cases.peer_dies, join_cases.a_rank_dies_while_others_have_joined)  # they end their ranks

# Cases that two ranks do not run by day, and the other cases of three.
AT_NIGHT = dict.fromkeys(
    [
        join_cases.random_shares,
        join_cases.several_passes,
        join_cases.sparse_gradients,
        join_cases.what_needs_every_rank,
    ],
    pytest.mark.night,
)


def cases_of(module: ModuleType) -> list[Case]:
    """Return the module's public functions of (rank, size)."""
    return [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and list(inspect.signature(value).parameters) == ["rank", "size"]
        and value not in ALONE
    ]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    "case",
    [
        *cases_of(optimizer_cases),
        *cases_of(optimizer_odd_cases),
        *cases_of(changed_gradient_cases),
        *cases_of(shared_memory_cases),
        *cases_of(join_cases),
        *cases_of(local_cases),
    ],
    ids=lambda case: case.__name__,
)
def test_two_ranks(two: Ranks, case: Case) -> None:
    two.run(case)


@pytest.mark.parametrize(
    "case",
    [
        optimizer_cases.average,
        optimizer_cases.sparse_gradients,
        optimizer_odd_cases.unused_parameters,
        optimizer_odd_cases.plan_mismatch,
        shared_memory_cases.ranks_out_of_step,
        shared_memory_cases.memory_and_gloo_give_the_same_bits,
        shared_memory_cases.every_dtype,
        shared_memory_cases.both_ways_give_the_same_bits,
        shared_memory_cases.copies_are_read_before_they_are_overwritten,
        shared_memory_cases.copies_of_abandoned_sums,
        shared_memory_cases.ways_by_size,
        shared_memory_cases.shares_of_small_buckets,
        *(pytest.param(case, marks=AT_NIGHT.get(case, ())) for case in cases_of(join_cases)),
    ],
    ids=lambda case: case.__name__,
)
@pytest.mark.slow
def test_three_ranks(three: Ranks, case: Case) -> None:
    three.run(case)


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.__name__)
def test_a_rank_that_dies_is_an_error_on_the_others(case: Case) -> None:
    ranks = Ranks(2)
    try:
        with pytest.raises(AssertionError, match="rank 1\nthe process is gone"):
            ranks.run(case)
    finally:
        ranks.close()
