"""The hub decides, without a socket or a clock, which rank is silent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_hvd.runner.channel.liveness import HEARTBEAT_SECONDS, HUB_PATIENCE, SILENT_AFTER, LivenessTracker, describe
from spark_hvd.runner.channel.state import HubState, Send

TICK = 0.05


class Run:
    """A hub of ranks that report every second that they are alive, on a clock that the test controls."""

    def __init__(self, size: int, *, per_host: int = 1, beside_hub: bool = False) -> None:
        self.state = HubState(size)
        self.now = 1000.0
        self.decisions: list[Send] = []
        self.alive = set(range(size))
        self.next_beat = {rank: self.now + rank / size for rank in range(size)}
        for rank in range(size):
            host = None if beside_hub else f"10.0.0.{rank // per_host}"
            self.tell({"type": "hello", "rank": rank, "attempt": rank, "host": host})
        for rank in range(size):
            self.tell({"type": "ready", "rank": rank, "port": 4000 if rank == 0 else None})

    def tell(self, message: dict[str, object]) -> list[Send]:
        new = self.state.handle(message, self.now)
        self.decisions += new
        return new

    def go_on(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            for rank in self.alive:
                if self.now >= self.next_beat[rank]:
                    self.next_beat[rank] = self.now + HEARTBEAT_SECONDS
                    self.tell({"type": "alive", "rank": rank})
            self.decisions += self.state.tick(self.now)

    @property
    def stops(self) -> list[Send]:
        return [decision for decision in self.decisions if decision.message["type"] == "stop"]


def test_ranks_that_are_heard_of_are_left_alone() -> None:
    run = Run(4)
    run.go_on(1000)
    assert run.stops == []
    assert run.state.lost == {}


def test_a_silent_rank_stops_all_and_is_named_with_host_and_time() -> None:
    run = Run(3)
    run.go_on(10)
    run.alive.remove(2)
    run.go_on(SILENT_AFTER - HEARTBEAT_SECONDS - 2 * TICK)
    assert run.stops == []
    run.go_on(HEARTBEAT_SECONDS + 4 * TICK)
    assert [decision.rank for decision in run.stops] == [0, 1, 2]
    assert run.stops[0].message["reason"] == "lost"
    assert run.stops[0].message["lost"] == "rank 2 on 10.0.0.2 (last heard 7.0 s ago)"


def test_all_ranks_of_a_host_are_named_together() -> None:
    run = Run(6, per_host=3)
    run.go_on(10)
    run.alive -= {3, 4, 5}
    run.go_on(SILENT_AFTER + 1)
    assert set(run.state.lost) == {3, 4, 5}
    assert run.stops[0].message["lost"] == "ranks 3, 4, 5 on 10.0.0.1 (last heard 7.0 s ago)"


def test_anything_that_a_rank_sends_is_a_sign_of_life() -> None:
    run = Run(2)
    run.go_on(2)
    run.alive.remove(1)
    for _ in range(5):
        run.go_on(SILENT_AFTER - 2 * HEARTBEAT_SECONDS)
        run.state.record_heartbeat(1, run.now)  # output, which the hub does not pass to its state
    assert run.stops == []


def test_a_rank_that_vanishes_right_after_its_hello_is_lost() -> None:
    run = Run(2)
    run.alive.remove(1)
    run.go_on(SILENT_AFTER + 1)
    assert set(run.state.lost) == {1}


def test_ranks_beside_their_hub_are_not_waited_for() -> None:
    run = Run(2, beside_hub=True)
    run.alive.clear()
    run.go_on(100)
    assert run.stops == []


def test_ranks_that_have_gone_are_not_waited_for() -> None:
    run = Run(2)
    run.go_on(5)
    for rank in range(2):
        run.tell({"type": "ended", "rank": rank, "ok": True, "echo": False, "bytes": 1})
        run.tell({"type": "gone", "rank": rank})
        run.tell({"type": "alive", "rank": rank})  # in transit on another connection
    run.alive.clear()
    run.go_on(100)
    assert run.stops == []


def test_a_rank_that_vanishes_before_its_value_has_arrived_is_lost() -> None:
    run = Run(2)
    run.go_on(5)
    for rank in range(2):
        run.tell({"type": "ended", "rank": rank, "ok": True, "echo": False, "bytes": 1})
    run.tell({"type": "gone", "rank": 0})
    run.alive.clear()
    run.go_on(SILENT_AFTER + 1)
    assert set(run.state.lost) == {1}
    assert run.state.all_gone, "nobody waits for the process of a rank that cannot be heard"


def test_silence_after_an_echo_is_still_found() -> None:
    run = Run(2)
    run.go_on(5)
    run.alive.remove(1)
    run.tell({"type": "ended", "rank": 0, "ok": False, "echo": True})
    run.go_on(3)
    assert run.stops[0].message["reason"] == "peer"
    run.go_on(SILENT_AFTER)
    assert set(run.state.lost) == {1}


def test_a_hub_that_was_suspended_blames_nobody() -> None:
    run = Run(3)
    run.go_on(10)
    run.now += 3600.0  # nothing was read meanwhile
    run.decisions += run.state.tick(run.now)
    run.go_on(10)
    assert run.stops == []
    run.alive.remove(1)
    run.go_on(SILENT_AFTER + 1)
    assert set(run.state.lost) == {1}


def test_ranks_that_fell_back_are_none_of_this_hubs_business() -> None:
    state = HubState(2, may_fall_back=True)
    state.handle({"type": "hello", "rank": 0, "attempt": 0, "host": "a"}, 0.0)
    state.handle({"type": "alive", "rank": 0}, 0.0)
    now = 0.0
    while now < 60:
        now += TICK
        if now < 11:
            state.handle({"type": "alive", "rank": 0}, now)
        state.tick(now)
    assert state.fell_back
    assert state.lost == {}


def test_one_hosts_ranks_stand_next_to_each_other_in_the_message() -> None:
    hosts = {0: "a", 1: "a", 2: "b"}
    assert describe({2: 7.1, 0: 7.0, 1: 6.2}, hosts) == (
        "ranks 0, 1 on a (last heard 7.0 s ago); rank 2 on b (last heard 7.1 s ago)"
    )


def test_a_task_is_more_patient_than_the_hub() -> None:
    assert SILENT_AFTER + 20 < HUB_PATIENCE


@given(
    naps=st.lists(st.tuples(st.floats(0.05, 5.0), st.floats(0.0, 100.0)), max_size=20),
    dies=st.floats(0.0, 50.0),
)
def test_silence_counts_the_listeners_waking_time_only(naps: list[tuple[float, float]], dies: float) -> None:
    """However the hub sleeps, a peer counts as silent no longer than the hub was awake since then, and is found."""
    silences, now, awake_since_heard = LivenessTracker(), 0.0, 0.0
    silences.record_heartbeat(0, now)
    silences.tick(now)
    for awake, nap in naps:
        end = now + awake
        while now < end:
            now += TICK
            awake_since_heard += TICK
            silences.tick(now)
            if now < dies:
                silences.record_heartbeat(0, now)
                awake_since_heard = 0.0
        now += nap
        awake_since_heard += min(nap, 1.0)  # a pause of up to a second cannot be told from work
        silences.tick(now)
        assert silences.expired(0.0, now).get(0, 0.0) <= awake_since_heard + 1e-6
    for _ in range(int((SILENT_AFTER + 1) / TICK)):
        now += TICK
        silences.tick(now)
    assert 0 in silences.expired(SILENT_AFTER, now)
