"""What is known of a run whose ranks are replaced, exchanged or too many for a screen, and what remains at its end."""

from __future__ import annotations

import math

import pytest

from spark_hvd.runner.watch.snapshot import shown_rows
from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.vitals import Vitals
from tests.trained_ranks import Training


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


def test_steps_between_two_records_count_although_their_process_is_killed() -> None:
    view = RunView("train on 2 ranks", 2, 0.0)

    def tell(rank: int, process: str, generation: int, total: int, before: int = 0) -> None:
        facts = {"process": process, "total_steps": total, "steps_before": before}
        view.take(Vitals(rank, 2, generation, 0.0, **facts), 0.0)

    tell(0, "a", 0, 0)
    tell(1, "b", 0, 0)  # is killed after 30 steps
    tell(0, "a", 1, 31, 30)  # is killed after 60
    tell(1, "c", 1, 1)
    tell(0, "d", 2, 1)
    tell(1, "c", 2, 31, 30)
    tell(0, "d", 2, 40)
    tell(1, "c", 2, 70, 30)
    assert view.summary(1.0).steps == 100


def _effective(training: Training) -> tuple[float | None, float | None]:
    summary = training.view.summary(training.now)
    return summary.effective_training_time, summary.lost_training_time


def test_steps_after_the_checkpoint_are_lost_with_a_restart_and_waiting_for_it_is_lost_too() -> None:
    training = Training()
    # rank 0 saves for all, after 150 of 200 steps
    training.changes = lambda rank: {"kept_steps": 150} if rank == 0 else {}
    training.go_on(20)
    training.generation = 1
    training.renew(*range(4))
    training.now += 10.0
    training.changes = lambda rank: {"kept_steps": 0}
    training.go_on(10)
    assert _effective(training) == (pytest.approx(25 / 40), pytest.approx(5 / 40))


def test_what_rank_0_saves_counts_for_ranks_that_only_load() -> None:
    training = Training(size=2)
    training.changes = lambda rank: {"kept_steps": 90 if rank == 0 else 0}  # rank 1 has only what it loaded
    training.go_on(10)
    training.generation = 1
    training.renew(0, 1)
    training.still = True
    training.go_on(1)
    assert _effective(training) == (pytest.approx(9 / 11), pytest.approx(1 / 11))


def test_what_rank_0_saves_counts_in_a_world_that_ranks_entered_with_other_numbers_of_steps() -> None:
    training = Training(size=2)
    training.changes = lambda rank: {"kept_steps": 100}
    training.go_on(10)
    training.generation = 1
    training.renew(1)
    # in the second world, rank 0 saves for both after 90 of 100 steps
    training.changes = lambda rank: {"kept_steps": 190 if rank == 0 else 0}
    training.go_on(10)
    training.generation = 2
    training.renew(0, 1)
    training.still = True
    training.changes = lambda rank: {}
    training.go_on(1)
    # everything counts from the replaced process, and all but the last second from the others
    assert _effective(training) == (pytest.approx(38 / 42), pytest.approx(2 / 42))


def test_after_a_restart_of_a_program_that_keeps_nothing_it_is_not_known_what_was_lost() -> None:
    training = Training()
    training.go_on(20)
    training.generation = 1
    training.renew(*range(4))
    training.go_on(20)
    assert _effective(training) == (pytest.approx(1.0), 0.0)


def test_steps_after_the_commit_are_lost_on_survivors_and_with_the_rank_that_was_lost() -> None:
    training = Training()
    training.changes = lambda rank: {"kept_steps": 100}
    training.go_on(20)
    training.generation = 1
    training.renew(2)
    training.changes = lambda rank: {"kept_steps": 0} if rank == 2 else {"kept_steps": 200, "lost_steps": 100}
    training.go_on(20)
    # 10 of 20 seconds of rank 2's first process, and as much of the others
    assert _effective(training) == (pytest.approx(0.75), pytest.approx(0.25))


def test_without_loops_the_time_between_the_first_step_and_the_last_is_effective() -> None:
    training = Training()
    training.changes = lambda rank: {"stage": "", "watched_seconds": 0.0}
    training.go_on(11)
    training.still = True
    training.go_on(9)
    assert _effective(training) == (pytest.approx(0.5), 0.0)


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
