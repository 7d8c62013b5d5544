"""What is known of a run in one world: rates, shares, remaining time, the slowest rank, ranks that report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.vitals import PendingCollective, Vitals
from tests.trained_ranks import Training


def test_before_anything_is_heard_all_ranks_are_starting() -> None:
    snapshot = RunView("train", 3, 10.0).snapshot(12.0)
    assert [row.started for row in snapshot.rows] == [False] * 3
    assert snapshot.seconds == 2.0
    assert snapshot.remaining is None
    assert snapshot.samples_per_second is None
    assert snapshot.slowest is None


def test_rates_and_shares() -> None:
    training = Training()
    training.go_on(30)
    snapshot = training.view.snapshot(training.now)
    row = snapshot.rows[2]
    assert row.steps_per_second == pytest.approx(10)
    assert row.samples_per_second == pytest.approx(320)
    assert row.data == pytest.approx(0.1)
    assert row.communication == pytest.approx(0.2)
    assert row.compute == pytest.approx(0.7)
    assert row.cpu == pytest.approx(1.5)
    assert (row.epoch, row.epochs, row.step, row.steps) == (3, 10, 0, 100)
    assert list(row.metrics) == ["loss", "accuracy"]
    assert snapshot.samples_per_second == pytest.approx(1280)
    assert snapshot.steps_per_second == pytest.approx(10)
    assert (snapshot.data, snapshot.communication) == (pytest.approx(0.1), pytest.approx(0.2))
    assert snapshot.samples == 4 * 300 * 32
    assert snapshot.slowest is None


def test_rates_are_those_of_the_last_seconds() -> None:
    training = Training(step_seconds=0.1)
    training.go_on(60)
    training.work = {rank: seconds * 5 for rank, seconds in training.work.items()}
    training.step_seconds = 0.5  # as many steps as before, from now on five times slower
    training.go_on(12)
    assert training.view.snapshot(training.now).rows[0].steps_per_second == pytest.approx(2)


def test_one_record_is_not_enough_for_a_rate() -> None:
    training = Training()
    training.go_on(1)
    assert training.view.snapshot(training.now).rows[0].steps_per_second is None
    training.go_on(1)
    assert training.view.snapshot(training.now).rows[0].steps_per_second == pytest.approx(10)


def test_long_steps_have_a_steady_rate() -> None:
    training = Training(step_seconds=30.0)
    training.go_on(100)
    for _ in range(60):
        training.go_on(1)
        assert training.view.snapshot(training.now).rows[0].steps_per_second == pytest.approx(1 / 30)


def test_a_rate_falls_to_nothing_when_nothing_moves() -> None:
    training = Training()
    training.go_on(30)
    training.still = True
    training.go_on(6)
    halved = training.view.snapshot(training.now).rows[0].steps_per_second
    assert halved is not None
    assert 2 < halved < 8
    training.go_on(6)
    snapshot = training.view.snapshot(training.now)
    assert snapshot.rows[0].steps_per_second == 0
    assert snapshot.samples_per_second == 0


def test_without_progress_there_is_communication_only() -> None:
    training = Training(changes=lambda rank: {"stage": "", "total_steps": 0, "samples": 0, "data_seconds": 0.0})
    training.go_on(20)
    snapshot = training.view.snapshot(training.now)
    row = snapshot.rows[0]
    assert row.communication == pytest.approx(0.2)
    assert row.data is None
    assert row.compute is None
    assert row.steps_per_second is None
    assert row.cpu == pytest.approx(1.5)
    assert snapshot.remaining is None


def test_steps_that_are_counted_by_hand_tell_nothing_of_data() -> None:
    training = Training(data=lambda rank: 0.0)
    training.go_on(20)
    row = training.view.snapshot(training.now).rows[0]
    assert row.data is None
    assert row.compute == pytest.approx(0.8)


# ---- what is left ----------------------------------------------------------------------------------------------------


def test_what_is_left_of_all_epochs() -> None:
    training = Training(step_seconds=0.1, steps=100, epochs=10)  # 100 s
    seen = []
    for _ in range(99):
        training.go_on(1)
        remaining = training.view.snapshot(training.now).remaining
        if training.now <= 3:
            assert remaining is None
        if remaining is not None:
            assert remaining.whole
            seen.append(remaining.seconds + training.now)
    assert len(seen) > 90
    assert all(end == pytest.approx(100, abs=1) for end in seen)


def test_what_is_left_counts_what_comes_between_epochs() -> None:
    view, now, done = RunView("train", 1, 0.0), 0.0, 0
    for epoch in range(6):  # of 10, each with 20 s and a validation of 10
        for second in range(20):
            now, done = now + 1, done + 5
            view.take(_alone(now, epoch=epoch, epochs=10, step=5 * second + 5, steps=100, total_steps=done), now)
        for second in range(10):
            now, done = now + 1, done + 5
            facts = {"stage": "validation", "step": second, "steps": 10, "total_steps": done}
            view.take(_alone(now, epoch=epoch, epochs=10, **facts), now)
    remaining = view.snapshot(now).remaining
    assert remaining is not None
    assert remaining.seconds == pytest.approx(4 * 30, abs=10)  # the last validation is not predicted


def test_what_is_left_of_a_loop_if_others_may_follow() -> None:
    view = RunView("train", 1, 0.0)
    for second in range(1, 11):
        view.take(_alone(second, step=second, steps=40, total_steps=second), second)
    first = view.snapshot(10).remaining
    assert first is not None
    assert first.whole
    assert first.seconds == pytest.approx(30)
    for second in range(11, 21):  # the loop ended, and another one begins
        view.take(_alone(second, step=second - 10, steps=40, total_steps=second), second)
    second_loop = view.snapshot(20).remaining
    assert second_loop is not None
    assert not second_loop.whole
    assert second_loop.seconds == pytest.approx(30)


@pytest.mark.parametrize("facts", [{"steps": None}, {"steps": 0}, {"steps": 5, "step": 9, "total_steps": 9}])
def test_what_is_left_is_unknown(facts: dict[str, Any]) -> None:
    view = RunView("train", 1, 0.0)
    for second in range(1, 20):
        view.take(_alone(second, **{"step": second, "total_steps": second, **facts}), second)
    assert view.snapshot(20).remaining is None


def test_a_long_first_step_does_not_spoil_what_is_left() -> None:
    view = RunView("train", 1, 0.0)
    for second in range(1, 111):
        done = max(0, second - 100)
        view.take(_alone(second, step=done, steps=60, total_steps=done), second)
    remaining = view.snapshot(110).remaining
    assert remaining is not None
    assert remaining.seconds == pytest.approx(50)


def _alone(now: float, **facts: Any) -> Vitals:
    return replace(Vitals(rank=0, size=1, generation=0, clock=900 + now, stage="train", entered=int(now)), **facts)


# ---- the slowest rank ------------------------------------------------------------------------------------------------


def test_the_slowest_rank_is_the_one_that_waits_least() -> None:
    training = Training(size=8, comm=lambda rank: 0.05 if rank == 5 else 0.4)
    training.go_on(3)
    assert training.view.snapshot(training.now).slowest is None  # too early to tell
    training.go_on(20)
    snapshot = training.view.snapshot(training.now)
    assert snapshot.slowest is not None
    assert snapshot.slowest.rank == 5
    assert snapshot.slowest.skew == pytest.approx(0.95 / 0.6)
    assert [row.rank for row in snapshot.rows if row.skew is not None] == [5]


def test_of_two_ranks_the_slower_one_is_compared_with_the_faster() -> None:
    training = Training(size=2, comm=lambda rank: 0.5 if rank else 0.0)
    training.go_on(20)
    slowest = training.view.snapshot(training.now).slowest
    assert slowest is not None
    assert slowest.rank == 0
    assert slowest.skew == pytest.approx(2)


@pytest.mark.parametrize(
    ("comm", "why"),
    [
        (lambda rank: 0.3, "all are alike"),
        (lambda rank: 0.25 if rank == 1 else 0.3, "7 % more are not worth a word"),
        (lambda rank: 0.88 if rank == 1 else 0.9, "20 % more, but the others wait for 2 % of a step because of it"),
    ],
)
def test_no_rank_is_called_slow_for_nothing(comm: Callable[[int], float], why: str) -> None:
    training = Training(comm=comm)
    training.go_on(20)
    assert training.view.snapshot(training.now).slowest is None, why


def test_a_slow_rank_is_found_without_progress() -> None:
    training = Training(
        comm=lambda rank: 0.0 if rank == 2 else 0.5, changes=lambda rank: {"stage": "", "total_steps": 0}
    )
    training.go_on(20)
    slowest = training.view.snapshot(training.now).slowest
    assert slowest is not None
    assert slowest.rank == 2


def test_a_slow_rank_is_found_where_nobody_waits_for_it() -> None:
    training = Training(comm=lambda rank: 0.0)
    training.changes = lambda rank: {} if rank != 1 else {"total_steps": int(training.work[1] / 0.2)}
    training.go_on(20)
    slowest = training.view.snapshot(training.now).slowest
    assert slowest is not None
    assert (slowest.rank, slowest.skew) == (1, pytest.approx(2))


# ---- who is heard of -------------------------------------------------------------------------------------------------


def test_a_rank_that_is_not_heard_of_is_silent() -> None:
    training = Training()
    training.go_on(10)
    training.go_on(3, range(3))
    assert training.view.snapshot(training.now).rows[3].silent is None
    training.go_on(1, range(3))
    snapshot = training.view.snapshot(training.now)
    assert snapshot.rows[3].silent == pytest.approx(4)
    assert [row.silent for row in snapshot.rows[:3]] == [None] * 3
    assert snapshot.slowest is None


def test_a_rank_that_has_ended_is_not_silent() -> None:
    training = Training()
    training.go_on(10)
    training.view.ended(3)
    training.go_on(10, range(3))
    snapshot = training.view.snapshot(training.now)
    assert snapshot.rows[3].ended
    assert snapshot.rows[3].silent is None
    assert snapshot.samples_per_second == pytest.approx(3 * 320)
    for rank in range(3):
        training.view.ended(rank)
    assert training.view.snapshot(training.now).samples_per_second == pytest.approx(4 * 320)  # as it was at the end
    training.generation = 1  # it had only left its world
    training.go_on(1)
    assert not training.view.snapshot(training.now).rows[3].ended


def test_what_a_rank_waits_for() -> None:
    waiting = {
        0: {"pending": (PendingCollective("allreduce 'loss'", 12.4), PendingCollective("broadcast 'x'", 3.2))},
        1: {"fetching": 7.0},
        2: {"pending": (PendingCollective("allreduce 'loss'", 0.4),), "fetching": 0.1},
    }
    training = Training(size=3, changes=lambda rank: waiting[rank])
    training.go_on(2)
    rows = training.view.snapshot(training.now).rows
    assert [row.waits for row in rows] == ["in allreduce 'loss' for 12 s", "waits for a batch for 7 s", ""]


def test_a_verdict_is_shown_until_it_is_taken_back() -> None:
    view = RunView("train", 2, 0.0)
    view.mark("rank 1 never entered allreduce 'loss'")
    assert view.snapshot(1.0).verdict == "rank 1 never entered allreduce 'loss'"
    view.mark(None)
    assert view.snapshot(1.0).verdict is None
