"""The hub's decisions, without a socket or a clock."""

from __future__ import annotations

from typing import Any

import pytest

from spark_hvd.runner.channel.state import ECHO_GRACE, FALLBACK_AFTER, HubState, Send


def hello(rank: int, attempt: int | None = None) -> dict[str, object]:
    return {"type": "hello", "rank": rank, "attempt": rank + 100 if attempt is None else attempt}


def ended(rank: int, *, ok: bool, echo: bool = False, size: int = 1) -> dict[str, object]:
    return {"type": "ended", "rank": rank, "ok": ok, "echo": echo, "bytes": size}


def types(decisions: list[Send]) -> list[tuple[int, str]]:
    return [(decision.rank, decision.message["type"]) for decision in decisions]


@pytest.fixture
def met() -> HubState:
    state = HubState(3, timeout=50.0)
    for rank in range(3):
        state.handle(hello(rank), now=0.0)
    return state


@pytest.fixture
def going(met: HubState) -> HubState:
    for rank in (2, 1, 0):
        met.handle({"type": "ready", "rank": rank, "store": ("h", 4000) if rank == 0 else None}, now=1.0)
    return met


def test_met_goes_to_all_when_the_last_rank_says_hello() -> None:
    state = HubState(2)
    assert state.handle(hello(1), now=0.0) == []
    assert types(state.handle(hello(0), now=5.0)) == [(0, "met"), (1, "met")]


def test_go_carries_the_port_of_rank_0_and_waits_for_every_rank(met: HubState) -> None:
    assert met.handle({"type": "ready", "rank": 0, "store": ("h", 4000)}, now=1.0) == []
    assert met.handle({"type": "ready", "rank": 2, "store": None}, now=1.0) == []
    decisions = met.handle({"type": "ready", "rank": 1, "store": None}, now=1.0)
    assert [(d.rank, d.message) for d in decisions] == [(r, {"type": "go", "store": ("h", 4000)}) for r in range(3)]


def test_a_second_attempt_of_a_task_is_refused(going: HubState) -> None:
    decisions = going.handle(hello(1, attempt=999), now=2.0)
    assert decisions == [Send(1, {"type": "refuse", "first_attempt": 101})]


def test_all_are_released_together_when_the_last_has_ended(going: HubState) -> None:
    assert going.handle(ended(0, ok=True), now=2.0) == []
    assert going.handle(ended(2, ok=True), now=2.0) == []
    assert types(going.handle(ended(1, ok=True), now=3.0)) == [(0, "release"), (1, "release"), (2, "release")]


def test_a_failure_stops_all_at_once_and_names_the_culprit(going: HubState) -> None:
    decisions = going.handle(ended(2, ok=False), now=2.0)
    assert types(decisions) == [(0, "stop"), (1, "stop"), (2, "stop")]
    assert decisions[0].message == {"type": "stop", "reason": "peer", "culprit": 2}
    assert going.handle(ended(0, ok=False), now=2.1) == []  # only once


def test_an_echo_waits_for_its_cause(going: HubState) -> None:
    assert going.handle(ended(0, ok=False, echo=True), now=2.0) == []
    assert going.tick(2.0 + ECHO_GRACE / 2) == []
    assert types(going.handle(ended(1, ok=False), now=2.6)) == [(0, "stop"), (1, "stop"), (2, "stop")]
    assert going.failed == [0, 1]


def test_an_echo_without_a_cause_stops_all_after_the_grace(going: HubState) -> None:
    going.handle(ended(0, ok=False, echo=True), now=2.0)
    assert types(going.tick(2.0 + ECHO_GRACE)) == [(0, "stop"), (1, "stop"), (2, "stop")]


def test_the_timeout_counts_from_go(going: HubState) -> None:
    assert going.tick(50.9) == []
    decisions = going.tick(51.0)
    assert {d.message["reason"] for d in decisions} == {"timeout"}
    assert going.tick(60.0) == []


def test_no_timeout_once_all_have_ended(going: HubState) -> None:
    for rank in range(3):
        going.handle(ended(rank, ok=True), now=2.0)
    assert going.tick(1000.0) == []


def test_ranks_fall_back_when_one_cannot_reach_the_hub() -> None:
    state = HubState(2, may_fall_back=True)
    state.handle(hello(0), now=0.0)
    assert state.tick(FALLBACK_AFTER - 0.1) == []
    assert types(state.tick(FALLBACK_AFTER)) == [(0, "fallback")]
    assert types(state.handle(hello(1), now=FALLBACK_AFTER + 1)) == [(1, "fallback")]  # slow, not cut off


def test_nobody_falls_back_while_ranks_still_come() -> None:
    state = HubState(3, may_fall_back=True)
    state.handle(hello(0), now=0.0)
    state.handle(hello(1), now=FALLBACK_AFTER - 1)
    assert state.tick(FALLBACK_AFTER + 1) == []
    assert types(state.tick(2 * FALLBACK_AFTER)) == [(0, "fallback"), (1, "fallback")]


def test_no_fallback_once_all_have_met() -> None:
    state = HubState(1, may_fall_back=True)
    state.handle(hello(0), now=0.0)
    assert state.tick(FALLBACK_AFTER * 2) == []


def test_a_rank_that_comes_after_a_stop_is_stopped() -> None:
    state = HubState(2)
    state.handle(hello(0), now=0.0)
    assert types(state.stop("interrupt")) == [(0, "stop")]
    assert types(state.handle(hello(1), now=1.0)) == [(1, "stop")]


def test_values_too_large_for_spark_are_handed_to_the_hub() -> None:
    state = HubState(2, max_result_bytes=100)
    for rank in range(2):
        state.handle(hello(rank), now=0.0)
    state.handle(ended(0, ok=True, size=40), now=1.0)
    decisions = state.handle(ended(1, ok=True, size=61), now=1.0)
    assert [each.message for each in decisions] == [{"type": "release", "hand_over": True}] * 2

    def value(rank: int, part: int, payload: bytes) -> dict[str, Any]:
        return {"type": "value", "rank": rank, "part": part, "parts": 2, "payload": payload}

    assert state.handle(value(1, 0, b"ab"), now=2.0) == []
    assert state.handle(value(0, 0, b"x"), now=2.0) == []
    assert types(state.handle(value(1, 1, b"c"), now=2.0)) == [(1, "kept")]
    assert state.values == {1: b"abc"}


def test_values_that_spark_can_take_are_its_own() -> None:
    state = HubState(1, max_result_bytes=100)
    state.handle(hello(0), now=0.0)
    (release,) = state.handle(ended(0, ok=True, size=100), now=1.0)
    assert release.message == {"type": "release", "hand_over": False}


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("kind", ["examine", "profile"])
def test_a_rank_that_starts_is_asked_nothing(met: HubState, kind: str, rank: int | None) -> None:
    starting = HubState(2)
    starting.handle(hello(1), now=0.0)
    assert starting.tell({"type": kind}, rank) == []  # its task waits for "met"
    assert met.tell({"type": kind}, rank) == []  # its process waits for "go", or is not up yet
    for each in range(3):
        assert met.tell({"type": kind}, rank) == []
        met.handle({"type": "ready", "rank": each, "store": ("h", 4000) if each == 0 else None}, now=1.0)
    assert types(met.tell({"type": kind}, rank)) == [(each, kind) for each in range(3) if rank in (None, each)]
