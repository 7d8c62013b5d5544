"""A task's link and its hub get every message that decides something, and get it once, whatever breaks between them."""

from __future__ import annotations

import math
import random
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import zmq

from spark_hvd.runner.channel.hub import Hub, HubServer
from spark_hvd.runner.channel.link import Link
from spark_hvd.runner.channel.state import HubState
from spark_hvd.runner.elastic.hub import ElasticState
from spark_hvd.runner.elastic.membership.events import Limits
from tests.conftest import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")
_RESET = struct.pack("ii", 1, 0)


class Relay:
    """Passes connections on to a port of this machine, until told otherwise.

    Attributes:
        connections: Number of connections so far.
        swallows: Whether the connections have gone dead: what is sent over them is lost, and neither end is told.
        swallowed: The ends (0 is the one that connects) whose data was lost that way.
        passed: Number of bytes passed on so far.
        reset_at: Number of bytes after which all connections are reset, once.
        half: Whether only the ends that connect are told of a reset.
    """

    def __init__(self, port: int) -> None:
        self.connections, self.passed, self.reset_at = 0, 0, 1 << 60
        self.swallows = self.half = False
        self.swallowed: set[int] = set()
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._open: list[socket.socket] = []  # the other ends of connections that were half reset
        self._resets, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def reset(self) -> None:
        """Reset all connections, and wait for that."""
        self._resets.set()
        wait_until(lambda: not self._resets.is_set())

    def close(self) -> None:
        """End all connections and the thread."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.is_set():
            for key, _ in self._selector.select(0.01):
                if key.data is None:
                    self._accept()
                else:
                    self._pass_on(*key.data)
            if self._resets.is_set() or self.passed > self.reset_at:
                self.reset_at = 1 << 60
                self._reset_all()
                self._resets.clear()
        self.half = False
        self._reset_all()
        self._selector.close()
        for each in (*self._open, self._listener):
            each.close()

    def _accept(self) -> None:
        pair = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._target))
        self._pairs.append(pair)
        for end in (0, 1):
            self._selector.register(pair[end], selectors.EVENT_READ, (pair, end))
        self.connections += 1
        self.swallows = False

    def _pass_on(self, pair: tuple[socket.socket, socket.socket], end: int) -> None:
        try:
            data = pair[end].recv(1 << 16)
            if data and self.swallows:
                self.swallowed.add(end)
            elif data:
                pair[1 - end].sendall(data)
                self.passed += len(data)
        except OSError:
            data = b""
        if not data:
            self._reset(pair)

    def _reset_all(self) -> None:
        for pair in self._pairs.copy():
            self._reset(pair)

    def _reset(self, pair: tuple[socket.socket, socket.socket]) -> None:
        if pair in self._pairs:
            self._pairs.remove(pair)
            for each in pair:
                self._selector.unregister(each)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            pair[0].close()
            if self.half:
                self._open.append(pair[1])
            else:
                pair[1].close()


@pytest.fixture(params=["static", "elastic"])
def hub(request: pytest.FixtureRequest) -> Iterator[HubServer]:
    limits = Limits(num_proc=2, min_num_proc=1, max_num_proc=2)
    server = HubServer(HubState(2) if request.param == "static" else ElasticState(limits), "127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def static() -> Iterator[Hub]:
    server = Hub(HubState(2), "127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The messages that static hubs get from now on: rank and type."""
    found: list[tuple[int, str]] = []
    handle = HubState.handle

    def note(self: HubState, message: dict[str, Any], now: float) -> Any:
        found.append((message["rank"], message["type"]))
        return handle(self, message, now)

    monkeypatch.setattr(HubState, "handle", note)
    return found


def linked(hub: HubServer, rank: int, port: int, *, beats: bool = False) -> Link:
    link = Link(replace(hub.address, port=port), rank, "h" if beats else None)
    assert link.wait_connected(10.0)
    if beats:
        link.hello(7, task=rank)
    else:
        link.send("hello", attempt=7, host="h", task=rank)
    wait_until(lambda: rank in hub._identities)
    return link


def types_until(link: Link, *last: str) -> list[str]:
    """Receive messages until one has a type of ``last``, and return their types."""
    types: list[str] = []

    def done() -> bool:
        types.extend(message["type"] for message in iter(link.receive, None))
        return bool({*last} & {*types})

    wait_until(done)
    return types


