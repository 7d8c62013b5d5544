"""Scenarios of elastic membership: failures that a run survives, limits, exclusion, lost state, ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_hvd.runner.elastic.membership.events import (
    AgentLost,
    AgentUp,
    Broken,
    Committed,
    End,
    EndAgent,
    Ended,
    Entered,
    Finished,
    Joined,
    Limits,
    Ready,
    Yielded,
)
from tests.elastic_model import TWO, Model, trained


def test_all_raise() -> None:
    model = trained()
    model.fail(0, raised=True, error="ValueError: bad")
    model.fail(1, raised=True, error="ValueError: bad")
    assert model.membership.verdict is not None
    assert model.membership.verdict.end is End.FAILED
    assert model.membership.verdict.culprit == 0


def test_one_rank_that_always_raises_does_not_go_on_for_ever() -> None:
    model = trained(replace(TWO, min_num_proc=2, host_failure_limit=100))
    for _ in range(4):  # the first has committed
        assert model.membership.verdict is None
        model.fail(1, raised=True, error="ValueError: bad")
        model.run(20.0, commit=False)
    assert model.membership.verdict is not None
    assert model.membership.verdict.end is End.FAILED
    assert "3 times in a row" in model.membership.verdict.text


def test_failures_with_commits_in_between_may_go_on_for_ever() -> None:
    model = trained()
    for _ in range(50):
        model.run(2.0)
        model.fail(1)
    model.run(2.0)
    assert (model.size, model.membership.policy.resets) == (2, 50)


def test_ranks_that_do_not_reach_each_other_do_not_try_for_ever() -> None:
    model = trained(replace(TWO, elastic_timeout=20.0))
    model.run(2.0)
    model.apart = True
    model.fail(1)
    model.run(18.0)
    assert model.membership.verdict is None
    model.apart = False
    model.run(1.0)
    assert model.size == 2
    model.apart = True  # permanently; the time restarts
    model.fail(1)
    model.run(18.0)
    assert model.membership.verdict is None
    model.run(4.0)
    assert model.membership.verdict is not None
    assert model.membership.verdict.end is End.FAILED
    assert "could not meet for elastic_timeout=20 s" in model.membership.verdict.text
    assert "rank 0 of 2 could not meet the other ranks" in model.membership.verdict.text


def test_the_reset_limit() -> None:
    model = trained(replace(TWO, reset_limit=2))
    for _ in range(3):
        assert model.membership.verdict is None
        model.fail(1)
        model.run(2.0)
    assert model.membership.verdict is not None
    assert model.membership.verdict.end is End.RESET_LIMIT
    assert "reset_limit=2" in model.membership.verdict.text


def test_a_host_where_ranks_keep_failing_gets_no_more() -> None:
    model = trained()
    model.fail(1)
    model.fail_process(model.processes[2])
    model.run(20.0)
    assert model.size == 1
    assert model.of_rank(0).agent == 0
    assert "host host1 gets no new ranks for the rest of the run" in " ".join(model.notes)


def test_ranks_of_a_host_that_die_together_are_one_failure_of_it() -> None:
    model = Model(Limits(num_proc=3, min_num_proc=1, max_num_proc=3))
    for agent, host in enumerate(["a", "b", "b"]):
        model.up(agent, host)
    model.run(2.0)
    both = [model.of_rank(1), model.of_rank(2)]
    for process in both:
        model.fail_process(process)
    model.run(2.0)
    assert model.size == 3
    assert "gets no new ranks" not in " ".join(model.notes)


def test_a_host_comes_back_after_its_cool_down() -> None:
    model = trained(replace(TWO, host_failure_limit=1, cooldown=(10.0, 60.0)))
    model.fail(1)
    model.run(9.0)
    assert model.size == 1
    model.run(5.0)
    assert model.size == 2


def test_what_one_rank_says_of_a_commit_holds_for_all_of_its_world() -> None:
    model = Model(replace(TWO, min_num_proc=2, host_failure_limit=2))
    for agent in range(2):
        model.up(agent, "host")
    model.run(2.0)
    model.fail(0)
    model.run(2.0, commit=False)  # a new rank got the state
    first = model.of_rank(0)
    model.tell(Committed(first.number, first.commits + 1))  # the other's message arrives after that of the failure
    model.fail(0)
    model.run(2.0)
    assert model.size == 2


def test_when_all_hosts_are_excluded_there_is_nothing_to_wait_for() -> None:
    model = trained(replace(TWO, min_num_proc=2, host_failure_limit=1))
    model.fail(1, error="was killed by SIGSEGV")
    model.run(1.0)
    assert model.membership.verdict is not None
    assert model.membership.verdict.end is End.FAILED
    assert "host1" in model.membership.verdict.text
    assert "SIGSEGV" in model.membership.verdict.text


def test_all_hosts_lost_after_commits_means_the_state_is_lost() -> None:
    model = trained()
    model.lose(0)
    model.lose(1)
    model.up(2, task=0)
    model.up(3, task=1)
    model.run(2.0)
    assert model.membership.verdict is not None
    assert model.membership.verdict.end is End.STATE_LOST


def test_all_hosts_lost_before_the_first_commit_loses_nothing() -> None:
    model = Model(TWO)
    model.up(0)
    model.up(1)
    model.run(1.0, commit=False)
    assert model.size == 2
    model.lose(0)
    model.lose(1)
    model.up(2, task=0)
    model.up(3, task=1)
    model.run(2.0)
    assert model.size == 2


def test_a_rank_lost_before_all_have_finished_is_no_success() -> None:
    model = trained()
    first, second = model.of_rank(0), model.of_rank(1)
    first.state = "finishing"
    model.tell(Finished(first.number, 0))
    model.fail(1)
    assert first.state == "broken", "it goes on with the others from its last commit"
    model.run(2.0)
    assert model.membership.verdict is None
    assert model.size == 2
    assert second.state == "dead"


def test_a_value_lost_after_the_end_is_an_error() -> None:
    model = trained()
    for process in (model.of_rank(0), model.of_rank(1)):
        process.state = "finishing-by-hand"
        model.tell(Finished(process.number, 0))
    model.tell(Ended(model.of_rank(0).number))
    model.tell(AgentLost(0, "has not been heard from"))
    assert model.membership.verdict is not None
    assert model.membership.verdict.end is End.FAILED
    assert "its value is lost" in model.membership.verdict.text


def test_a_function_without_an_elastic_one_simply_returns() -> None:
    model = Model(TWO)
    model.up(0)
    model.up(1)
    for number in (0, 1):
        model.tell(Ended(number))
    assert model.membership.verdict is not None
    assert (model.membership.verdict.end, model.membership.verdict.ranks) == (End.DONE, (0, 1))


@pytest.mark.parametrize("least", [1, 2])
def test_a_rank_lost_before_a_function_without_an_elastic_one_returns_is_waited_for(least: int) -> None:
    model = Model(replace(TWO, min_num_proc=least))
    model.up(0)
    model.up(1)
    model.tell(AgentLost(0, "gone"))
    model.tell(Ended(1))
    model.act(model.membership.tick(model.now + 500.0))
    assert model.membership.verdict is None
    model.up(2, task=0)
    model.act(model.membership.tick(model.now + 5000.0))
    assert model.membership.verdict is None, "it may take its time"
    model.now += 5000.0
    model.tell(AgentLost(2, "gone, too"))
    assert model.membership.verdict is None
    model.up(3, task=0)
    model.tell(Ended(3))
    assert model.membership.verdict is not None
    assert (model.membership.verdict.end, model.membership.verdict.ranks) == (End.DONE, (1, 3))


def test_a_lost_rank_that_is_never_replaced_ends_a_function_without_an_elastic_one() -> None:
    model = Model(TWO)
    model.up(0)
    model.up(1)
    model.tell(AgentLost(0, "gone"))
    model.tell(Ended(1))
    model.act(model.membership.tick(model.now + TWO.elastic_timeout))
    assert model.membership.verdict is not None
    assert (model.membership.verdict.end, model.membership.verdict.culprit) == (End.TOO_FEW, 0)
    assert "has returned on 1 rank of 2" in model.membership.verdict.text
    assert "for elastic_timeout=600 s" in model.membership.verdict.text


@pytest.mark.parametrize("raised", [True, False])
def test_the_time_for_a_new_rank_begins_when_the_last_one_has_gone(raised: bool) -> None:
    model = Model(replace(TWO, host_failure_limit=9))
    model.up(0)
    model.up(1)
    model.tell(Ended(1))
    model.tell(AgentLost(0, "gone"))
    model.up(2, task=0)
    model.now += 10 * TWO.elastic_timeout  # in which it has worked
    if raised:
        model.fail_process(model.processes[2], raised=True, error="ValueError: bad")
    else:
        model.tell(AgentLost(2, "gone"))
    model.act(model.membership.tick(model.now + 1))
    assert model.membership.verdict is None


def test_an_exception_that_repeats_on_one_rank_ends_a_function_without_an_elastic_one() -> None:
    model = Model(TWO)
    model.up(0)
    model.up(1)
    for worker in (0, 2):
        model.fail_process(model.processes[worker], raised=True, error="ValueError: bad")
    assert model.membership.verdict is None
    model.tell(Ended(1))
    assert model.membership.verdict is not None
    assert (model.membership.verdict.end, model.membership.verdict.culprit) == (End.FAILED, 2)
    assert "has returned on 1 rank of 2" in model.membership.verdict.text
    assert "host0; last: a new rank (number 2) on host host0: ValueError: bad" in model.membership.verdict.text


def test_a_rank_that_came_late_is_not_needed_if_fn_has_no_elastic_function() -> None:
    model = Model(Limits(num_proc=1, min_num_proc=1, max_num_proc=2))
    model.up(0)
    model.act(model.membership.tick(model.now))
    model.act(model.membership.tick(model.now + 1.0))
    model.up(1)
    model.tell(Ended(0))
    assert model.membership.verdict is None
    model.tell(AgentLost(1, "gone"))
    assert model.membership.verdict is not None
    assert (model.membership.verdict.end, model.membership.verdict.ranks) == (End.DONE, (0,))


def test_values_of_fewer_ranks_are_enough_if_fewer_began() -> None:
    model = Model(Limits(num_proc=3, min_num_proc=1, max_num_proc=3, start_timeout=10.0))
    model.up(0)
    model.up(1)
    model.act(model.membership.tick(model.now + 10.0))
    for number in (0, 1):
        model.tell(Ended(number))
    assert model.membership.verdict is not None
    assert (model.membership.verdict.end, model.membership.verdict.ranks) == (End.DONE, (0, 1))


def test_a_function_that_returns_early_on_one_rank_is_an_error() -> None:
    model = Model(TWO)
    model.up(0)
    model.up(1)
    model.prepare(0)
    model.tell(Ended(1))
    assert model.membership.verdict is not None
    assert "returned from fn without" in model.membership.verdict.text


def test_a_function_that_has_returned_on_one_rank_before_others_call_theirs_is_an_error() -> None:
    model = Model(TWO)
    model.up(0)
    model.up(1)
    model.tell(Ended(1))
    assert model.membership.verdict is None, "it may have no elastic function at all"
    model.prepare(0)
    assert model.membership.verdict is not None
    assert model.membership.verdict.end is End.FAILED
    assert "returned from fn without" in model.membership.verdict.text


@pytest.mark.parametrize("returns_first", [True, False])
def test_a_second_elastic_function_that_only_one_rank_calls_is_an_error(returns_first: bool) -> None:
    model = trained()
    zero, one = model.of_rank(0), model.of_rank(1)
    for process in (zero, one):
        process.state = "finishing-by-hand"
        model.tell(Finished(process.number, 0))
    zero.state = "waiting"
    events = [Ended(one.number), Entered(zero.number)]
    for event in events if returns_first else reversed(events):
        model.tell(event)
    assert model.membership.verdict is not None
    assert model.membership.verdict.end is End.FAILED
    assert "rank 1 on host host1 returned from fn without" in model.membership.verdict.text


def test_tasks_that_come_after_the_end_are_let_go() -> None:
    model = trained(steps=30)
    model.run(5.0)
    assert model.membership.handle(AgentUp(9, "host9", 9), model.now) == [EndAgent(9)]


def test_the_caller_stops_it() -> None:
    model = trained()
    model.act(model.membership.stop("interrupted"))
    assert not model.alive()


@pytest.mark.parametrize("moment", ["ready", "go"])
def test_messages_of_the_past_change_nothing(moment: str) -> None:
    model = trained()
    old = model.of_rank(1).number
    model.fail(0)
    model.run(2.0)
    generation = model.membership.generation
    assert generation is not None
    for event in (
        Broken(old, 0, "late"),
        Yielded(old, 0),
        Ready(old, 0),
        Joined(old, 0),
        Finished(old, 0),
        Broken(0, generation.number, "from the dead"),
    ):
        model.tell(event)
    assert model.membership.generation is generation
    assert generation.trains
