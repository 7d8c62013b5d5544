"""A rank's client of the feeders. It sends each feeder a few requests with rows, and receives the results.

A feeder may end at any moment. Its unanswered requests then go to another feeder, so each request gets one answer, even
if its rows are computed twice.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import zmq

from spark_hvd.data.feeders.mapping import from_bytes, to_bytes
from spark_hvd.data.feeders.sockets import MAX_REQUEST, FeedAddress, SocketThread
from spark_hvd.data.readers.errors import DataError
from spark_hvd.world.layout import Endpoint

_log = logging.getLogger(__name__)
IN_FLIGHT = 2
"""Number of requests of a rank that a feeder has at once: one that it processes, and the next."""
_ASK_AT_FIRST, _ASK_EVERY = 0.1, 1.0
"""Seconds between two requests for the list of feeders, while there are none and afterwards."""
_WARN_AFTER = 30.0
"""Seconds without a feeder that takes rows, after which the rank warns."""


class FunctionFailed(Exception):  # noqa: N818  only the cause of another exception
    """Shows where in a feeder the function of a ``Mapped`` failed. It is the cause of the exception that is raised."""


@dataclass
class _Request:
    number: bytes
    frames: list[Any]
    future: Future[pa.RecordBatch]


@dataclass
class _Feeder:
    socket: zmq.Socket[bytes]
    disconnects: zmq.Socket[bytes]
    requests: dict[bytes, _Request] = field(default_factory=dict)


class FeederPool(SocketThread):
    """Sends rows to feeders, and returns a future for the result of each request."""

    def __init__(self, feed: FeedAddress) -> None:
        super().__init__("spark_hvd-fed", feed.secret)
        self.in_flight = IN_FLIGHT * feed.feeders
        self._feed = feed
        self._numbers = itertools.count()
        self._directory = self._client(feed.endpoint)
        self._feeders: dict[str, _Feeder] = {}
        self._waiting: deque[_Request] = deque()
        self._next_question = 0.0
        self._addresses: list[str] = []
        self._stuck_since: float | None = None
        self._warned = False
        self._failure: Exception | None = None
        self._thread.start()

    def submit(
        self, data: str, rows: pa.RecordBatch, draws: Sequence[int] | None, columns: Sequence[str] | None
    ) -> Future[pa.RecordBatch]:
        """Send rows to a feeder, which applies the function of a data set; see :func:`.mapping.apply`.

        Raises:
            DataError: The rows have too many bytes for one message.
        """
        body, number = to_bytes(rows), str(next(self._numbers)).encode()
        if body.size > MAX_REQUEST - 4096:
            raise DataError(
                f"{rows.num_rows} rows of data set {data!r} have {body.size} bytes: expected at most {MAX_REQUEST}, "
                "which a feeder takes at once. Next: set a smaller rows_at_once= of Mapped"
            )
        header = json.dumps({"data": data, "draws": draws, "columns": columns}).encode()
        request = _Request(number, [number, header, body], Future())
        self._waiting.append(request)
        self._ring()
        if self._failure is not None:
            _settle(request.future.set_exception, self._failure)
        return request.future

    def _turn(self, ready: set[Any]) -> None:
        for name, feeder in list(self._feeders.items()):
            if feeder.socket in ready:
                self._receive_results(feeder)
            if feeder.disconnects in ready:
                self._drop(name)
        now = time.monotonic()
        with contextlib.suppress(zmq.Again):
            while True:
                self._update(json.loads(self._directory.recv(zmq.NOBLOCK))["feeders"])
        if now >= self._next_question:
            self._next_question = now + (_ASK_EVERY if self._feeders else _ASK_AT_FIRST)
            with contextlib.suppress(zmq.Again):
                self._directory.send(b"null", zmq.NOBLOCK)
        self._send_requests()
        self._check_feeders(now)

    def _update(self, endpoints: dict[str, list[Any]]) -> None:
        """Connect to new feeders, and drop those that are no longer listed."""
        self._addresses = [f"{host}:{port}" for host, port in endpoints.values()]
        for name in self._feeders.keys() - endpoints.keys():
            self._drop(name)
        for name in endpoints.keys() - self._feeders.keys():
            socket = self._client(Endpoint(*endpoints[name]))
            disconnects = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._poller.register(disconnects, zmq.POLLIN)
            self._feeders[name] = _Feeder(socket, disconnects)

    def _drop(self, name: str) -> None:
        """Disconnect from a feeder. Other feeders get its unanswered requests. It may be connected again later."""
        feeder = self._feeders.pop(name)
        self._waiting.extendleft(reversed(feeder.requests.values()))
        self._poller.unregister(feeder.socket)
        self._poller.unregister(feeder.disconnects)
        feeder.socket.disable_monitor()
        feeder.disconnects.close(0)
        feeder.socket.close(0)

    def _receive_results(self, feeder: _Feeder) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                number, error, body = feeder.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                request = feeder.requests.pop(number.bytes)
                if len(error):
                    _settle(request.future.set_exception, _raised(error.bytes, body.bytes.decode()))
                else:
                    _settle(request.future.set_result, from_bytes(body.buffer))

    def _send_requests(self) -> None:
        free = [each for each in self._feeders.values() if len(each.requests) < IN_FLIGHT]
        while self._waiting and free:
            if self._waiting[0].future.cancelled():
                self._waiting.popleft()
                continue
            feeder = min(free, key=lambda each: len(each.requests))
            request = self._waiting[0]
            try:
                feeder.socket.send_multipart(request.frames, zmq.NOBLOCK, copy=False)
            except zmq.Again:  # not connected yet
                free.remove(feeder)
                continue
            self._waiting.popleft()
            feeder.requests[request.number] = request
            if len(feeder.requests) == IN_FLIGHT:
                free.remove(feeder)

    def _check_feeders(self, now: float) -> None:
        """If requests wait but no feeder takes any, warn, and finally fail these requests."""
        waiting = any(not each.future.cancelled() for each in list(self._waiting))
        if not waiting or any(each.requests for each in self._feeders.values()):
            self._stuck_since, self._warned = None, False
            return
        if self._stuck_since is None:
            self._stuck_since = now
        seconds = now - self._stuck_since
        if seconds >= self._feed.start_timeout:
            self._stuck_since, self._warned = None, False
            error = DataError(f"{self._no_feeder(seconds)} (start_timeout={self._feed.start_timeout:g})")
            while self._waiting:
                _settle(self._waiting.popleft().future.set_exception, error)
        elif seconds >= _WARN_AFTER and not self._warned:
            self._warned = True
            _log.warning("%s. The run ends with an error after start_timeout", self._no_feeder(seconds))

    def _no_feeder(self, seconds: float) -> str:
        problem = f"no feeder has taken rows of this rank for {seconds:.0f} s: "
        if self._addresses:
            return problem + (
                f"none can be reached at {', '.join(self._addresses)}. Next: open these ports between executors, pass "
                "the open ones as ports=, or pass the network between executors as interfaces="
            )
        return problem + (
            f"the driver at {self._feed.endpoint.host}:{self._feed.endpoint.port} has named none. Next: check whether "
            "the Spark job of the feeders waits for task slots, read their executors' logs, or request fewer feeders"
        )

    def _failed(self, error: Exception) -> None:
        super()._failed(error)
        self._failure = error
        sent = [each for feeder in self._feeders.values() for each in feeder.requests.values()]
        for request in sent + list(self._waiting):
            _settle(request.future.set_exception, error)


def _settle(setter: Callable[[Any], None], value: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # the future was cancelled, because the epoch ended early
        setter(value)


def _raised(pickled: bytes, text: str) -> BaseException:
    try:
        error: BaseException = pickle.loads(pickled)
    except Exception:  # the class does not exist here, or fails to unpickle
        error = RuntimeError(text.strip().rpartition("\n")[2])
    error.__cause__ = FunctionFailed(f"in a feeder\n{text.rstrip()}")
    return error


_pools: dict[FeedAddress, tuple[int, FeederPool]] = {}
_lock = threading.Lock()


def pool_of(feed: FeedAddress) -> FeederPool:
    """Return the pool of this process. A forked process needs a new one, because threads do not survive a fork."""
    with _lock:
        process, pool = _pools.get(feed, (0, None))
        if pool is None or process != os.getpid():
            pool = FeederPool(feed)
            _pools[feed] = os.getpid(), pool
        return pool
