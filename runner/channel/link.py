"""A task's connection to the hub: an authenticated ZeroMQ DEALER, with messages no larger than the hub accepts.

Messages that decide something have a sequence number in both directions. If the connection breaks and ZeroMQ makes
another, each end repeats what the other may not have received, and ignores what it has received before. Output and
records, which decide nothing, have no number and may be lost with a connection.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import threading
import time
from collections import deque
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
_TRY_MS = 2000
_MOST_TRIES = 15
"""How often a link without heartbeats tries to send, for ``_TRY_MS`` each time. While this process is suspended, no try
passes."""
_KEEPALIVE_SECONDS = 30
"""Seconds without traffic after which TCP sends something, so that no firewall on the way forgets a connection."""
_DEAD_MS = 60_000
"""Milliseconds without TCP's confirmation after which the kernel ends a connection, and ZeroMQ makes another."""


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
        self._gave_up = False
        self._sequence = 0  # of the last message that was numbered here
        self._received = 0  # the sequence number of the last message received
        self._unsent: deque[tuple[int, list[bytes | memoryview]]] = deque()
        self._sent: deque[tuple[int, list[bytes | memoryview]]] = deque()  # the hub may not have them yet
        self._context = zmq.Context()
        self.socket = self._new_socket()
        # By this ID the hub knows a new connection as this link's. Nobody else can guess it and take this link's place.
        # ZeroMQ generates IDs that begin with a zero byte.
        self.socket.routing_id = b"link" + secrets.token_bytes(16)
        self.socket.probe_router = True  # the hub answers each new connection, see receive()
        self.socket.linger = 2000
        self.socket.sndtimeo = _TRY_MS
        self.socket.connect(self.url)

    def _new_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.curve_serverkey = self._address.server_public
        socket.curve_publickey = self._address.client_public
        socket.curve_secretkey = self._address.client_secret
        socket.ipv6 = ":" in self._address.host
        socket.immediate = True
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = _KEEPALIVE_SECONDS
        socket.tcp_maxrt = _DEAD_MS
        return socket

    def wait_connected(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until both ends have authenticated, and the hub has answered.

        Returns:
            False if that did not happen in time; then nothing has reached, or will ever reach, the hub.
        """
        if not self.socket.poll(int(timeout * 1000)):
            return False
        self.receive()
        return True

    def hello(self, attempt: int, **fields: Any) -> None:
        """Announce this task, Spark's attempt ``attempt``, to the hub."""
        self.send("hello", attempt=attempt, host=self._host, **fields)
        if self._host is not None:
            socket = self._new_socket()
            socket.linger = 0
            socket.connect(self.url)
            self._heartbeat = Heartbeat(socket, {"type": "alive", "rank": self.rank})

    def hub_silence(self) -> float:
        """Return the seconds since the hub last answered this task's heartbeats; 0 if it sends none.

        Infinite once a message could not be sent, because nobody would try again.
        """
        if self._gave_up:
            return math.inf
        return 0.0 if self._heartbeat is None else self._heartbeat.silence()

    def send(self, type_: str, **fields: Any) -> None:
        """Send one message. If the hub is slow, wait as long as it answers heartbeats; without those, half a minute."""
        self._number(type_, fields)
        self._push()

    def _number(self, type_: str, fields: dict[str, Any], *payload: memoryview) -> None:
        self._sequence += 1
        body = self._encoded(type_, {**fields, "sequence": self._sequence})
        self._unsent.append((self._sequence, [body, *payload]))

    def _push(self) -> bool:
        """Send in order what has not been sent, and return whether that was possible before the hub fell silent."""
        tries = 0
        while self._unsent:
            try:
                self.socket.send_multipart(self._unsent[0][1])
            except zmq.Again:
                tries += 1
                if self.hub_silence() >= self.patience or (self._heartbeat is None and tries >= _MOST_TRIES):
                    self._gave_up = True
                    return False
            else:
                self._sent.append(self._unsent.popleft())
        return True

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
        parts, data = range(0, max(len(value), 1), _PART), memoryview(value)
        for number, start in enumerate(parts):
            self._number("value", {**fields, "part": number, "parts": len(parts)}, data[start : start + _PART])
            if not self._push():
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
        while True:
            try:
                message: Message = json.loads(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return None
            sequence = message.pop("sequence", None)
            if message["type"] == "received":
                self._hub_has(sequence, connected=message["connected"])
            elif sequence in (None, self._received + 1):  # otherwise it is a repetition, or the hub will repeat it
                self._received = sequence or self._received
                return message

    def _hub_has(self, sequence: int, *, connected: bool) -> None:
        """Forget the messages that the hub has, and if a connection is new, repeat the others, which may be lost."""
        while self._sent and self._sent[0][0] <= sequence:
            self._sent.popleft()
        if connected:
            self._unsent.extendleft(reversed(self._sent))
            self._sent.clear()
            self._push()

    def wait(self, timeout: float) -> Message | None:
        """Wait at most ``timeout`` seconds for one message. Return None if none arrives, perhaps earlier."""
        return self.receive() if self.socket.poll(int(timeout * 1000)) else None

    def close(self, *, discard: bool = False) -> None:
        """Close the connection. Unless ``discard``, send queued messages first, for 2 s at most."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        self.socket.close(0 if discard else None)
        self._context.term()
