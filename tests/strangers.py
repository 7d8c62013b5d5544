"""Strangers who reach a port but have no keys for it. Run as ``python strangers.py PORT SECONDS``."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import time

import zmq

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
FIRST_WORDS = (
    b"",  # half-open
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 4096,
    GREETING + b"\x06" + (1 << 40).to_bytes(8, "big") + bytes(4096),  # announces a command of a terabyte
    GREETING + b"\x02" + (3 << 20).to_bytes(8, "big") + bytes(4096),  # and one within the limit that never comes
)


def with_wrong_keys(port: int, context: zmq.Context[zmq.Socket[bytes]]) -> list[zmq.Socket[bytes]]:
    """Connect as ZeroMQ peers without a mechanism, with a password, and with other keys."""
    peers = [context.socket(zmq.DEALER) for _ in range(3)]
    peers[1].plain_username, peers[1].plain_password = b"admin", b"admin"
    peers[2].curve_publickey, peers[2].curve_secretkey = zmq.curve_keypair()
    peers[2].curve_serverkey, _ = zmq.curve_keypair()
    for peer in peers:
        peer.linger = 0
        peer.connect(f"tcp://127.0.0.1:{port}")
        peer.send(b'{"type": "ended", "rank": 0, "ok": false, "echo": false}')
    return peers


def flood(port: int, seconds: float, most: int = 600) -> None:
    """Keep as many connections as possible open, each with some first bytes."""
    dice, deadline = random.Random(1), time.monotonic() + seconds
    context = zmq.Context()
    peers = with_wrong_keys(port, context)
    held: list[socket.socket] = []
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
            held[-1].sendall(dice.choice(FIRST_WORDS))
        while len(held) > most:
            held.pop(0).close()
        time.sleep(0.002)
    for peer in peers:
        peer.close()
    context.term()


if __name__ == "__main__":
    flood(int(sys.argv[1]), float(sys.argv[2]))
