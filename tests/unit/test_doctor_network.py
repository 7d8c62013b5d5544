"""Servers and pings over real sockets, and what is made of ways that were tried."""

from __future__ import annotations

import socket
import threading
from itertools import combinations

import pytest

from spark_hvd.runner.diagnosis.allreduce import Measured, rounds
from spark_hvd.runner.diagnosis.network import TOKEN_BYTES, EchoServer, Ping, ping, targets
from spark_hvd.runner.diagnosis.network_checks import check_allreduce, check_driver_ways, check_rank_ways
from spark_hvd.runner.diagnosis.report import Level
from spark_hvd.world.ports import PortRange
from tests.conftest import wait_until
from tests.doctor_cases import of, task

TOKEN = bytes(range(TOKEN_BYTES))
DRIVER = ("10.0.0.9", 4000)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_a_ping_tells_time_and_distance() -> None:
    server = EchoServer("127.0.0.1", None, TOKEN)
    try:
        answer = ping("127.0.0.1", server.port, TOKEN)
    finally:
        server.close()
    assert answer.error is None
    assert 0 < answer.rtt < 10
    assert abs(answer.ahead) < 5, "one clock"
    assert answer.local == "127.0.0.1"


def test_strangers_get_no_answer() -> None:
    server = EchoServer("127.0.0.1", None, TOKEN)
    try:
        answer = ping("127.0.0.1", server.port, bytes(TOKEN_BYTES), timeout=1)
    finally:
        server.close()
    assert str(answer.error).startswith(("ConnectionReset", "BrokenPipe")), "the server closes without a word"


def test_many_strangers_take_few_threads_and_stand_in_nobodys_way() -> None:
    server = EchoServer("127.0.0.1", None, TOKEN)
    before = threading.active_count()
    strangers = []
    try:
        for _ in range(300):
            strangers.append(socket.create_connection(("127.0.0.1", server.port)))
            strangers[-1].sendall(b"x")
        assert ping("127.0.0.1", server.port, TOKEN).error is None, "there is room for one who knows"
        wait_until(lambda: threading.active_count() - before <= 64, 5.0)  # silence is cut after ten
        answered = ping("127.0.0.1", server.port, TOKEN)
    finally:
        for stranger in strangers:
            stranger.close()
        server.close()
    assert answered.error is None
    wait_until(lambda: threading.active_count() < before)


def test_nobody_listening_and_nobody_answering_take_a_bounded_time() -> None:
    assert "ConnectionRefused" in str(ping("127.0.0.1", free_port(), TOKEN).error)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ping("127.0.0.1", silent.getsockname()[1], TOKEN, timeout=0.1).error is not None


def test_a_server_keeps_to_its_ports() -> None:
    port = free_port()
    server = EchoServer("127.0.0.1", PortRange(port, port), TOKEN)
    try:
        assert server.port == port
        with pytest.raises(OSError, match=f"{port}-{port} is in use"):
            EchoServer("127.0.0.1", PortRange(port, port), TOKEN)
    finally:
        server.close()


def test_targets_stay_few() -> None:
    assert targets(1, 4) == [0, 2, 3]
    assert targets(99, 100) == [0]
    assert targets(5, 100) == [0, 6]


@pytest.mark.parametrize("count", [2, 3, 8, 9, 12, 33])
def test_rounds_are_disjoint_and_cover(count: int) -> None:
    plan = rounds(count)
    pairs = [pair for each in plan for pair in each]
    assert len(pairs) == len(set(pairs)), "no pair twice"
    for each in plan:
        members = [member for pair in each for member in pair]
        assert len(members) == len(set(members)), "nobody in two pairs at a time"
    if count <= 8:
        assert set(pairs) == set(combinations(range(count), 2))
    else:
        neighbours = {(i, i + 1) for i in range(count - 1)}
        assert set(pairs) >= neighbours | {(0, i) for i in range(1, count)}


def test_rounds_of_one_host_and_of_very_many() -> None:
    assert rounds(1) == []
    assert len(rounds(500)) <= 3


def test_a_driver_out_of_reach_is_a_warning_with_remedies() -> None:
    finding = of("executor to driver", check_driver_ways(DRIVER, [task(0, driver=Ping("TimeoutError: x"))], ()))
    assert finding.level is Level.WARNING
    assert "a: TimeoutError: x (to 10.0.0.9:4000)" in finding.found
    assert "spark.driver.host" in finding.remedy
    assert of("executor to driver", check_driver_ways(None, [], ())).level is Level.WARNING
    assert "spark.driver" not in of("executor to driver", check_driver_ways(None, [], (), connect=True)).remedy
    assert of("executor to driver", check_driver_ways(DRIVER, [task(0)], ())).level is Level.OK


def test_nothing_needs_the_way_from_the_driver() -> None:
    finding = of("driver to executor", check_driver_ways(DRIVER, [task(0)], {"10.0.0.7"}))
    assert finding.level is Level.OK
    assert "cannot connect to 10.0.0.7; no run needs it to" in finding.found


def test_ranks_out_of_reach_are_an_error_that_names_both_ends() -> None:
    tasks = [task(0, "a", peers={1: Ping("TimeoutError: timed out")}), task(1, "b", peers={0: Ping(rtt=0.001)})]
    finding = of("rank to rank", check_rank_ways(tasks, None))
    assert finding.level is Level.ERROR
    assert finding.found == "a (10.0.0.0) cannot connect to b (10.0.0.1:40001): TimeoutError: timed out"
    assert finding.remedy.startswith("nc -vz 10.0.0.1 40001")


def test_a_host_that_cannot_listen() -> None:
    nowhere = task(0, address=None, port=None, bind_error="interfaces=['eth9']: host a has none")
    assert "interfaces=" in of("rank to rank", check_rank_ways([nowhere], None)).remedy
    full = task(0, port=None, bind_error="OSError: in use")
    finding = of("rank to rank", check_rank_ways([full], PortRange(5, 6)))
    assert finding.level is Level.ERROR
    assert "ports 5-6" in finding.found


def test_good_ways() -> None:
    tasks = [task(0, "a", peers={1: Ping(rtt=0.001)}), task(1, "b", peers={0: Ping(rtt=0.003)})]
    finding = of("rank to rank", check_rank_ways(tasks, PortRange(30000, 30100)))
    assert finding.level is Level.OK
    assert (
        finding.found
        == "2 connections between 2 hosts on ports 30000-30100: there and back in 2.00 ms, 3.00 ms at most"
    )


def measured(speed: float, *hosts: str) -> Measured:
    return Measured(hosts, "gloo", 64 << 20, 0.05, speed)


def test_speeds() -> None:
    world, pairs = measured(1.5, "a", "b", "c"), [measured(1.0, "a", "b"), measured(1.2, "b", "c")]
    findings = list(check_allreduce([world, *pairs]))
    assert of("all-reduce", findings).found == "3 ranks: 1.50 GB/s over gloo (64 MiB in 50 ms)"
    assert of("all-reduce of pairs", findings).found == "gloo: a with b 1.00 GB/s, b with c 1.20 GB/s"
    assert list(check_allreduce([])) == []


def test_a_slow_pair_is_named() -> None:
    pairs = [measured(1.0, "a", "b"), measured(1.2, "b", "c"), measured(0.01, "a", "c")]
    finding = of("all-reduce of pairs", check_allreduce([measured(0.1, "a", "b", "c"), *pairs]))
    assert finding.level is Level.WARNING
    assert "a and c: 10.0 MB/s over gloo" in finding.found
    assert "iperf3" in finding.remedy
