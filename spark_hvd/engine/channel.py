"""Carries requests to a process set's coordinator and its decisions to all members: ZeroMQ over TCP, without polling.

Members push requests to the coordinator's PULL socket and read decisions from its XPUB socket, which sends all of them
the same stream. Each member also subscribes to a topic of its own, which tells the coordinator when that member's
connection comes up and when it ends: ZeroMQ reports new and ended subscriptions. Its heartbeats, which do not need the
interpreter, detect peers that are stopped or cut off.

Everything is encrypted. Both sides prove who they are with CURVE keys derived from the world's secret; see
:mod:`spark_hvd.engine.curve`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence

import zmq
import zmq.utils.monitor

from spark_hvd.collectives.messages import Decision, decode, encode
from spark_hvd.engine.curve import Keys, send_heartbeats, url
from spark_hvd.world.errors import CollectiveError
from spark_hvd.world.ports import PortRange, bound

_HANDSHAKE_MS = 5000
MAX_MESSAGE = 64 << 20
"""Bytes. ZeroMQ allocates what a newcomer announces before it knows who that is; our messages are far smaller."""
_LINGER_MS = 1000
CLOSE_GRACE_SECONDS = 0.3
"""How long the coordinator waits for the last message of a member whose other connection has ended, and how long it
waits for members to leave when it ends itself."""
_NEVER_MS = 1 << 30
_EVERYONE = b"a"


class CoordinatorSockets:
    """The coordinator's end, used by one thread. ZeroMQ's ZAP handler decides who may connect.

    ``host`` is the address to listen on. ``ports`` are the ports to choose from; None: any.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], host: str, keys: Keys, ports: PortRange | None = None
    ) -> None:
        self.requests = context.socket(zmq.PULL)
        self.decisions = send_heartbeats(context.socket(zmq.XPUB))  # one of two is enough, and they are not free
        self.endpoints: list[str] = []
        self._connected: set[int] = set()
        for each in (self.requests, self.decisions):
            each.curve_server = True
            each.curve_secretkey, each.curve_publickey = keys.server_secret, keys.server_public
            _prepare(each, url(host, 0))
            bound(ports, lambda port, each=each: each.bind(url(host, port)))  # type: ignore[misc]
            each_endpoint = each.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(each_endpoint, bytes)
            self.endpoints.append(each_endpoint.rstrip(b"\0").decode())

    def send(self, decisions: Sequence[Decision]) -> None:
        """Publish a message to all members."""
        self.decisions.send(_EVERYONE + encode(decisions))

    def receive(self) -> bytes | None:
        """Return the next message of a member, or None."""
        return _received(self.requests)

    def presence(self) -> tuple[int, bool] | None:
        """Return the place of the next member that came or left, and whether it came; None if there is no news."""
        while (news := _received(self.decisions)) is not None:
            if news[1:2] == b"m":
                place, come = int(news[2:]), news[0] == 1
                (self._connected.add if come else self._connected.discard)(place)
                return place, come
        return None

    def close(self, deadline: float | None = None) -> None:
        """Send queued messages, for a second at most, and close.

        Members first have a moment to leave. If a socket is closed while a peer disconnects, libzmq 4.3.5 may never
        reap it, and its context stays forever, with threads and descriptors (in 3 of 100 worlds whose members all left
        within 2 ms, with or without CURVE and linger). ``deadline`` is on the monotonic clock; by default it is
        `CLOSE_GRACE_SECONDS` from now.
        """
        if deadline is None:
            deadline = time.monotonic() + CLOSE_GRACE_SECONDS
        while self._connected and self.decisions.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            self.presence()
        self.requests.close(0)
        self.decisions.close(_LINGER_MS)


