"""The hub as a socket: a ZeroMQ ROUTER with CURVE keys made for one run, and the tasks' end of it.

Every message is one small JSON object. Both ends prove who they are: the server by its key, the tasks by a key pair
that reached them in Spark's closure, so a stranger can neither listen nor speak (https://rfc.zeromq.org/spec/26).
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import zmq
import zmq.auth
import zmq.utils.monitor
from zmq.auth.thread import ThreadAuthenticator

from spark_hvd.ports import PortRange, bound
from spark_hvd.runner.heartbeat import Heartbeat
from spark_hvd.runner.hub_state import HubState, Message, Send

_log = logging.getLogger(__name__)
_TICK_MS = 50
_ASIDE = ("output", "vitals", "examined")
"""Messages that decide nothing."""
_PATIENCE = 5.0
"""Seconds for the sockets to close, of which sending what is queued may take one."""


@dataclass(frozen=True, slots=True)
class HubAddress:
    """Where a hub is and the keys to speak to it. A secret: send it through Spark's own channels only."""

    host: str
    port: int
    server_public: bytes
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @property
    def url(self) -> str:
        """The ZeroMQ address."""
        return zmq_url(self.host, self.port)


def zmq_url(host: str, port: int) -> str:
    """``tcp://host:port``, with brackets round an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class _OneKey:
    """Lets in the holder of one public key (the interface of pyzmq's credentials providers)."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


class HubLogic(Protocol):
    """What a hub decides: messages and clock ticks in, messages out. It does no I/O, and is called by one thread."""

    def handle(self, message: Message, now: float) -> list[Send]:
        """Take one message of a task."""
        ...

    def hear(self, rank: int, now: float) -> None:
        """Take anything as a sign of life."""
        ...

    def tick(self, now: float) -> list[Send]:
        """Take note of the time; called several times a second."""
        ...

    def stop(self, reason: str) -> list[Send]:
        """Stop every task."""
        ...

    def examine(self) -> list[Send]:
        """Have every task look at its rank's process."""
        ...

    @property
    def all_gone(self) -> bool:
        """Whether no process of any task is left."""
        ...


class Listener(Protocol):
    """Takes what ranks say that is no part of the hub's decisions. Called by the hub's thread; must not block."""

    def output(self, rank: int, stream: str, text: str) -> None:
        """Whole lines that a rank has printed; `stream` is "out" or "err", rank -1 stands for nobody in particular."""
        ...

    def vitals(self, message: Message) -> None:
        """What a rank tells of itself, see :class:`spark_hvd.vitals.Vitals`."""
        ...

    def examined(self, rank: int, message: Message) -> None:
        """The answer to :meth:`HubServer.examine`, see :class:`spark_hvd.runner.probe.Examination`."""
        ...


class HubServer:
    """Runs a hub's decisions behind a socket, in a thread of its own.

    Args:
        state: The decisions.
        bind_host: Address to listen on.
        public_host: Address that tasks connect to, where it is another one.
        listener: Takes what ranks say besides; None for nobody.
        ports: Where it may listen; None for any port.

    Raises:
        zmq.ZMQError: the address cannot be bound.
        OSError: no port of `ports` is free.
    """

    def __init__(
        self,
        state: HubLogic,
        bind_host: str,
        public_host: str | None = None,
        listener: Listener | None = None,
        ports: PortRange | None = None,
    ) -> None:
        self._state = state
        self._listener = listener
        self._lock = threading.Lock()
        self._questions: deque[Callable[[], list[Send]]] = deque()
        self._closing = threading.Event()
        self._identities: dict[int, bytes] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        try:
            self._auth.configure_curve_callback(credentials_provider=_OneKey(client_public))
            self._socket.curve_server = True
            self._socket.curve_secretkey = server_secret
            self._socket.curve_publickey = server_public
            self._socket.ipv6 = ":" in bind_host
            self._socket.linger = 1000
            bound(ports, lambda port: self._socket.bind(zmq_url(bind_host, port)))
            port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        except BaseException:
            self._release_sockets()
            raise
        self.address = HubAddress(public_host or bind_host, port, server_public, client_public, client_secret)
        self._thread = threading.Thread(target=self._serve, name="spark_hvd-hub", daemon=True)
        self._thread.start()

    def stop(self, reason: str) -> None:
        """Ask every rank to stop; returns at once."""
        self._ask(lambda: self._state.stop(reason))

    def examine(self) -> None:
        """Have every task look at its rank's process, and tell the listener what it finds; returns at once."""
        self._ask(self._state.examine)

    def wait_gone(self, timeout: float) -> bool:
        """Wait until no rank's process is left, as far as this hub is told; at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with self._lock:
                if self._state.all_gone:
                    return True
            time.sleep(0.02)
        return False

    def close(self) -> None:
        """Send what is queued, stop the thread, free the port. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(_PATIENCE)  # libzmq 4.3.5 may never end a context, see channel.CoordinatorSockets

    def _ask(self, question: Callable[[], list[Send]]) -> None:
        """Have the hub's thread ask the state something, soon; from any thread."""
        self._questions.append(question)

    def _release_sockets(self) -> None:
        self._socket.close()
        self._auth.stop()
        self._context.term()

    def _serve(self) -> None:
        try:
            self._turn_until_closed()
        finally:
            self._release_sockets()

    def _turn_until_closed(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        while not self._closing.is_set():
            if poller.poll(_TICK_MS):
                self._drain()
            with self._lock:
                decisions = self._state.tick(time.monotonic())
                while self._questions:
                    decisions += self._questions.popleft()()
            self._send(decisions)
        self._drain()

    def _drain(self) -> None:
        while True:
            try:
                identity, body = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message: Message = json.loads(body)
            if message["type"] == "alive":  # comes on a connection of its own, see Heartbeat
                self._socket.send_multipart([identity, body])
            if message["type"] in _ASIDE:
                with self._lock:
                    self._state.hear(message["rank"], time.monotonic())
                self._pass_on(message)
                continue
            if message["type"] == "hello":
                self._identities.setdefault(message["rank"], identity)
            with self._lock:
                decisions = self._state.handle(message, time.monotonic())
            if any(decision.message["type"] == "refuse" for decision in decisions):
                self._socket.send_multipart([identity, json.dumps(decisions[0].message).encode()])
            else:
                self._send(decisions)

    def _pass_on(self, message: Message) -> None:
        if self._listener is None:
            return
        match message["type"]:
            case "output":
                self._listener.output(message["rank"], message["stream"], message["text"])
            case "vitals":
                self._listener.vitals(message["vitals"])
            case "examined":
                self._listener.examined(message["rank"], message)

    def _send(self, decisions: list[Send]) -> None:
        for decision in decisions:
            _log.debug("hub -> rank %d: %s", decision.rank, decision.message)
            self._socket.send_multipart([self._identities[decision.rank], json.dumps(decision.message).encode()])


class Hub(HubServer):
    """The hub of a static run; see :class:`HubServer`."""

    _state: HubState

    def __init__(
        self,
        state: HubState,
        bind_host: str,
        public_host: str | None = None,
        listener: Listener | None = None,
        ports: PortRange | None = None,
    ) -> None:
        super().__init__(state, bind_host, public_host, listener, ports)

    def snapshot(self) -> tuple[set[int], list[int]]:
        """(ranks that said hello, ranks that failed in the order heard) as known now."""
        with self._lock:
            return set(self._state.attempts), list(self._state.failed)

    @property
    def lost(self) -> str | None:
        """Ranks that have gone silent, their hosts and for how long; None while all are heard of."""
        with self._lock:
            return self._state.describe_lost() if self._state.lost else None

    @property
    def fell_back(self) -> bool:
        """Whether some tasks could not reach this hub, so that all meet at rank 0's instead."""
        return self._state.fell_back


class Link:
    """A task's connection to the hub.

    Use :meth:`wait_connected` first: until then nothing sent can have arrived.

    Args:
        address: Of the hub.
        rank: Mine.
        host: Mine. With it the hub is given signs of life from hello on, and notices when they end; without it (ranks
            beside their hub) not.
    """

    def __init__(self, address: HubAddress, rank: int, host: str | None = None) -> None:
        self.rank = rank
        self._host = host
        self._address = address
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

    @property
    def url(self) -> str:
        """The hub's address."""
        return self._address.url

    def wait_connected(self, timeout: float) -> bool:
        """Wait until both ends have proved who they are.

        Args:
            timeout: Seconds.

        Returns:
            False when that did not happen in time; nothing has reached, or ever will reach, the hub.
        """
        connected = bool(self._monitor.poll(int(timeout * 1000)))
        self.socket.disable_monitor()
        self._monitor.close(0)
        return connected

    def hello(self, attempt: int, **fields: Any) -> None:
        """Tell the hub that this task, Spark's attempt ``attempt``, is there."""
        self.send("hello", attempt=attempt, host=self._host, **fields)
        if self._host is not None:
            socket = self._new_socket()
            socket.linger = 0
            socket.connect(self.url)
            self._heartbeat = Heartbeat(socket, {"type": "alive", "rank": self.rank})

    def hub_silence(self) -> float:
        """Seconds in which the hub has not answered this task's signs of life."""
        return 0.0 if self._heartbeat is None else self._heartbeat.silence()

    def send(self, type_: str, **fields: Any) -> None:
        """Send one message; lost if the hub has gone, in which case nobody is left to care."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(json.dumps({"type": type_, "rank": self.rank, **fields}).encode())

    def try_send(self, type_: str, **fields: Any) -> bool:
        """Send one message unless the hub is behind; False means try again later, or never."""
        try:
            self.socket.send(json.dumps({"type": type_, "rank": self.rank, **fields}).encode(), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Message | None:
        """Take one message, or None when there is none now."""
        try:
            message: Message = json.loads(self.socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        return message

    def wait(self, timeout: float) -> Message | None:
        """Wait for one message, at most ``timeout`` seconds."""
        return self.receive() if self.socket.poll(int(timeout * 1000)) else None

    def close(self, *, discard: bool = False) -> None:
        """Close; sends what is queued first (2 s at most) unless ``discard``."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._monitor.close(0)
        self.socket.close(0 if discard else None)
        self._context.term()
