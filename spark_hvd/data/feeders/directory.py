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

BEAT = 0.5
"""Seconds between two messages of a feeder, which expects an answer to each."""
_SILENT_AFTER = 10.0


class Directory(SocketThread):
    """See the module's description.

    Args:
        bind_host: The address to listen on.
        public_host: The address at which tasks reach it.
        ports: The ports that it may listen on; None for any.
        feeders: The expected number of feeders.
        start_timeout: Seconds that ranks wait for a feeder that takes their rows.

    Attributes:
        address: The address that feeders and ranks need.
        come: Number of feeders that have reported so far.

    Raises:
        OSError, zmq.ZMQError: It cannot listen there.
    """

    def __init__(
        self, bind_host: str, public_host: str, ports: PortRange | None, feeders: int, start_timeout: float
    ) -> None:
        secret = secrets.token_bytes(32)
        super().__init__("spark_hvd-feeders", secret)
        self._socket, endpoint = self._server(bind_host, ports)
        self.address = FeedAddress(Endpoint(public_host, endpoint.port), secret, feeders, start_timeout)
        self.come = 0
        self._there: dict[str, tuple[list[Any], float]] = {}
        self._over = False
        self._thread.start()

    def end(self) -> None:
        """Tell feeders to end, when they are heard of next."""
        self._over = True

    def _turn(self, ready: set[Any]) -> None:
        asked = []
        with contextlib.suppress(zmq.Again):
            while True:
                whose, text = self._socket.recv_multipart(zmq.NOBLOCK)
                asked.append(whose)
                if said := json.loads(text):
                    self.come += said["feeder"] not in self._there
                    self._there[said["feeder"]] = said["endpoint"], time.monotonic()
        now = time.monotonic()
        self._there = {name: each for name, each in self._there.items() if now - each[1] < _SILENT_AFTER}
        answer = {"over": self._over, "feeders": {name: endpoint for name, (endpoint, _) in self._there.items()}}
        for whose in asked:
            self._socket.send_multipart([whose, json.dumps(answer).encode()])
