"""The hub's socket: a ZeroMQ ROUTER with CURVE keys made for one run.

Every message is one small JSON object. Both ends authenticate, the server by its key, the tasks by a key pair from
Spark's closure, so a stranger can neither read nor send messages (https://rfc.zeromq.org/spec/26).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from spark_hvd.engine.curve import ZapAuthenticator, url
from spark_hvd.runner.channel.examination import Examination
from spark_hvd.runner.channel.link import MAX_MESSAGE, HubAddress
from spark_hvd.runner.channel.messages import ASIDE, decode, decode_vitals
from spark_hvd.runner.channel.state import HubLogic, HubState, Message, Send
from spark_hvd.runner.channel.unauthenticated import UnauthenticatedConnections, require_descriptors
from spark_hvd.world.ports import PortRange, bound
from spark_hvd.world.vitals import Vitals

Listener = Callable[[int, "Message | Vitals | Examination"], None]
"""Gets the messages of a rank that need no decision: its vitals, the result of an examination, or a message, which is
"output" of complete lines ("out" or "err") or "profile" as StepProfiler sends it. Rank -1 means no particular rank. The
hub's thread calls it, so it must not block."""
_log = logging.getLogger(__name__)
_TICK_MS = 50
_MOST_A_TURN = 1000
"""Maximum number of messages before clock ticks and the driver's questions get a turn: ranks may print nonstop."""
_CONNECTIONS_EACH = 2
"""Connections per rank; the second one is for heartbeats."""
_HANDSHAKE_MS = 5000
"""Milliseconds that a new connection gets to authenticate; ZeroMQ's default is 30 s."""
_PATIENCE = 5.0
"""Seconds for the sockets to close, including up to one second to send queued messages."""
_CONFIRM_EVERY = 100
"""Number of a link's messages after which the hub confirms them, so that the link forgets them."""


@dataclass(slots=True)
class _LinkState:
    """The messages exchanged with one link, over however many connections."""

    received: int = 0  # the sequence number of the last one
    sent: list[bytes] = field(default_factory=list)


