"""The layout of ranks on hosts, as data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_hvd.world.layout import RankInfo, WorldLayout


def test_hosts_are_grouped_in_order_of_appearance() -> None:
    layout = WorldLayout.from_hosts(["b", "a", "b", "c", "a"])
    assert [info.host for info in layout.ranks] == ["b", "b", "a", "a", "c"]
    assert layout.rank_of == (0, 2, 1, 4, 3)
    assert layout.of_process(4) == RankInfo(3, 5, 1, 2, 1, 2, "a")
    assert layout.of_process(3) == RankInfo(4, 5, 0, 1, 2, 3, "c")
    assert not layout.is_homogeneous


def test_cross_ranks_skip_hosts_without_that_local_rank() -> None:
    layout = WorldLayout.from_hosts(["a", "b", "b", "c", "c"])
    assert [(i.local_rank, i.cross_rank, i.cross_size) for i in layout.ranks] == [
        (0, 0, 3),
        (0, 1, 3),
        (1, 0, 2),
        (0, 2, 3),
        (1, 1, 2),
    ]


def test_fixed_ranks_stay() -> None:
    layout = WorldLayout.of_ranks(["a", "b", "a", "b"])
    assert [info.local_rank for info in layout.ranks] == [0, 0, 1, 1]
    assert [info.cross_rank for info in layout.ranks] == [0, 1, 0, 1]
    assert layout.rank_of == (0, 1, 2, 3)
    assert layout.is_homogeneous


def test_nodes_tell_agents_on_one_host_apart() -> None:
    layout = WorldLayout.of_ranks(["a", "a"], nodes=["0", "1"])
    assert [(info.local_size, info.cross_rank, info.cross_size) for info in layout.ranks] == [(1, 0, 2), (1, 1, 2)]


def test_no_ranks() -> None:
    with pytest.raises(ValueError, match="hosts is empty"):
        WorldLayout.from_hosts([])


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=30))
def test_laws(hosts: list[str]) -> None:
    layout = WorldLayout.from_hosts(hosts)
    assert sorted(layout.rank_of) == list(range(len(hosts)))
    assert [info.rank for info in layout.ranks] == list(range(len(hosts)))
    assert all(layout.of_process(process).host == host for process, host in enumerate(hosts))
    for info in layout.ranks:
        same_host = [other for other in layout.ranks if other.host == info.host]
        assert [other.rank for other in same_host] == list(range(same_host[0].rank, same_host[-1].rank + 1))
        assert [other.local_rank for other in same_host] == list(range(info.local_size))
        same_local = [other for other in layout.ranks if other.local_rank == info.local_rank]
        assert [other.cross_rank for other in same_local] == list(range(info.cross_size))
    assert layout.is_homogeneous == (len({hosts.count(host) for host in hosts}) == 1)
