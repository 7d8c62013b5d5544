"""How requests reach a process set's coordinator and its decisions all members: ZeroMQ over TCP, encrypted, no polling.

Members push requests to the coordinator's PULL socket and read decisions from its XPUB socket, which gives all of them
the same stream. Every member subscribes to a topic of its own besides, so that the coordinator is told when a member's
connection comes up and when it ends: ZeroMQ reports subscriptions that appear and vanish, and its own heartbeats, which
need no help of the interpreter, find peers that are stopped or cut off.

Both sides prove who they are with CURVE keys that are derived from the world's secret (RFC 5869 explains why a keyed
hash gives independent keys; https://rfc.zeromq.org/spec/26 what CURVE does with them).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence

import zmq
import zmq.utils.monitor

from spark_hvd.collectives.messages import Decision, decode, encode
from spark_hvd.engine.curve import Keys, url
from spark_hvd.world.errors import CollectiveError
from spark_hvd.world.ports import PortRange, bound

_HEARTBEAT_MS = 1000
_HANDSHAKE_MS = 5000
MAX_MESSAGE = 64 << 20
"""Bytes. ZeroMQ sets aside what a newcomer announces before it knows who that is; no message of ours comes near it."""
_SILENCE_MS = 3000
"""A peer that does not even answer ZeroMQ's heartbeats for this long counts as gone."""
_LINGER_MS = 1000
CLOSE_GRACE_SECONDS = 0.3
"""Seconds that the coordinator waits for the last message of a member whose other connection has ended, and at its own
end for members to go."""
_NEVER_MS = 1 << 30
_EVERYONE = b"a"


class CoordinatorSockets:
    """The coordinator's end; it belongs to one thread. ZeroMQ's ZAP handler decides who is let in.

    ``host`` is the address to listen on, and ``ports`` are those to choose from; None: any.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], host: str, keys: Keys, ports: PortRange | None = None
    ) -> None:
        self.requests = context.socket(zmq.PULL)
        self.decisions = _watched(context.socket(zmq.XPUB))
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
        """The next message of a member, if there is one."""
        return _received(self.requests)

    def presence(self) -> tuple[int, bool] | None:
        """The next news of a member: its place, and whether it has come or gone."""
        while (news := _received(self.decisions)) is not None:
            if news[1:2] == b"m":
                place, come = int(news[2:]), news[0] == 1
                (self._connected.add if come else self._connected.discard)(place)
                return place, come
        return None

    def close(self, deadline: float | None = None) -> None:
        """Send what is queued, for a second at most, and close.

        First members have a moment to go: libzmq 4.3.5 may never reap a socket that is closed while a peer disconnects
        from it, so that its context, with threads and descriptors, stays for ever (3 in 100 times, if all leave within
        2 ms; with CURVE and linger or without). ``deadline`` is on the monotonic clock; by default the length of a
        farewell from now.
        """
        if deadline is None:
            deadline = time.monotonic() + CLOSE_GRACE_SECONDS
        while self._connected and self.decisions.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            self.presence()
        self.requests.close(0)
        self.decisions.close(_LINGER_MS)


class MemberSockets:
    """A member's end. One thread may send while another receives.

    ``place`` is mine in the process set. The connections have ``timeout`` seconds to come up.

    Raises:
        CollectiveError: The coordinator cannot be reached, or has another secret.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Sequence[str], place: int, keys: Keys, timeout: float
    ) -> None:
        self._disconnected = False
        self.requests = context.socket(zmq.PUSH)
        self.decisions = _watched(context.socket(zmq.SUB))
        news = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        self.losses = self.decisions.get_monitor_socket(news)
        reached = self.requests.get_monitor_socket(news)
        for each in (self.requests, self.decisions):
            each.curve_serverkey = keys.server_public
            each.curve_secretkey, each.curve_publickey = keys.member_secret, keys.member_public
            _prepare(each, endpoints[0])
        self.requests.reconnect_ivl = -1  # here what is not sent when the connection ends is to be dropped
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
        """Tell the coordinator; one thread at a time. Lost if the coordinator is gone."""
        if self._disconnected:
            return
        with contextlib.suppress(zmq.Again):
            self.requests.send(message, zmq.NOBLOCK)

    def receive(self) -> list[Decision] | None:
        """The next decisions, if there are any."""
        message = _received(self.decisions)
        return None if message is None else decode(message[len(_EVERYONE) :])

    def lost(self) -> bool:
        """Whether the connection has ended since it was last asked."""
        lost = False
        while self.losses.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self.losses, zmq.NOBLOCK)
            lost |= event["event"] == zmq.EVENT_DISCONNECTED
        self._disconnected |= lost
        return lost

    def close(self) -> None:
        """Send what is queued, for a moment at most, and close.

        Nothing is sent once the connection has ended: libzmq 4.3.5 may never reap a socket that lingers for it, so that
        its context, with threads and descriptors, stays for ever (of 100 coordinators that were cut off, with one).
        """
        self.decisions.disable_monitor()
        self.losses.close(0)
        self.decisions.close(0)
        self.requests.close(0 if self._disconnected else int(CLOSE_GRACE_SECONDS * 1000))


def _handshake_fault(connections: Iterable[tuple[zmq.Socket[bytes], str]], timeout: float) -> str | None:
    """Wait for handshakes, all of them: one that is under way holds up whoever leaves, and what was sent on it is lost.

    ``timeout`` is in seconds, for all together.

    Returns:
        The address of one that has failed, and why.
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
    # A world that ends in the middle of a handshake waits for it; ZeroMQ's own patience is 30 s.
    each.handshake_ivl = _HANDSHAKE_MS
    each.maxmsgsize = MAX_MESSAGE
    each.sndhwm = each.rcvhwm = 0  # never drop, never block: what is outstanding is bounded by the names in flight
    # A connection that ended is a rank that is gone. Not -1, which drops also what has come and was not read yet.
    each.reconnect_ivl = _NEVER_MS


def _watched(each: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """One of a member's two connections is enough to tell that it is gone, and heartbeats are not free."""
    each.heartbeat_ivl, each.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
    return each


def _received(each: zmq.Socket[bytes]) -> bytes | None:
    # Asking first is cheaper than the exception that an empty socket raises.
    if not int(each.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        return None
    return each.recv(zmq.NOBLOCK)
