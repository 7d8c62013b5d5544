"""Ranges of ports, with real sockets."""

from __future__ import annotations

import errno

import pytest

from spark_hvd.world.ports import PortRange, listen


def free_range() -> PortRange:
    with listen("127.0.0.1") as one:
        port = one.getsockname()[1]
    return PortRange(port, port)


@pytest.mark.parametrize(
    ("text", "low", "high"), [("30000-30100", 30000, 30100), (" 30000 : 30001 ", 30000, 30001), ("4040", 4040, 4040)]
)
def test_parse(text: str, low: int, high: int) -> None:
    assert PortRange.parse(text) == PortRange(low, high)
    assert PortRange.parse(str(PortRange(low, high))) == PortRange(low, high)


@pytest.mark.parametrize("text", ["", "a-b", "1-", "0-10", "10-5", "1-65536", "1-2-3"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        PortRange.parse(text)


def test_each_port_is_tried_once() -> None:
    assert sorted(PortRange(5, 9)) == [5, 6, 7, 8, 9]


def test_listen_takes_a_free_port_of_the_range_and_says_when_there_is_none() -> None:
    ports = free_range()
    with listen("127.0.0.1", ports) as one:
        assert one.getsockname()[1] == ports.low
        with pytest.raises(OSError, match=f"ports={ports} is in use") as caught:
            listen("127.0.0.1", ports)
    assert caught.value.errno == errno.EADDRINUSE


def test_an_address_of_another_host_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match="assign"):
        listen("192.0.2.1", PortRange(20_000, 30_000))