class MemberSockets:
    """A member's end. One thread may send while another receives.

    ``place`` is this rank's in the process set. The connections must come up within ``timeout`` seconds.

    Raises:
        CollectiveError: The coordinator cannot be reached, or has another secret.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Sequence[str], place: int, keys: Keys, timeout: float
    ) -> None:
        self._disconnected = False
        self.requests = context.socket(zmq.PUSH)
        self.decisions = send_heartbeats(context.socket(zmq.SUB))
        news = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        self.losses = self.decisions.get_monitor_socket(news)
        reached = self.requests.get_monitor_socket(news)
        for each in (self.requests, self.decisions):
            each.curve_serverkey = keys.server_public
            each.curve_secretkey, each.curve_publickey = keys.member_secret, keys.member_public
            _prepare(each, endpoints[0])
        self.requests.reconnect_ivl = -1  # drop what is not sent when the connection ends
        self.decisions.subscribe(_EVERYONE)
        self.decisions.subscribe(b"m%d" % place)
        for each, endpoint in zip((self.requests, self.decisions), endpoints, strict=True):
            each.connect(endpoint)
        fault = _handshake_fault(zip((self.losses, reached), reversed(endpoints), strict=True), timeout)
        self.requests.disable_monitor()
        reached.close(0)
        if fault is not None:
            self.close()
            raise CollectiveError(f"the coordinator of the named collectives, at {fault}.")

    def send(self, message: bytes) -> None:
        """Send a request to the coordinator, from one thread at a time. It is lost if the coordinator is gone."""
        if self._disconnected:
            return
        with contextlib.suppress(zmq.Again):
            self.requests.send(message, zmq.NOBLOCK)

    def receive(self) -> list[Decision] | None:
        """Return the next decisions, or None."""
        message = _received(self.decisions)
        return None if message is None else decode(message[len(_EVERYONE) :])

    def lost(self) -> bool:
        """Return whether the connection has ended since the last call."""
        lost = False
        while self.losses.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self.losses, zmq.NOBLOCK)
            lost |= event["event"] == zmq.EVENT_DISCONNECTED
        self._disconnected |= lost
        return lost

    def close(self) -> None:
        """Send queued messages, for a moment at most, and close.

        Nothing is sent once the connection has ended: libzmq 4.3.5 may never reap a socket that lingers for it, and its
        context stays forever, with threads and descriptors (in 1 of 100 worlds whose coordinator was cut off).
        """
        self.decisions.disable_monitor()
        self.losses.close(0)
        self.decisions.close(0)
        self.requests.close(0 if self._disconnected else int(CLOSE_GRACE_SECONDS * 1000))


def _handshake_fault(connections: Iterable[tuple[zmq.Socket[bytes], str]], timeout: float) -> str | None:
    """Wait for all handshakes: a member that leaves during one is held up, and what was sent on it is lost.

    ``timeout`` is in seconds, for all of them together.

    Returns:
        The address of a connection that failed, and why; None if all came up.
    """
    deadline = time.monotonic() + timeout
    for monitor, endpoint in connections:
        if not monitor.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            return (
                f"{endpoint}, cannot be reached within {timeout:.0f} s: a firewall between the hosts may block the port"
            )
        if zmq.utils.monitor.recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return f"{endpoint}, turns this rank away: it has ended, or the ranks were started with different secrets"
    return None


def _prepare(each: zmq.Socket[bytes], address: str) -> None:
    each.ipv6 = "[" in address
    # A world that ends during a handshake waits for it, by default for up to 30 s.
    each.handshake_ivl = _HANDSHAKE_MS
    each.maxmsgsize = MAX_MESSAGE
    each.sndhwm = each.rcvhwm = 0  # never drop, never block: the names in flight bound the queue
    # A connection that ended means a lost rank. Not -1: that would also drop messages that have arrived unread.
    each.reconnect_ivl = _NEVER_MS


def _received(each: zmq.Socket[bytes]) -> bytes | None:
    # Asking first is cheaper than the exception that an empty socket raises.
    if not int(each.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        return None
    return each.recv(zmq.NOBLOCK)
