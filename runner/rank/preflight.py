"""Whether ranks reach each other, tried before the transports are, which take minutes to give up and say little."""

from __future__ import annotations

import contextlib
import json
import socket
import time

from spark_hvd.transport.torch_private import PrefixStore, Store
from spark_hvd.world.layout import RankInfo
from spark_hvd.world.ports import PortRange, listen

SECONDS = 15.0
"""How long a connection may take to come up."""
_RETRY_SECONDS = 0.2


class UnreachableError(RuntimeError):
    """A rank cannot connect to another."""


def connect(host: str, port: int, whom: str, mine: str, seconds: float = SECONDS) -> None:
    """Open a connection to a rank, and close it.

    Args:
        host: Its address.
        port: On which it listens.
        whom: What to call it.
        mine: What to call this rank.
        seconds: How long to try.

    Raises:
        UnreachableError: Naming both ends, and what to look at.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.1)).close()
            return
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS >= until:
                raise UnreachableError(
                    f"{mine} cannot reach {whom} at {host}:{port} ({error}; tried for {seconds:.0f} s). Check that the "
                    "network between the two hosts is up and lets this port through (ports= gives ranks a range to "
                    "listen on; Gloo and NCCL use the kernel's net.ipv4.ip_local_port_range), and that the address is "
                    "on the right network (interfaces= chooses another)."
                ) from error
        time.sleep(_RETRY_SECONDS)


def check_hosts(me: RankInfo, ip: str, kv: Store, ports: PortRange | None, seconds: float = SECONDS) -> None:
    """Let the first rank of every host connect to that of the next host, round in a ring.

    So each host's address is tried by one other: a wrong interface, or a firewall round one host, is found and named.

    Args:
        me: My rank; does nothing but on the first rank of a host.
        ip: My address.
        kv: The ranks' key-value store.
        ports: Where to listen; None for any port, as Gloo does.
        seconds: How long to try to connect.

    Raises:
        UnreachableError: I cannot connect.
    """
    if me.local_rank != 0 or me.cross_size == 1:
        return
    kv = PrefixStore("reach", kv)
    following = (me.cross_rank + 1) % me.cross_size
    with contextlib.closing(listen(ip, ports)) as listener:
        place = [me.rank, me.host, ip, listener.getsockname()[1]]
        kv.set(f"at/{me.cross_rank}", json.dumps(place))
        rank, host, address, port = json.loads(kv.get(f"at/{following}"))
        connect(address, port, f"rank {rank} on host {host}", f"rank {me.rank} on host {me.host} ({ip})", seconds)
        kv.set(f"reached/{following}", "yes")
        kv.get(f"reached/{me.cross_rank}")  # the one before me may still be on its way to my listener
