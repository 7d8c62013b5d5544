"""Chooses the address at which other ranks reach this host."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil


class NoAddressError(RuntimeError):
    """This host has no address of the requested kind, or none that others can reach."""


@dataclass(frozen=True, slots=True)
class Address:
    """An address of this host, and the interface that has it."""

    interface: str | None
    """The interface that has the address; None if none has it, as behind some kinds of NAT."""
    ip: str


def own_addresses() -> list[Address]:
    """Return the addresses of all interfaces that are up, in the kernel's order, IPv4 before IPv6; none link-local."""
    stats = psutil.net_if_stats()
    found = [
        Address(name, each.address)
        for family in (socket.AF_INET, socket.AF_INET6)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == family and (name not in stats or stats[name].isup)
    ]
    return [each for each in found if not ipaddress.ip_address(each.ip.partition("%")[0]).is_link_local]


def choose_address(
    host: str, wanted: Sequence[str] = (), towards: str | None = None, *, alone: bool, own: Sequence[Address]
) -> Address:
    """Choose the address at which other ranks reach this host.

    In order of preference: an address that was requested; the cluster manager's name of this host, if it is an address
    that others can reach; the address from which packets to the driver leave. If all ranks are on this host
    (``alone``), the loopback interface is enough.

    ``host`` is the cluster manager's name or address of this host. ``wanted`` has names of interfaces, or networks such
    as 10.0.0.0/8; the first one that this host has is used. ``towards`` is a reachable host, such as the driver's, or
    None.

    Raises:
        NoAddressError: No address matches `wanted`, or all are loopback addresses.
        ValueError: An entry of `wanted` looks like a network but is invalid.
    """
    if wanted:
        return _as_wanted(host, wanted, own)
    by_ip = {each.ip: each for each in own}
    candidates = [by_ip[ip] for ip in _resolved(host) if ip in by_ip]
    if towards is not None:
        candidates += _route(towards, by_ip)
    for each in candidates:
        if alone or not ipaddress.ip_address(each.ip).is_loopback:
            return each
    if alone:
        return Address(by_ip["127.0.0.1"].interface if "127.0.0.1" in by_ip else None, "127.0.0.1")
    raise NoAddressError(
        f"ranks on other hosts cannot reach this host, {host}: that name resolves to "
        f"{', '.join(_resolved(host)) or 'no address'} here, and the route to the driver offers no better address. It "
        f'has {_listed(own)}. Name the interface or network of the cluster, for example interfaces=["10.0.0.0/8"].'
    )


def _as_wanted(host: str, wanted: Sequence[str], own: Sequence[Address]) -> Address:
    for wish in wanted:
        network = _network(wish)
        for each in own:
            if each.interface == wish or (network is not None and ipaddress.ip_address(each.ip) in network):
                return each
    raise NoAddressError(
        f"interfaces={list(wanted)}: host {host} has none of these that is up and has an address; it has "
        f"{_listed(own)}. Give names or networks that every host has."
    )


def _network(wish: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    if "/" not in wish:
        return None
    try:
        return ipaddress.ip_network(wish, strict=False)
    except ValueError as error:
        raise ValueError(f'interfaces=[{wish!r}]: expected a name, or a network such as "10.0.0.0/8"') from error


def check_wishes(wanted: Sequence[str]) -> None:
    """Raise ValueError for an entry of ``interfaces=`` that looks like a network but is invalid."""
    for wish in wanted:
        _network(wish)


def is_loopback(host: str) -> bool:
    """Tell whether a host name means the loopback interface, and so another machine on each host."""
    found = _resolved(host)
    return bool(found) and all(ipaddress.ip_address(ip).is_loopback for ip in found)


def _resolved(host: str) -> list[str]:
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None)))
    except OSError:
        return []


def way_to(host: str) -> str:
    """Return the address of this machine from which packets to a host would leave, without sending any.

    Raises:
        OSError: The name is unknown, or there is no route.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _route(host: str, by_ip: Mapping[str, Address]) -> list[Address]:
    try:
        ip = way_to(host)
    except OSError:
        return []
    return [by_ip.get(ip, Address(None, ip))]


def _listed(own: Sequence[Address]) -> str:
    return ", ".join(f"{each.interface} ({each.ip})" for each in own) or "no interface that is up"
