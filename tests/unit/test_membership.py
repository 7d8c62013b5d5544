"""Scenarios of elastic membership, each a few lines: who arrives, who leaves, who then trains."""

from __future__ import annotations

from dataclasses import replace

from spark_hvd.runner.elastic.membership.events import (
    End,
    Limits,
)
from tests.elastic_model import TWO, Model, trained


def test_ranks_meet_train_and_return() -> None:
    model = trained(steps=30)
    model.run(5.0)
    assert model.membership.verdict is not None
    assert (model.membership.verdict.end, model.membership.verdict.ranks) == (End.DONE, (0, 1))


def test_nobody_starts_before_there_are_enough() -> None:
    model = Model(TWO)
    model.up(0)
    model.run(10.0)
    assert not model.processes
    model.up(1)
    model.run(1.0)
    assert model.size == 2


def test_fewer_start_when_the_time_is_up() -> None:
    model = Model(replace(TWO, start_timeout=5.0))
    model.up(0)
    model.run(7.0)
    assert model.size == 1
    assert "instead of num_proc=2" in model.notes[0]


def test_too_few_to_start_is_an_error_that_names_the_number() -> None:
    model = Model(replace(TWO, min_num_proc=2, start_timeout=5.0))
    model.up(0)
    model.run(6.0)
    assert model.membership.verdict is not None
    assert model.membership.verdict.end is End.NOT_STARTED
    assert "1 task had started after start_timeout=5 s, min_num_proc=2" in model.membership.verdict.text


def test_ranks_of_one_host_are_next_to_each_other() -> None:
    model = Model(Limits(num_proc=4, min_num_proc=4, max_num_proc=4))
    for agent, host in enumerate(["a", "b", "a", "b"]):
        model.up(agent, host)
    model.run()
    members = [model.of_rank(rank) for rank in range(4)]
    assert [(process.place.host, process.place.local_rank) for process in members] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]


def test_a_rank_that_dies_is_replaced_and_the_survivor_comes_first() -> None:
    model = trained()
    survivor = model.of_rank(1).number
    model.fail(0)
    newcomer = model.processes[2]
    newcomer.hangs = True  # prepares slowly
    model.run(0.5)
    assert model.size == 1, "the survivor does not wait"
    newcomer.hangs = False
    model.run(1.0)
    assert model.size == 2
    assert model.of_rank(0).number == survivor
    assert model.membership.policy.resets == 1


def test_below_the_minimum_the_survivor_waits() -> None:
    model = trained(replace(TWO, min_num_proc=2))
    model.lose(0)
    model.run(5.0)
    assert model.size == 0
    model.up(7, task=0)
    model.run(1.0)
    assert model.size == 2
    assert model.of_rank(0).agent == 1


def test_below_the_minimum_for_too_long_is_an_error() -> None:
    model = trained(replace(TWO, min_num_proc=2, elastic_timeout=20.0))
    model.lose(0)
    model.run(25.0)
    assert model.membership.verdict is not None
    assert model.membership.verdict.end is End.TOO_FEW
    assert "1 rank for elastic_timeout=20 s, min_num_proc=2" in model.membership.verdict.text


def test_newcomers_join_at_a_commit_and_that_is_no_failure() -> None:
    model = trained(Limits(num_proc=2, min_num_proc=1, max_num_proc=4))
    model.up(2)
    model.up(3)
    model.run(1.0, commit=False)
    assert model.size == 2, "nobody has committed"
    model.run(1.0)
    assert model.size == 4
    assert model.membership.policy.resets == 0
    assert [model.of_rank(rank).number for rank in range(4)] == [0, 1, 2, 3]


def test_nobody_waits_for_a_newcomer_that_prepares() -> None:
    model = trained(Limits(num_proc=2, min_num_proc=1, max_num_proc=3))
    model.up(2)
    model.processes[2].hangs = True
    model.run(60.0)
    assert (model.size, model.membership.policy.resets) == (2, 0)


def test_never_more_than_the_maximum() -> None:
    model = trained(Limits(num_proc=2, min_num_proc=1, max_num_proc=3))
    for agent in (2, 3, 4):
        model.up(agent)
    model.run(2.0)
    assert model.size == 3


