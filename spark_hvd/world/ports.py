"""A range of ports to listen on, for networks whose firewalls open no other ports."""

from __future__ import annotations

import errno
import random
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PortRange:
    """The ports ``low`` to ``high``, both included.

    Raises:
        ValueError: The numbers do not form a range of ports.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= 65535:
            raise ValueError(f'ports="{self}": expected "LOW-HIGH" with 1 <= LOW <= HIGH <= 65535')

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """Read ``"30000-30100"``, or ``"30000"`` for a single port.

        Raises:
            ValueError: The text is neither.
        """
        match = re.fullmatch(r"\s*(\d+)\s*(?:[-:]\s*(\d+)\s*)?", text)
        if match is None:
            raise ValueError(f'ports={text!r}: expected "LOW-HIGH", such as "30000-30100"')
        return cls(int(match[1]), int(match[2] or match[1]))

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"

    def __iter__(self) -> Iterator[int]:
        """Yield each port once, from a random one on, so that runs on one host seldom try the same port."""
        count = self.high - self.low + 1
        first = random.randrange(count)
        return (self.low + (first + step) % count for step in range(count))


def bound(ports: PortRange | None, bind: Callable[[int], T]) -> T:
    """Call ``bind`` with one port after another, and return its result for the first free one.

    If ``ports`` is None, ``bind`` gets port 0, and the kernel chooses. If a port is in use, ``bind`` must raise an
    error whose ``errno`` is EADDRINUSE.

    Raises:
        OSError: All ports are in use, or ``bind`` raised another error.
    """
    if ports is None:
        return bind(0)
    for port in ports:
        try:
            return bind(port)
        except Exception as error:
            if getattr(error, "errno", None) != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"each port of ports={ports} is in use on this host; give a wider range")


def listen(host: str, ports: PortRange | None = None) -> socket.socket:
    """Return a TCP socket that listens on an address.

    Raises:
        OSError: The address does not belong to this host, or no port is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return bound(ports, lambda port: socket.create_server((host, port), family=family))
