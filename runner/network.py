"""Which network interface carries an address."""

from __future__ import annotations

import socket

import psutil


def interface_of(host: str) -> str | None:
    """Name of this machine's interface that has the address of ``host``, or None if no interface has it.

    Args:
        host: A name or an address, IPv4 or IPv6.
    """
    try:
        wanted = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except socket.gaierror:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        # psutil writes a link-local IPv6 address with its zone: fe80::1%eth0
        if any(address.address.partition("%")[0] in wanted for address in addresses):
            return name
    return None
