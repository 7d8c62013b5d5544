"""Sockets that are closed while their peers leave delay nobody, and leave nothing behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import zmq

from spark_hvd.engine import channel
from spark_hvd.engine.channel import CoordinatorSockets, MemberSockets
from spark_hvd.engine.curve import Keys
from spark_hvd.runner.channel.hub import Hub
from spark_hvd.runner.channel.state import HubState
from tests.conftest import wait_until

KEYS = Keys.of(bytes(32))
MEMBERS = 3


def all_leave_at_once() -> None:
    """A coordinator and its members close their sockets within 2 ms, and end their contexts."""
    context = zmq.Context()
    coordinator = CoordinatorSockets(context, "127.0.0.1", KEYS)
    members = []
    for place in range(MEMBERS):
        own = zmq.Context()
        members.append((own, MemberSockets(own, coordinator.endpoints, place, KEYS, 10.0)))
    come: list[tuple[int, bool]] = []
    while len(come) < MEMBERS:
        assert coordinator.decisions.poll(10_000)
        come += filter(None, [coordinator.presence()])
    start = threading.Barrier(1 + MEMBERS)

    def leave(own: zmq.Context[zmq.Socket[bytes]], last_words: Callable[[], None], close: Callable[[], None]) -> None:
        start.wait()
        time.sleep(random.random() * 0.002)
        last_words()
        close()
        own.term()

    leavers = [threading.Thread(target=leave, args=(context, lambda: coordinator.send([]), coordinator.close))]
    for own, member in members:
        leavers.append(
            threading.Thread(target=leave, args=(own, lambda member=member: member.send(b"[]"), member.close))
        )
    for leaver in leavers:
        leaver.daemon = True
        leaver.start()
    for leaver in leavers:
        leaver.join(20)
        assert not leaver.is_alive(), "a context does not end"


@pytest.mark.slow
def test_every_context_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "CLOSE_GRACE_SECONDS", 20.0)
    for _ in range(300):  # ten of them fail if the coordinator does not wait for members to leave
        all_leave_at_once()


def test_a_coordinator_waits_for_a_moment_only() -> None:
    context, own = zmq.Context(), zmq.Context()
    coordinator = CoordinatorSockets(context, "127.0.0.1", KEYS)
    member = MemberSockets(own, coordinator.endpoints, 7, KEYS, 10.0)
    assert coordinator.decisions.poll(10_000)
    assert coordinator.presence() == (7, True)
    began = time.monotonic()
    coordinator.close()
    context.term()
    assert time.monotonic() - began > 0.25
    wait_until(member.lost)
    member.close()
    own.term()


def test_a_hub_whose_context_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_hvd.runner.channel.hub._PATIENCE", 0.2)
    hub = Hub(HubState(1), "127.0.0.1")
    # libzmq does this by itself now and then; an open socket does it always.
    with hub._context.socket(zmq.PUSH):
        hub.close()
    hub._thread.join(10)
    assert not hub._thread.is_alive()
