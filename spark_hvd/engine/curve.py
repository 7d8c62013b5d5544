"""Sets up ZeroMQ sockets between ranks, and between ranks and feeders: addresses, heartbeats, and who may connect.

Only holders of keys that are derived from a secret may. Needs no torch.

RFC 5869 explains why a keyed hash gives independent keys; https://rfc.zeromq.org/spec/26 what CURVE does with them.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import zmq
import zmq.utils.z85

_HEARTBEAT_MS = 1000
_SILENT_AFTER_MS = 7000
"""As for the hub (`runner.channel.liveness`): TCP repeats lost data within this time after a gap of five seconds."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The two CURVE key pairs of a world or of a run's feeders: the servers' and the members'."""

    server_public: bytes
    server_secret: bytes
    member_public: bytes
    member_secret: bytes

    @classmethod
    def of(cls, secret: bytes) -> Keys:
        """Derive the keys of a secret."""
        pairs = []
        for who in (b"coordinator", b"member"):
            private = zmq.utils.z85.encode(hmac.new(secret, b"spark_hvd collectives " + who, hashlib.sha256).digest())
            pairs += [zmq.curve_public(private), private]
        return cls(*pairs)


def url(host: str, port: int) -> str:
    """Return an address in ZeroMQ's form; port 0 stands for any."""
    return f"tcp://[{host}]:{port or '*'}" if ":" in host else f"tcp://{host}:{port or '*'}"


def send_heartbeats(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Let ZeroMQ end a connection whose peer answers nothing for 7 s. This does not need the peer's interpreter."""
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENT_AFTER_MS
    return socket


class ZapAuthenticator:
    """Lets only the holders of known keys connect to a context's sockets (https://rfc.zeromq.org/spec/27).

    One thread uses it. pyzmq's own authenticators need a thread and an event loop per context, but whoever serves the
    sockets already has a thread.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        self._allowed: set[bytes] = set()

    def allow(self, public_key: bytes) -> None:
        """Let in the holder of this key, given as Z85 text."""
        self._allowed.add(zmq.utils.z85.decode(public_key))

    def handle_requests(self) -> None:
        """Answer the pending requests."""
        while self.socket.poll(0):
            version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
            known = mechanism == b"CURVE" and credentials[0] in self._allowed
            status, text = (b"200", b"OK") if known else (b"400", b"no known key")
            self.socket.send_multipart([version, request, status, text, b"", b""])
