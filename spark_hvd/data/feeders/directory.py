"""The driver's list of feeders: feeders report to it, and ranks ask it for their addresses."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from typing import Any

import zmq

from spark_hvd.data.feeders.sockets import FeedAddress, SocketThread
from spark_hvd.world.layout import Endpoint
from spark_hvd.world.ports import PortRange

HEARTBEAT_SECONDS = 0.5
"""Seconds between two messages of a feeder, which expects an answer to each."""
_SILENT_AFTER = 10.0


class Directory(SocketThread):
    """Keeps the list of feeders. Messages are JSON: feeders send their name and endpoint, ranks send null.

    Args:
        bind_host: The address to listen on.
        public_host: The address at which tasks reach the directory.
        ports: The ports to listen on; None for any.
        feeders: The expected number of feeders.
        start_timeout: Seconds for which ranks wait for a feeder that takes their rows.

    Attributes:
        address: The address for feeders and ranks.
        come: Number of feeders that have reported so far.

    Raises:
        OSError, zmq.ZMQError: The directory cannot listen on this host and these ports.
    """

    def __init__(
        self, bind_host: str, public_host: str, ports: PortRange | None, feeders: int, start_timeout: float
    ) -> None:
        secret = secrets.token_bytes(32)
        super().__init__("spark_hvd-feeders", secret)
        self._socket, endpoint = self._server(bind_host, ports)
        self.address = FeedAddress(Endpoint(public_host, endpoint.port), secret, feeders, start_timeout)
        self.come = 0
        self._feeders: dict[str, tuple[list[Any], float]] = {}  # name -> endpoint, time of the last message
        self._over = False
        self._thread.start()

    def end(self) -> None:
        """Tell feeders to end in the answer to their next message."""
        self._over = True

    def _turn(self, ready: set[Any]) -> None:
        senders = []
        with contextlib.suppress(zmq.Again):
            while True:
                sender, text = self._socket.recv_multipart(zmq.NOBLOCK)
                senders.append(sender)
                if message := json.loads(text):
                    self.come += message["feeder"] not in self._feeders
                    self._feeders[message["feeder"]] = message["endpoint"], time.monotonic()
        now = time.monotonic()
        self._feeders = {name: each for name, each in self._feeders.items() if now - each[1] < _SILENT_AFTER}
        answer = {"over": self._over, "feeders": {name: endpoint for name, (endpoint, _) in self._feeders.items()}}
        for sender in senders:
            self._socket.send_multipart([sender, json.dumps(answer).encode()])
