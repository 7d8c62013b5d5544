"""What is known of a run: rates, shares, what is left, the slowest rank, worlds that follow each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from spark_hvd.runner.watch.snapshot import shown_rows
from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.vitals import Underway, Vitals


class Training:
    """Ranks that train together, told of once a second on a clock that the test turns.

    Args:
        size: Number of ranks.
        step_seconds: Of every rank: they wait for each other.
        steps: Of an epoch.
        epochs: Of all.
        comm: Share of the time that each rank waits for communication.
        data: Share of the time that it waits for data.
        changes: To the record of a rank.
    """

    def __init__(
        self,
        size: int = 4,
        step_seconds: float = 0.1,
        steps: int | None = 100,
        epochs: int | None = 10,
        comm: Callable[[int], float] = lambda rank: 0.2,
        data: Callable[[int], float] = lambda rank: 0.1,
        changes: Callable[[int], dict[str, Any]] = lambda rank: {},
    ) -> None:
        self.size, self.step_seconds, self.steps, self.epochs = size, step_seconds, steps, epochs
        self.comm, self.data, self.changes = comm, data, changes
        self.view = RunView(f"train on {size} ranks", size, 0.0)
        self.now = 0.0
        self.generation = 0
        self.work = dict.fromkeys(range(size), 0.0)  # seconds that each process has worked
        self.process = {rank: f"process {rank}" for rank in range(size)}
        self.still = False

    def record(self, rank: int) -> Vitals:
        seconds = self.work[rank]
        done = int(seconds / self.step_seconds + 1e-9)
        length = self.steps or 10**9
        record = Vitals(
            rank=rank,
            size=self.size,
            generation=self.generation,
            clock=5000.0 * rank + self.now,
            process=self.process[rank],
            entered=done,
            stage="train",
            epoch=None if self.epochs is None else done // length,
            epochs=self.epochs,
            step=done % length,
            steps=self.steps,
            total_steps=done,
            samples=done * 32,
            watched_seconds=seconds,
            data_seconds=seconds * self.data(rank),
            comm_seconds=seconds * self.comm(rank),
            metrics={"accuracy": 0.9, "loss": 1 / (1 + seconds)},
            cpu_seconds=3 + 1.5 * seconds,
            memory_bytes=500 << 20,
        )
        return replace(record, **self.changes(rank))

    def renew(self, *ranks: int) -> None:
        """Processes of these ranks are replaced by new ones."""
        for rank in ranks:
            self.work[rank], self.process[rank] = 0.0, f"process {rank}, begun at {self.now}"

    def go_on(self, seconds: float, ranks: range | None = None) -> None:
        for _ in range(round(seconds)):
            self.now += 1.0
            for rank in ranks or range(self.size):
                if not self.still:
                    self.work[rank] += 1.0
                self.view.take(self.record(rank), self.now)


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
    training.step_seconds = 0.5  # as many steps as before, five times slower from now on
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
    for epoch in range(6):  # of 10, each of 20 s and a validation of 10
        for second in range(20):
            now, done = now + 1, done + 5
            view.take(_alone(now, epoch=epoch, epochs=10, step=5 * second + 5, steps=100, total_steps=done), now)
        for second in range(10):
            now, done = now + 1, done + 5
            facts = {"stage": "validation", "step": second, "steps": 10, "total_steps": done}
            view.take(_alone(now, epoch=epoch, epochs=10, **facts), now)
    remaining = view.snapshot(now).remaining
    assert remaining is not None
    assert remaining.seconds == pytest.approx(4 * 30, abs=10)  # the last validation is not foreseen


def test_what_is_left_of_a_loop_if_others_may_follow() -> None:
    view = RunView("train", 1, 0.0)
    for second in range(1, 11):
        view.take(_alone(second, step=second, steps=40, total_steps=second), second)
    first = view.snapshot(10).remaining
    assert first is not None
    assert first.whole
    assert first.seconds == pytest.approx(30)
    for second in range(11, 21):  # the loop was left, and another one begins
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
        0: {"underway": (Underway("allreduce 'loss'", 12.4), Underway("broadcast 'x'", 3.2))},
        1: {"fetching": 7.0},
        2: {"underway": (Underway("allreduce 'loss'", 0.4),), "fetching": 0.1},
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


# ---- worlds ----------------------------------------------------------------------------------------------------------


def test_after_a_restart_counts_begin_again_and_the_total_goes_on() -> None:
    training = Training()
    training.go_on(20)
    training.generation = 1
    training.renew(*range(4))
    training.go_on(1)
    snapshot = training.view.snapshot(training.now)
    assert (snapshot.generation, snapshot.restarts, snapshot.changes) == (1, 1, 0)
    assert snapshot.rows[0].steps_per_second is None
    training.go_on(9)
    snapshot = training.view.snapshot(training.now)
    assert snapshot.rows[0].steps_per_second == pytest.approx(10)
    assert snapshot.samples == 4 * 300 * 32
    assert training.view.summary(training.now).steps == 300


def test_ranks_that_survive_go_on_under_other_numbers() -> None:
    training = Training()
    training.go_on(20)
    # Rank 1 is gone: 2 and 3 move up. Their clocks are those of other hosts.
    training.generation, training.size = 1, 3
    clocks = {0: 0, 1: 2, 2: 3}
    training.changes = lambda rank: {"clock": 5000.0 * clocks[rank] + training.now}
    training.process = {rank: training.process[before] for rank, before in clocks.items()}
    training.go_on(1)
    snapshot = training.view.snapshot(training.now)
    assert (snapshot.size, snapshot.restarts, snapshot.changes) == (3, 0, 1)
    assert len(snapshot.rows) == 3
    training.go_on(9)
    snapshot = training.view.snapshot(training.now)
    assert snapshot.rows[1].steps_per_second == pytest.approx(10)
    assert snapshot.samples == (4 * 200 + 3 * 100) * 32
    assert training.view.summary(training.now).steps == 300


def test_a_process_that_is_replaced_counts_besides_its_successor() -> None:
    training = Training()
    training.go_on(20)
    training.generation = 1
    training.renew(2)
    training.go_on(10)
    snapshot = training.view.snapshot(training.now)
    assert (snapshot.restarts, snapshot.changes) == (0, 1)
    assert snapshot.samples == (3 * 300 + 200 + 100) * 32
    assert snapshot.rows[2].samples_per_second == pytest.approx(320)


def test_a_larger_world_has_rows_for_those_who_are_to_come() -> None:
    training = Training(size=2)
    training.go_on(10)
    training.generation, training.size = 1, 3
    training.renew(2)
    training.go_on(1, range(2))
    assert [row.started for row in training.view.snapshot(training.now).rows] == [True, True, False]
    training.go_on(1)
    assert [row.started for row in training.view.snapshot(training.now).rows] == [True, True, True]


def test_what_an_older_world_still_says_is_left_out() -> None:
    training = Training()
    training.go_on(10)
    late = training.record(3)
    training.generation = 1
    training.go_on(1)
    training.view.mark("hung")
    training.view.take(late, training.now)
    snapshot = training.view.snapshot(training.now)
    assert snapshot.generation == 1
    assert snapshot.verdict == "hung"


def test_worlds_too_short_to_be_heard_of_are_counted_by_their_number() -> None:
    training = Training()
    training.generation = -1
    training.go_on(2)
    training.generation = 2
    training.go_on(2)
    snapshot = training.view.snapshot(training.now)
    assert (snapshot.restarts, snapshot.changes) == (0, 2)
    assert snapshot.samples == 4 * 40 * 32


def test_a_metric_that_is_no_number_does_no_harm() -> None:
    training = Training(changes=lambda rank: {"metrics": {"loss": math.nan, "gap": math.inf}})
    training.go_on(10)
    assert math.isnan(training.view.snapshot(training.now).rows[0].metrics["loss"])


def test_of_many_ranks_those_are_shown_that_stand_out() -> None:
    training = Training(size=64, comm=lambda rank: 0.0 if rank == 50 else 0.5)
    training.go_on(20)
    rows, more = shown_rows(training.view.snapshot(training.now).rows, 16)
    assert [row.rank for row in rows] == [*range(15), 50]
    assert more == 48
    rows, more = shown_rows(training.view.snapshot(training.now).rows, 64)
    assert (len(rows), more) == (64, 0)
    training.go_on(5, range(40))  # 24 are cut off
    rows, more = shown_rows(training.view.snapshot(training.now).rows, 16)
    assert [row.rank for row in rows] == [*range(40, 56)]


def test_there_is_no_total_before_every_rank_has_a_rate() -> None:
    training = Training()
    training.go_on(5, range(3))
    training.go_on(1)
    snapshot = training.view.snapshot(training.now)
    assert snapshot.rows[0].samples_per_second is not None
    assert snapshot.rows[3].samples_per_second is None
    assert snapshot.samples_per_second is None
    training.go_on(1)
    assert training.view.snapshot(training.now).samples_per_second == pytest.approx(1280)


def test_what_is_left_standing_says_what_is_left_to_say() -> None:
    training = Training()
    training.go_on(20)
    assert training.view.snapshot(training.now).remaining is not None
    training.view.ended(0)
    end = training.view.snapshot(training.now).at_end()
    assert end.remaining is None
    assert [row.ended for row in end.rows] == [True, False, False, False]
    for rank in range(4):
        training.view.ended(rank)
    assert not any(row.ended for row in training.view.snapshot(training.now).at_end().rows)


def test_metrics_stay_while_the_next_loop_has_none_yet() -> None:
    training = Training()
    training.go_on(5)
    training.changes = lambda rank: {"metrics": {}}
    training.go_on(1)
    training.changes = lambda rank: {"metrics": {"gap": 0.5}}
    training.go_on(1)
    assert training.view.snapshot(training.now).rows[0].metrics == {"loss": 1 / 6, "accuracy": 0.9, "gap": 0.5}
    assert training.view.summary(training.now).metrics == {"loss": 1 / 6, "accuracy": 0.9, "gap": 0.5}
