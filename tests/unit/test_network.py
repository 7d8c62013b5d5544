"""The address by which others reach a host: the choice, without a network."""

from __future__ import annotations

import re

import pytest

from spark_hvd.runner.channel.address import Address, NoAddressError, check_wishes, choose_address, own_addresses

LO, ETH0, ETH1 = Address("lo", "127.0.0.1"), Address("eth0", "192.0.2.5"), Address("eth1", "198.51.100.7")
ETH0_V6 = Address("eth0", "2001:db8::5")
OWN = [LO, ETH0, ETH1, ETH0_V6]


def choose(host: str, *wanted: str, towards: str | None = None, alone: bool = False) -> Address:
    return choose_address(host, wanted, towards, alone=alone, own=OWN)


def test_what_the_cluster_manager_calls_the_host() -> None:
    assert choose("198.51.100.7") == ETH1
    assert choose("2001:db8::5") == ETH0_V6


def test_a_wish_comes_first() -> None:
    assert choose("198.51.100.7", "eth0") == ETH0
    assert choose("198.51.100.7", "ib0", "192.0.2.0/24") == ETH0
    assert choose("198.51.100.7", "2001:db8::/32") == ETH0_V6
    assert choose("198.51.100.7", "lo") == LO


def test_a_wish_that_the_host_cannot_fulfil() -> None:
    with pytest.raises(NoAddressError, match=re.escape("interfaces=['ib0']: host 198.51.100.7 has none")) as caught:
        choose("198.51.100.7", "ib0")
    assert "eth0 (192.0.2.5), eth1 (198.51.100.7)" in str(caught.value)


def test_a_name_that_stands_for_loopback() -> None:
    assert choose("localhost", alone=True) == LO
    # Debian gives 127.0.1.1 to a machine's own name; the route to the driver is used instead, here loopback.
    with pytest.raises(NoAddressError, match=r"that name resolves to 127\.0\.1\.1 here.*interfaces="):
        choose("127.0.1.1", towards="127.0.0.1")


def test_the_way_to_the_driver() -> None:
    real = [each for each in own_addresses() if each.ip == "127.0.0.1"]
    assert choose_address("127.0.1.1", (), "127.0.0.1", alone=True, own=real) == real[0]


def test_a_host_alone_without_a_name_takes_loopback() -> None:
    assert choose("no-such-host.invalid", alone=True) == LO
    with pytest.raises(NoAddressError, match="no address"):
        choose("no-such-host.invalid")


def test_own_addresses_have_loopback_and_nothing_link_local() -> None:
    found = own_addresses()
    assert Address("lo", "127.0.0.1") in found
    assert not [each for each in found if each.ip.startswith(("fe80", "169.254"))]


def test_a_wish_that_is_no_network() -> None:
    check_wishes(["eth0", "10.0.0.0/8", "10.1.2.3/8"])
    with pytest.raises(ValueError, match=r"interfaces=\['10\.0\.0/8'\]"):
        check_wishes(["10.0.0/8"])
