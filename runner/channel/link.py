"""A task's connection to the hub: an authenticated ZeroMQ DEALER, with messages no larger than the hub accepts."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import zmq

from spark_hvd.engine.curve import url
from spark_hvd.runner.channel.liveness import HEARTBEAT_SECONDS, HUB_PATIENCE, SILENT_AFTER, LivenessTracker

if TYPE_CHECKING:
    from spark_hvd.runner.channel.state import Message

_HUB = 0


class Heartbeat:
    """A thread that sends the hub a heartbeat every second, and receives the answers, until :meth:`close`.

    It is a thread because the supervisor sometimes waits for the fork server or for output to drain. It has its own
    connection, so that no output is queued before it. ZeroMQ's own heartbeats would close a connection whose other end
    is only suspended, and lose the messages queued on it; TCP keeps both. ``socket``, which is connected to the hub,
    then belongs to the thread.
    """

    def __init__(self, socket: zmq.Socket[bytes], message: dict[str, Any]) -> None:
        self._socket = socket
        self._message = json.dumps(message).encode()
        self._liveness = LivenessTracker()
        self._liveness.record_heartbeat(_HUB, time.monotonic())
        self._lock = threading.Lock()  # the thread records answers, while others read the time since the last one
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="spark_hvd-heartbeat", daemon=True)
        self._thread.start()

    def silence(self) -> float:
        """Return the seconds since the hub's last answer, to within a second or two."""
        with self._lock:
            return self._liveness.expired(0.0, time.monotonic()).get(_HUB, 0.0)

    def close(self) -> None:
        """End the thread and its connection. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _beat(self) -> None:
        with self._socket:
            while True:
                with contextlib.suppress(zmq.Again):  # not connected, or cut off: heartbeats must not pile up
                    self._socket.send(self._message, zmq.NOBLOCK)
                if self._closing.wait(HEARTBEAT_SECONDS / 2):
                    return
                self._listen()
                if self._closing.wait(HEARTBEAT_SECONDS / 2):
                    return

    def _listen(self) -> None:
        answered = False
        with contextlib.suppress(zmq.Again):
            while True:
                self._socket.recv(zmq.NOBLOCK)
                answered = True
        with self._lock:
            now = time.monotonic()
            if answered:
                self._liveness.record_heartbeat(_HUB, now)
            self._liveness.tick(now)


@dataclass(frozen=True, slots=True)
class HubAddress:
    """Address of a hub, and the keys for it. This is a secret: send it only through Spark's own channels."""

    host: str
    port: int
    server_public: bytes
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @property
    def url(self) -> str:
        """The hub's address, as ZeroMQ writes it."""
        return url(self.host, self.port)


MAX_MESSAGE = 4 << 20
"""Maximum size of a message to a hub, in bytes. Otherwise anybody could announce any size, which libzmq allocates."""
_MAX_TEXT = 64 << 10
_PART = 1 << 20
_PATIENCE = 5.0
"""Seconds without an answer from the hub after which a link gives up sending it a value."""


class Link:
    """A task's connection to the hub.

    Call :meth:`wait_connected` first; nothing arrives before. With a host, the link sends heartbeats after hello. Ranks
    on the hub's machine have no host, and send none. ``hub_at`` names the rank whose task has the hub, and its host;
    None means that the hub is on the driver.
    """

    def __init__(self, address: HubAddress, rank: int, host: str | None = None, *, hub_at: str | None = None) -> None:
        self.rank = rank
        self.hub_at = hub_at
        self.patience = HUB_PATIENCE if hub_at is None else SILENT_AFTER
        """Seconds without an answer from the hub after which a task ends its rank. Ranks can train without the driver,
        but not without the rank that has the hub."""
        self._host = host
        self._address, self.url = address, address.url
        self._heartbeat: Heartbeat | None = None
        self._context = zmq.Context()
        self.socket = self._new_socket()
        self.socket.linger = 2000
        self.socket.sndtimeo = 2000
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(self.url)

    def _new_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.curve_serverkey = self._address.server_public
        socket.curve_publickey = self._address.client_public
        socket.curve_secretkey = self._address.client_secret
        socket.ipv6 = ":" in self._address.host
        socket.immediate = True
        return socket

    def wait_connected(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until both ends have authenticated.

        Returns:
            False if they did not in time; then nothing has reached, or will ever reach, the hub.
        """
        connected = bool(self._monitor.poll(int(timeout * 1000)))
        self.socket.disable_monitor()
        self._monitor.close(0)
        return connected

    def hello(self, attempt: int, **fields: Any) -> None:
        """Announce this task, Spark's attempt ``attempt``, to the hub."""
        self.send("hello", attempt=attempt, host=self._host, **fields)
        if self._host is not None:
            socket = self._new_socket()
            socket.linger = 0
            socket.connect(self.url)
            self._heartbeat = Heartbeat(socket, {"type": "alive", "rank": self.rank})

    def hub_silence(self) -> float:
        """Return the seconds since the hub last answered this task's heartbeats; 0 if it sends none."""
        return 0.0 if self._heartbeat is None else self._heartbeat.silence()

    def send(self, type_: str, **fields: Any) -> None:
        """Send one message, which is lost if the hub is gone."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(self._encoded(type_, fields))

    def try_send(self, type_: str, **fields: Any) -> bool:
        """Send one message and return True, or return False if the hub is too slow for it now."""
        try:
            self.socket.send(self._encoded(type_, fields), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def hand_over(self, value: bytes | memoryview, **fields: Any) -> bool:
        """Send a value of any size, in parts, and wait until the hub has it.

        Returns:
            Whether the hub has the value; False if it no longer answers, or tells this task to stop.
        """
        parts = range(0, max(len(value), 1), _PART)
        for number, start in enumerate(parts):
            body = self._encoded("value", {**fields, "part": number, "parts": len(parts)})
            while self.hub_silence() < _PATIENCE:
                with contextlib.suppress(zmq.Again):
                    self.socket.send_multipart([body, value[start : start + _PART]])
                    break
            else:
                return False
        while self.hub_silence() < self.patience:
            message = self.wait(HEARTBEAT_SECONDS)
            if message is not None and message["type"] in ("kept", "stop"):
                return bool(message["type"] == "kept")
        return False

    def _encoded(self, type_: str, fields: dict[str, Any]) -> bytes:
        message = {"type": type_, "rank": self.rank, **fields}
        body = json.dumps(message).encode()
        if len(body) > MAX_MESSAGE:  # the hub would cut the connection; an exception's text may have any length
            cut = {key: value[:_MAX_TEXT] if isinstance(value, str) else value for key, value in message.items()}
            body = json.dumps(cut).encode()
        return body

    def receive(self) -> Message | None:
        """Return one message, or None if none has arrived."""
        try:
            message: Message = json.loads(self.socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        return message

    def wait(self, timeout: float) -> Message | None:
        """Wait at most ``timeout`` seconds for one message."""
        return self.receive() if self.socket.poll(int(timeout * 1000)) else None

    def close(self, *, discard: bool = False) -> None:
        """Close the connection. Unless ``discard``, send queued messages first, for 2 s at most."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._monitor.close(0)
        self.socket.close(0 if discard else None)
        self._context.term()
