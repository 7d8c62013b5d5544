"""Connections over real sockets, and the findings about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from spark_hvd.runner.channel.hub import Hub
from spark_hvd.runner.channel.state import HubState
from spark_hvd.runner.diagnosis.network import check_driver, check_ranks, clocks_ahead, reach, reach_hub, targets
from spark_hvd.runner.diagnosis.report import Level
from spark_hvd.world.ports import PortRange, listen
from tests.doctor_cases import of, task

DRIVER = ("10.0.0.9", 4000)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(HubState(2), "127.0.0.1")
    yield hub
    hub.close()


def test_a_listener_that_accepts_nobody_is_reached_and_a_closed_one_is_not() -> None:
    with listen("127.0.0.1", None) as listener:
        port = listener.getsockname()[1]
        assert reach("127.0.0.1", port) is None
    assert str(reach("127.0.0.1", port)).startswith("ConnectionRefusedError: ")


def test_the_hub_is_reached_by_those_who_know_its_key(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reach_hub(hub.address, 0)
    assert reach_hub(hub.address, 1), "while others come and go"
    monkeypatch.setattr("spark_hvd.runner.diagnosis.network.CONNECT_SECONDS", 0.2)
    assert not reach_hub(replace(hub.address, server_public=hub.address.client_public), 0)


def test_targets_stay_few() -> None:
    assert targets(1, 4) == [0, 2, 3]
    assert targets(99, 100) == [0]
    assert targets(5, 100) == [0, 6]


def test_a_clock_is_off_by_what_lies_outside_of_the_job() -> None:
    tasks = [task(0, "early", clock=88.0), task(1, "within", clock=101.0), task(2, "late", clock=110.0)]
    assert clocks_ahead(tasks, (100.0, 103.0)) == {"early": -12.0, "within": 0.0, "late": 7.0}


def test_a_driver_out_of_reach_is_a_warning_with_remedies() -> None:
    finding = of("executor to driver", check_driver(DRIVER, [task(0, reaches_driver=False)]))
    assert finding.level is Level.WARNING
    assert "a cannot connect to 10.0.0.9:4000 in 3 s" in finding.found
    assert "spark.driver.host" in finding.remedy
    assert of("executor to driver", check_driver(None, [])).level is Level.WARNING
    assert "spark.driver" not in of("executor to driver", check_driver(None, [], connect=True)).remedy
    assert of("executor to driver", check_driver(DRIVER, [task(0)])).level is Level.OK


def test_ranks_out_of_reach_are_an_error_that_names_both_ends() -> None:
    tasks = [task(0, "a", peers={1: "TimeoutError: timed out"}), task(1, "b", peers={0: None})]
    finding = of("rank to rank", check_ranks(tasks, None))
    assert finding.level is Level.ERROR
    assert finding.found == "a (10.0.0.0) cannot connect to b (10.0.0.1:40001): TimeoutError: timed out"
    assert finding.remedy.startswith("nc -vz 10.0.0.1 40001")


def test_a_host_that_cannot_listen() -> None:
    nowhere = task(0, address=None, port=None, bind_error="interfaces=['eth9']: host a has none")
    assert "interfaces=" in of("rank to rank", check_ranks([nowhere], None)).remedy
    full = task(0, port=None, bind_error="OSError: in use")
    finding = of("rank to rank", check_ranks([full], PortRange(5, 6)))
    assert finding.level is Level.ERROR
    assert "ports 5-6" in finding.found


def test_good_ways() -> None:
    tasks = [task(0, "a", peers={1: None}), task(1, "b", peers={0: None})]
    finding = of("rank to rank", check_ranks(tasks, PortRange(30000, 30100)))
    assert finding.level is Level.OK
    assert finding.found == "2 connections between 2 hosts on ports 30000-30100"