def test_a_decommissioned_rank_leaves_at_a_commit_without_a_failure() -> None:
    model = trained()
    model.leave(0)
    model.run(1.0)
    assert model.size == 1
    assert model.of_rank(0).agent == 1
    assert model.membership.policy.resets == 0
    assert 0 not in model.agents, "its task is free for another executor"
    model.up(5, task=0)
    model.run(1.0)
    assert (model.size, model.membership.policy.resets) == (2, 0)


def test_who_leaves_below_the_minimum_leaves_all_the_same_and_the_others_wait() -> None:
    model = trained(replace(TWO, min_num_proc=2))
    model.leave(0)
    model.run(1.0)
    assert model.size == 0
    assert model.membership.verdict is None
    model.up(5, task=2)
    model.run(1.0)
    assert model.size == 2


def test_when_all_leave_they_hand_the_state_over_first() -> None:
    model = trained()
    model.leave(0)
    model.leave(1)
    model.run(1.0)
    assert model.size == 2, "there is nobody to hand over to"
    model.membership.limits = replace(TWO, max_num_proc=4)
    model.up(2)
    model.up(3)
    model.run(3.0)
    assert {model.of_rank(rank).agent for rank in range(model.size)} == {2, 3}
    assert min(model.of_rank(rank).commits for rank in range(2)) > 0
    assert model.membership.policy.resets == 0


def test_a_hung_rank_is_ended_when_it_does_not_come_back() -> None:
    model = trained()
    model.hang(1)
    model.break_up(model.of_rank(0), "no answer for collective_timeout")
    model.run(TWO.rejoin_timeout - 1)
    assert model.size == 0
    model.run(3.0)
    assert model.size == 2
    assert "did not come back within rejoin_timeout=30 s" in " ".join(model.notes)


def test_a_rank_that_hangs_while_all_meet_is_ended() -> None:
    model = trained()
    model.fail(1)
    model.run(0.2)
    newcomer = max(model.processes)
    model.processes[newcomer].hangs = False
    model.enter(model.processes[newcomer])
    model.processes[newcomer].hangs = True
    model.run(40.0)
    assert "did not join the others" in " ".join(model.notes)
    assert model.size == 2


def test_an_executor_that_nobody_hears_of_is_waited_for_until_it_counts_as_lost() -> None:
    model = trained()
    model.kill_agent(0)
    model.run(2.0)
    assert model.size == 0
    assert model.membership.waits_for_the_silent
    model.lose(0)
    model.run(0.5)
    assert model.size == 1


def test_a_task_that_spark_starts_anew_ends_its_former_attempt() -> None:
    model = trained()
    model.kill_agent(0)
    model.up(9, "host0", task=0)
    model.run(2.0)
    assert model.size == 2
    assert model.of_rank(0).agent == 1


def in_the_second_function(least: int) -> Model:
    model = trained(Limits(num_proc=2, min_num_proc=least, max_num_proc=3), steps=40, functions=2)
    model.run(4.0)
    assert {process.function for process in model.alive()} == {2}
    assert model.size == 2
    return model


def test_a_new_rank_is_kept_out_of_a_later_elastic_function() -> None:
    model = in_the_second_function(1)
    model.up(2)
    model.run(1.0)
    assert (model.size, model.membership.policy.resets) == (2, 0)
    assert sum("a new rank (number 2) on host host2 takes no part" in note for note in model.notes) == 1
    model.fail(0)
    model.run(1.0)
    assert model.size == 1, "the rank that is left does not wait for those that take no part"
    assert sum("takes no part" in note for note in model.notes) == 1
    model.run(4.0)
    verdict = model.membership.verdict
    assert verdict is not None
    assert (verdict.end, verdict.ranks) == (End.DONE, (1,))


def test_a_new_rank_that_must_be_in_a_later_elastic_function_meets_the_others() -> None:
    model = in_the_second_function(2)
    model.fail(0)
    model.run(1.0)
    assert {model.of_rank(0).function, model.of_rank(1).function} == {1, 2}, "their states say that they do not fit"


def test_all_ranks_of_a_later_elastic_function_leave_together() -> None:
    model = in_the_second_function(1)
    model.up(2)
    model.leave(0)
    model.leave(1)
    model.run(1.0)
    assert [model.of_rank(rank).agent for rank in range(model.size)] == [0, 1], "there is nobody to hand over to"
