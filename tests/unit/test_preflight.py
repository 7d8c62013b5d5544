"""Ranks try to reach each other before the transports do: with real sockets on loopback."""

from __future__ import annotations

import json
import threading

import pytest

from spark_hvd.runner.rank.static import UnreachableError, check_hosts, connect
from spark_hvd.transport.torch_private import HashStore, PrefixStore
from spark_hvd.world.layout import WorldLayout
from spark_hvd.world.ports import PortRange, listen

LAYOUT = WorldLayout.from_hosts(["a", "a", "b", "c"])


def test_the_hosts_reach_each_other_in_a_ring() -> None:
    kv, errors = HashStore(), []
    ips = {"a": "127.0.0.2", "b": "127.0.0.3", "c": "127.0.0.4"}

    def check(rank: int) -> None:
        me = LAYOUT.ranks[rank]
        try:
            check_hosts(me, ips[me.host], kv, None)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=check, args=[rank]) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    assert PrefixStore("reach", kv).check(["reached/0", "reached/1", "reached/2"])


def test_a_host_on_the_wrong_network_is_named_with_both_ends() -> None:
    kv = HashStore()
    with listen("127.0.0.1") as closed:
        port = closed.getsockname()[1]
    PrefixStore("reach", kv).set("at/1", json.dumps([2, "b", "127.0.0.3", port]))
    expected = rf"rank 0 on host a \(127\.0\.0\.2\) cannot reach rank 2 on host b at 127\.0\.0\.3:{port} .*interfaces="
    with pytest.raises(UnreachableError, match=expected):
        check_hosts(LAYOUT.ranks[0], "127.0.0.2", kv, None, seconds=0.5)


def test_ranks_that_are_not_the_first_of_their_host_have_nothing_to_do() -> None:
    check_hosts(LAYOUT.ranks[1], "127.0.0.2", HashStore(), None)
    check_hosts(WorldLayout.from_hosts(["a", "a"]).ranks[0], "127.0.0.2", HashStore(), None)


def test_a_late_listener_is_waited_for() -> None:
    with listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    late: list[object] = []
    timer = threading.Timer(0.5, lambda: late.append(listen("127.0.0.1", PortRange(port, port))))
    timer.start()
    connect("127.0.0.1", port, "the store", "rank 1", seconds=10)
    timer.join()
    assert late
    late[0].close()  # type: ignore[attr-defined]
