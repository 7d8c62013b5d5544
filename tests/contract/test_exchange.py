"""All ranks' facts reach all ranks, short ones in one round and long ones in two; a lost rank is noticed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from spark_hvd.transport.exchange import exchange
from tests.ranks import RankError, Ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def of(length: int) -> list[object]:
    assert dist.group.WORLD is not None
    rank = dist.get_rank()
    fact = {"rank": rank, "text": "\u00fc" * length if rank == 2 else ""}
    return exchange(fact, dist.group.WORLD, torch.device("cpu"))


def last_leaves() -> None:
    if dist.get_rank() == 2:
        dist.destroy_process_group()
    else:
        of(0)


@pytest.mark.parametrize("length", [0, 30, 38, 39, 500, 100_000])
def test_every_rank_gets_the_facts_of_all(trio: Ranks, length: int) -> None:
    want = [{"rank": rank, "text": "\u00fc" * length if rank == 2 else ""} for rank in range(3)]
    assert trio.run(of, length) == [want] * 3


@pytest.fixture(scope="module")
def trio() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()


def test_a_rank_that_has_left_is_an_error() -> None:
    """The rank that gathers notices at once; the others wait for it, until the group's timeout if nothing ends them."""
    ranks = Ranks(3, timeout=3.0)
    try:
        with pytest.raises(RankError, match=r"[Cc]onnection (closed|reset)|Broken pipe"):
            ranks.run(last_leaves)
    finally:
        ranks.close()
