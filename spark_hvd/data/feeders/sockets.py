"""A thread that owns ZeroMQ sockets: the base of feeders, of the ranks that use them, and of their directory."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

import zmq

from spark_hvd.engine.curve import Keys, ZapAuthenticator, send_heartbeats, url
from spark_hvd.world.layout import Endpoint
from spark_hvd.world.ports import PortRange, bound

_log = logging.getLogger(__name__)
_TICK_MS = 100
_HANDSHAKE_MS = 5000
MAX_REQUEST = 256 << 20
"""Maximum bytes of a request. ZeroMQ allocates what a message announces before it has authenticated the sender."""


@dataclass(frozen=True, slots=True)
class FeedAddress:
    """The address of the directory of a run's feeders. It holds a secret: send it through Spark's own channels only.

    Attributes:
        endpoint: The address at which the directory listens.
        secret: The secret from which all keys are derived.
        feeders: The number of feeders.
        start_timeout: Seconds that a rank waits for a feeder that takes its rows.
    """

    endpoint: Endpoint
    secret: bytes = field(repr=False)
    feeders: int
    start_timeout: float


class SocketThread:
    """Serves sockets until it is closed. A subclass opens them, starts the thread, and implements `_turn`."""

    def __init__(self, name: str, secret: bytes) -> None:
        self._context = zmq.Context(2)  # I/O threads; each encrypts at most 0.4 GB/s
        self._keys = Keys.of(secret)
        self._zap: ZapAuthenticator | None = None
        self._poller = zmq.Poller()
        self._bell, self._ringer = socket.socketpair()
        for end in (self._bell, self._ringer):
            end.setblocking(False)
        self._poller.register(self._bell, zmq.POLLIN)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def close(self) -> None:
        """Stop the thread, and drop what was not sent. Idempotent."""
        self._closing.set()
        self._ring()
        if self._thread.is_alive():
            self._thread.join(5.0)  # libzmq 4.3.5 may never end a context, see engine.channel

    def _ring(self) -> None:
        """Wake the thread, so that it calls `_turn`. Any thread may call this."""
        with contextlib.suppress(OSError):  # the pipe is full, so the thread will wake anyway
            self._ringer.send(b"\0")

    def _server(self, host: str, ports: PortRange | None) -> tuple[zmq.Socket[bytes], Endpoint]:
        """Return a socket to which members may send, and the address at which it listens.

        Raises:
            OSError, zmq.ZMQError: The socket cannot listen on this host and these ports. Everything is closed then.
        """
        try:
            return self._listening(host, ports)
        except Exception:
            self._release()
            raise

    def _listening(self, host: str, ports: PortRange | None) -> tuple[zmq.Socket[bytes], Endpoint]:
        self._zap = ZapAuthenticator(self._context)
        self._zap.allow(self._keys.member_public)
        self._poller.register(self._zap.socket, zmq.POLLIN)
        server = self._prepared(zmq.ROUTER, host)
        server.curve_server = True
        server.curve_secretkey, server.curve_publickey = self._keys.server_secret, self._keys.server_public
        server.maxmsgsize = MAX_REQUEST
        bound(ports, lambda port: server.bind(url(host, port)))
        return server, Endpoint(host, int(server.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]))

    def _client(self, endpoint: Endpoint) -> zmq.Socket[bytes]:
        client = self._prepared(zmq.DEALER, endpoint.host)
        client.curve_serverkey = self._keys.server_public
        client.curve_secretkey, client.curve_publickey = self._keys.member_secret, self._keys.member_public
        client.immediate = True  # sending fails while there is no connection, rather than queueing
        client.connect(url(endpoint.host, endpoint.port))
        return client

    def _prepared(self, kind: int, host: str) -> zmq.Socket[bytes]:
        prepared = self._context.socket(kind)
        prepared.ipv6 = ":" in host
        prepared.linger = 0
        prepared.handshake_ivl = _HANDSHAKE_MS
        prepared.sndhwm = prepared.rcvhwm = 0  # no limit is needed, because ranks limit their outstanding requests
        send_heartbeats(prepared)
        self._poller.register(prepared, zmq.POLLIN)
        return prepared

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                ready = {each for each, _ in self._poller.poll(_TICK_MS)}
                with contextlib.suppress(BlockingIOError):
                    while self._bell.recv(4096):
                        pass
                if self._zap is not None:
                    self._zap.handle_requests()
                self._turn(ready)
        except Exception as error:
            self._failed(error)
        finally:
            self._release()

    def _release(self) -> None:
        self._context.destroy(linger=0)
        self._bell.close()
        self._ringer.close()

    def _turn(self, ready: set[Any]) -> None:
        """Receive and send; ``ready`` holds the sockets from which there is something to receive."""
        raise NotImplementedError

    def _failed(self, error: Exception) -> None:
        """Handle an error of `_turn`, which ends the thread."""
        _log.exception("%s failed", self._thread.name)
