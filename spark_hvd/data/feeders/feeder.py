"""What a feeder does, in a Spark task: rows come from ranks, go through a function, and go back."""

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

from spark_hvd.data.feeders.directory import BEAT
from spark_hvd.data.feeders.mapping import RowMap, apply, from_bytes, to_bytes
from spark_hvd.data.feeders.sockets import FeedAddress, SocketThread
from spark_hvd.world.ports import PortRange

PATIENCE = 30.0
"""Seconds without an answer of the driver after which a feeder ends."""


class _Desk(SocketThread):
    """The sockets of a feeder, in a thread, so that it is heard of while the function runs."""

    def __init__(self, feed: FeedAddress, name: str, host: str, ports: PortRange | None) -> None:
        super().__init__("spark_hvd-feeder", feed.secret)
        self.requests: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._replies: deque[list[Any]] = deque()
        self._ranks, endpoint = self._server(host, ports)
        self._directory = self._client(feed.endpoint)
        self._beat = json.dumps({"feeder": name, "endpoint": [endpoint.host, endpoint.port]}).encode()
        self._heard, self._next_beat = time.monotonic(), 0.0
        self._thread.start()

    def reply(self, frames: list[Any]) -> None:
        """Send an answer to the rank that has asked."""
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
            self._next_beat = now + BEAT
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
    """Feed ranks until the driver says that it is over, or nothing any more.

    Args:
        feed: Of the run.
        name: Of this feeder, which no other has had.
        host: By which ranks reach it.
        ports: To listen on; None: any.
        maps: What is to be done, by the name of the data set.
        dump_exception: Pickles what a function has raised.

    Raises:
        OSError, zmq.ZMQError: it cannot listen there.
    """
    desk, functions = _Desk(feed, name, host, ports), dict[str, Callable[..., Any]]()
    try:
        while (request := desk.requests.get()) is not None:
            whose, number, asked, rows = request
            try:
                told = json.loads(asked.bytes)
                data = told["data"]
                if data not in functions:
                    functions[data] = pickle.loads(maps[data].code)
                made = to_bytes(apply(functions[data], from_bytes(rows.buffer), told["draws"], told["columns"]))
                desk.reply([whose.bytes, number.bytes, b"", made])
            except Exception as error:
                text = "".join(traceback.format_exception(type(error), error, _of_the_function(error)))
                desk.reply([whose.bytes, number.bytes, dump_exception(error), text.encode()])
    finally:
        desk.close()


def _of_the_function(error: BaseException) -> Any:
    """The traceback without our frames above the function's; whole where there are no others."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, apply.__module__):
        trace = trace.tb_next
    return trace or error.__traceback__