@pytest.mark.parametrize("half", [False, True])
def test_a_link_hears_its_hub_after_its_connection_was_reset(hub: HubServer, half: bool) -> None:
    relay = Relay(hub.address.port)
    relay.half = half
    link = linked(hub, 0, relay.port)
    try:
        relay.reset()
        wait_until(lambda: relay.connections == 2)
        hub.stop("peer")
        types_until(link, "stop", "end")
    finally:
        link.close()
        relay.close()


def test_what_is_lost_with_a_connection_is_repeated(static: Hub, handled: list[tuple[int, str]]) -> None:
    relay = Relay(static.address.port)
    link, other = linked(static, 0, relay.port), linked(static, 1, static.address.port)
    try:
        assert types_until(link, "met") == ["met"]
        link.send("ready", store=["h", 1])
        wait_until(lambda: static._state.ready)
        relay.swallows = True
        link.send("ended", ok=True, bytes=1)
        other.send("ready", store=None)
        wait_until(lambda: relay.swallowed == {0, 1})
        relay.reset()
        static.stop("peer")
        assert types_until(link, "stop") == ["go", "stop"]
        wait_until(lambda: static._state.ended_ok)
        link.send("gone")
        wait_until(lambda: static._state.gone)
    finally:
        for each in (link, other):
            each.close()
        relay.close()
    assert [type_ for rank, type_ in handled if rank == 0] == ["hello", "ready", "ended", "gone"]


def test_every_message_arrives_once_and_in_order_whenever_connections_break(static: Hub) -> None:
    relay, dice = Relay(static.address.port), random.Random(16)
    link = linked(static, 0, relay.port)
    got: list[int] = []

    def arrived(count: int) -> bool:
        got.extend(message["number"] for message in iter(link.receive, None))
        return len(got) >= count

    try:
        for number in range(300):
            link.send("relay", to=0, body={"type": "proxy", "number": number})  # comes back
            relay.swallows = relay.swallows or dice.random() < 0.05
            if dice.random() < 0.04:
                relay.half = dice.random() < 0.5
                relay.reset()
            if dice.random() < 0.5:
                arrived(0)
        relay.reset()
        wait_until(lambda: arrived(300))
        assert relay.connections > 8
        wait_until(lambda: static._links[static._identities[0]].received == 301)
    finally:
        link.close()
        relay.close()
    assert got == [*range(300)]
    assert len(link._sent) <= 100, "it keeps what the hub has"


def test_a_value_whose_connection_breaks_arrives(static: Hub) -> None:
    relay = Relay(static.address.port)
    link = linked(static, 0, relay.port)
    try:
        value = bytes(range(256)) * (12 << 12)
        relay.reset_at = relay.passed + len(value) // 2
        assert link.hand_over(value)
        assert relay.connections == 2
        assert static.values() == {0: value}
    finally:
        link.close()
        relay.close()


def test_what_decides_waits_for_a_slow_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = threading.Event()
    got: list[str] = []
    drain, take = hub._drain, hub._take

    def note(identity: bytes, message: dict[str, Any]) -> None:
        got.append(message["type"])
        take(identity, message)

    link = linked(hub, 0, hub.address.port, beats=True)
    monkeypatch.setattr(hub, "_drain", lambda: reads.wait(30) and drain())
    monkeypatch.setattr(hub, "_take", note)
    while link.socket.poll(300, zmq.POLLOUT):
        link.try_send("output", stream="out", text="x" * 1000)
    link.socket.sndtimeo = 10
    sender = threading.Thread(target=link.send, args=["gone"], kwargs={"why": "the run is over"})
    sender.start()
    sender.join(0.3)  # if it does not wait, it has given up by then
    reads.set()
    sender.join()
    try:
        wait_until(lambda: "gone" in got)
    finally:
        link.close()


def test_a_link_without_heartbeats_gives_up_a_hub_that_has_gone(static: Hub) -> None:
    link = linked(static, 0, static.address.port)
    static.close()
    link.socket.sndtimeo = 10

    def given_up() -> bool:
        link.send("gone")  # ZeroMQ may still accept one for a connection whose end it has not seen
        return link.hub_silence() == math.inf

    wait_until(given_up)  # or its supervisor would wait for an answer for ever
    link.close()
