"""A feeder: a Spark task that receives rows from ranks, applies a function to them, and returns the results.

A request has the frames: sender, number of the request, header as JSON, rows as Arrow. A reply has: sender, number, the
pickled exception or nothing, and the resulting rows or the traceback.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from spark_hvd.data.feeders.directory import HEARTBEAT_SECONDS
from spark_hvd.data.feeders.mapping import RowMap, apply, from_bytes, to_bytes
from spark_hvd.data.feeders.sockets import FeedAddress, SocketThread
from spark_hvd.world.ports import PortRange

PATIENCE = 30.0
"""A feeder ends if the driver has not answered for this many seconds."""


class _FeederSockets(SocketThread):
    """The sockets of a feeder, in a thread of their own, so that heartbeats go out while the function runs."""

    def __init__(self, feed: FeedAddress, name: str, host: str, ports: PortRange | None) -> None:
        super().__init__("spark_hvd-feeder", feed.secret)
        self.requests: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        """The frames of each request; None tells the feeder to end."""
        self._replies: deque[list[Any]] = deque()
        self._ranks, endpoint = self._server(host, ports)
        self._directory = self._client(feed.endpoint)
        self._beat = json.dumps({"feeder": name, "endpoint": [endpoint.host, endpoint.port]}).encode()
        self._heard, self._next_beat = time.monotonic(), 0.0
        self._thread.start()

    def reply(self, frames: list[Any]) -> None:
        """Have the thread send a reply to a rank."""
        self._replies.append(frames)
        self._ring()

    def _turn(self, ready: set[Any]) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self.requests.put(self._ranks.recv_multipart(zmq.NOBLOCK, copy=False))
        while self._replies:
            self._ranks.send_multipart(self._replies.popleft(), copy=False)
        now = time.monotonic()
        with contextlib.suppress(zmq.Again):
            while True:
                answer = json.loads(self._directory.recv(zmq.NOBLOCK))
                self._heard = now
                if answer["over"]:
                    self.requests.put(None)
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_SECONDS
            with contextlib.suppress(zmq.Again):
                self._directory.send(self._beat, zmq.NOBLOCK)
        if now - self._heard > PATIENCE:
            self.requests.put(None)

    def _failed(self, error: Exception) -> None:
        super()._failed(error)
        self.requests.put(None)


def serve(
    feed: FeedAddress,
    name: str,
    host: str,
    ports: PortRange | None,
    maps: Mapping[str, RowMap],
    dump_exception: Callable[[BaseException], bytes],
) -> None:
    """Feed ranks until the driver says that the run is over, or has not answered for :data:`PATIENCE`.

    Args:
        feed: The directory of the run's feeders.
        name: The name of this feeder, which is unique in the run.
        host: The address at which ranks reach this feeder.
        ports: The ports to listen on; None for any.
        maps: The functions, by the name of the data set.
        dump_exception: Pickles an exception of a function.

    Raises:
        OSError, zmq.ZMQError: The feeder cannot listen on this host and these ports.
    """
    sockets, functions = _FeederSockets(feed, name, host, ports), dict[str, Callable[..., Any]]()
    try:
        while (request := sockets.requests.get()) is not None:
            sender, number, header, rows = request
            try:
                call = json.loads(header.bytes)
                data = call["data"]
                if data not in functions:
                    functions[data] = pickle.loads(maps[data].code)
                result = to_bytes(apply(functions[data], from_bytes(rows.buffer), call["draws"], call["columns"]))
                sockets.reply([sender.bytes, number.bytes, b"", result])
            except Exception as error:
                text = "".join(traceback.format_exception(type(error), error, _user_traceback(error)))
                sockets.reply([sender.bytes, number.bytes, dump_exception(error), text.encode()])
    finally:
        sockets.close()


def _user_traceback(error: BaseException) -> Any:
    """Return the traceback from the user's function on, or all of it if the error is in our own code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, apply.__module__):
        trace = trace.tb_next
    return trace or error.__traceback__