class HubServer:
    """Runs a hub's decisions behind a socket, in a separate thread.

    The first malformed message, or error of ours, ends the run: tasks are told to stop, and :attr:`failure` says why.
    ``public_host`` is the address that tasks connect to, if it differs from the one to listen on. The hub listens on
    one of ``ports``; None means any. ``listener`` gets the ranks' other messages; None ignores them.

    Raises:
        zmq.ZMQError: the address cannot be bound.
        OSError: No port of `ports` is free.
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
        self._links: dict[bytes, _LinkState] = {}  # by identity
        self.failure: RuntimeError | None = None
        """The error that ended this hub's work, which the driver's loop raises; None if there is none."""
        self._observes = True
        require_descriptors()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._unauthenticated = UnauthenticatedConnections(self._socket, _CONNECTIONS_EACH * state.most_ranks)
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._zap = ZapAuthenticator(self._context)
        self._zap.allow(client_public)
        try:
            self._socket.curve_server = True
            self._socket.curve_secretkey = server_secret
            self._socket.curve_publickey = server_public
            self._socket.ipv6 = ":" in bind_host
            self._socket.router_handover = True  # a link's new connection replaces one that only it knows to be dead
            self._socket.sndhwm = 0  # a ROUTER drops what exceeds it; tasks get few messages
            self._socket.linger = 1000
            self._socket.handshake_ivl = _HANDSHAKE_MS
            self._socket.maxmsgsize = MAX_MESSAGE
            bound(ports, lambda port: self._socket.bind(url(bind_host, port)))
            port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        except BaseException:
            self._release_sockets()
            raise
        self.address = HubAddress(public_host or bind_host, port, server_public, client_public, client_secret)
        self._thread = threading.Thread(target=self._serve, name="spark_hvd-hub", daemon=True)
        self._thread.start()

    def stop(self, reason: str) -> None:
        """Ask every rank to stop, and return at once."""
        self._ask(lambda: self._state.stop(reason))

    def examine(self, rank: int | None = None) -> None:
        """Let one rank's task, or all (None), examine its process and tell the listener. Returns at once."""
        self._ask(lambda: self._state.tell({"type": "examine"}, rank))

    def profile(self, rank: int, number: int, steps: int) -> None:
        """Let a rank profile its next ``steps``, and tell the listener in messages of this number. Returns at once."""
        self._ask(lambda: self._state.tell({"type": "profile", "number": number, "steps": steps}, rank))

    def wait_gone(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until no rank's process is left, as far as this hub knows; tell whether."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with self._lock:
                if self._state.all_gone:
                    return True
            time.sleep(0.02)
        return False

    def close(self) -> None:
        """Send queued messages, stop the thread, free the port. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(_PATIENCE)  # libzmq 4.3.5 may never end a context, see channel.CoordinatorSockets

    def _ask(self, question: Callable[[], list[Send]]) -> None:
        """Let the hub's thread query the state soon. Callable from any thread."""
        self._questions.append(question)

    def _release_sockets(self) -> None:
        self._unauthenticated.close()
        self._socket.close()
        self._zap.socket.close()
        self._context.term()

    def _serve(self) -> None:
        try:
            self._turn_until_closed()
        finally:
            self._release_sockets()

    def _turn_until_closed(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._unauthenticated.events, zmq.POLLIN)
        poller.register(self._zap.socket, zmq.POLLIN)
        while not self._closing.is_set():
            self._guarded(lambda: self._turn(poller))
        self._guarded(self._drain)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if self.failure is not None:
                _log.debug("the hub has failed again", exc_info=True)
                self._closing.wait(_TICK_MS / 1000)
                return
            _log.exception("the hub failed")
            self.failure = RuntimeError(
                f"the hub of this run failed ({type(error).__name__}: {error}) and all ranks were stopped. This is a "
                "bug in spark_hvd: please report it, with the traceback that the driver has logged."
            )
            self.failure.__cause__ = error
            self._stop_all()

    def _turn(self, poller: zmq.Poller) -> None:
        if poller.poll(_TICK_MS):
            self._zap.handle_requests()
            self._unauthenticated.process_events()
            self._drain()
        decisions: list[Send] = []
        with self._lock:
            while self._questions:  # before the clock tick, which may fail: a stop must get through
                decisions += self._questions.popleft()()
        self._send(decisions)
        with self._lock:
            decisions = self._state.tick(time.monotonic())
        self._send(decisions)

    def _drain(self) -> None:
        for _ in range(_MOST_A_TURN):
            try:
                received = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._unauthenticated.authenticated(int(received[0].get(zmq.SRCFD)))
            identity, *frames = [frame.bytes for frame in received]
            if frames == [b""]:  # ZeroMQ reports a new connection of a link
                self._resume(identity)
                continue
            try:
                message = decode(b"".join(frames[:1]), self._state.KINDS, self._state.senders)
            except ValueError as error:
                self._refuse(error)
            else:
                if self._is_next(identity, message.get("sequence")):
                    self._take(identity, message | {"payload": b"".join(frames[1:])})

    def _resume(self, identity: bytes) -> None:
        """Repeat all messages to a link that has connected, again or for the first time, and let it repeat its own.

        It ignores those that it has.
        """
        link = self._links.get(identity, _LinkState())
        for body in link.sent:
            self._socket.send_multipart([identity, body])
        self._confirm(identity, link.received, connected=True)

    def _confirm(self, identity: bytes, received: int, *, connected: bool) -> None:
        body = json.dumps({"type": "received", "sequence": received, "connected": connected}).encode()
        self._socket.send_multipart([identity, body])

    def _is_next(self, identity: bytes, sequence: int | None) -> bool:
        """Tell whether to take a message; otherwise we have it, or its link will repeat it after an earlier one."""
        if sequence is None:
            return True
        if identity.startswith(b"\0"):  # ZeroMQ has renamed the rest of a connection that a new one replaced
            return False
        link = self._links.setdefault(identity, _LinkState())
        if sequence != link.received + 1:
            return False
        link.received = sequence
        if sequence % _CONFIRM_EVERY == 0:
            self._confirm(identity, sequence, connected=False)
        return True

    def _take(self, identity: bytes, message: Message) -> None:
        if message["type"] == "alive":  # arrives on a separate connection, see Heartbeat
            self._socket.send_multipart([identity, b'{"type": "alive"}'])
        if message["type"] in ASIDE:
            with self._lock:
                self._state.record_heartbeat(message["rank"], time.monotonic())
            self._pass_on(message)
            return
        if message["type"] == "hello":
            self._identities.setdefault(message["rank"], identity)
        with self._lock:
            decisions = self._state.handle(message, time.monotonic())
        if message["type"] == "hello" and any(decision.message["type"] == "refuse" for decision in decisions):
            self._post(identity, decisions[0].message)
        else:
            self._send(decisions)

    def _refuse(self, error: ValueError) -> None:
        """Fail because of a malformed message: nothing else from that task can be relied on."""
        if self.failure is None:
            self.failure = RuntimeError(
                f"the driver got a malformed message and all ranks were stopped: {error}. The usual reason is that "
                "driver and executors have different versions of spark_hvd: install the same one everywhere."
            )
            self._stop_all()

    def _stop_all(self) -> None:
        self.stop("the hub failed")
        # Also without the state machine, in which the bug may be. A second message to a task does no harm.
        self._send([Send(rank, self._state.FAREWELL) for rank in self._identities])

    def _pass_on(self, message: Message) -> None:
        """Tell the listener; its errors do not end the run."""
        if self._listener is None:
            return
        try:
            news: Message | Vitals | Examination = message
            if message["type"] == "vitals":
                news = decode_vitals(message["vitals"], self._state.most_ranks)
            elif message["type"] == "examined":
                news = Examination(message["cpu"], message["status"], message["stacks"])
            self._listener(message["rank"], news)
        except Exception as error:
            level = logging.WARNING if self._observes else logging.DEBUG
            self._observes = False
            _log.log(level, "the messages of rank %d cannot be shown (%s); the run continues", message["rank"], error)

    def _send(self, decisions: list[Send]) -> None:
        for decision in decisions:
            _log.debug("hub -> rank %d: %s", decision.rank, decision.message)
            self._post(self._identities[decision.rank], decision.message)

    def _post(self, identity: bytes, message: Message) -> None:
        link = self._links.setdefault(identity, _LinkState())
        link.sent.append(json.dumps({**message, "sequence": len(link.sent) + 1}).encode())
        self._socket.send_multipart([identity, link.sent[-1]])


class Hub(HubServer):
    """The hub of a static run; see :class:`HubServer`."""

    _state: HubState

    def snapshot(self) -> tuple[set[int], list[int]]:
        """Return the ranks that have said hello, and those that have failed, in the order heard."""
        with self._lock:
            return set(self._state.attempts), list(self._state.failed)

    def values(self) -> dict[int, bytes]:
        """Return the pickled values, by rank, that ranks sent to the hub instead of Spark."""
        with self._lock:
            return dict(self._state.values)

    @property
    def lost(self) -> str | None:
        """Ranks that have gone silent, with their hosts and for how long; None if there are none."""
        with self._lock:
            return self._state.describe_lost() if self._state.lost else None

    @property
    def fell_back(self) -> bool:
        """Whether some tasks could not reach this hub, so that all ranks meet at rank 0's hub instead."""
        return self._state.fell_back
