"""Which rank is reported as hung, as slow, or not at all: worlds of ranks on a clock that the test controls."""

from __future__ import annotations

import pickle
from collections.abc import Generator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_hvd.runner.watch.hang.verdict import Kind
from tests.hang_world import FOREVER, WARNING, Action, Collective, Work, World, one_differs, steps

# ---- nothing to say ---------------------------------------------------------------------------------------------


def test_steps_under_one_name_go_on_for_hours_unsuspected() -> None:
    world = World(3, steps(work=2.0))
    world.go_on(1200)
    assert (world.told, world.looks) == ([], 0)


@pytest.mark.parametrize("cpu", [1.0, 0.0])
def test_however_long_all_ranks_work_between_collectives_nothing_is_said(cpu: float) -> None:
    def program(rank: int) -> Generator[Action, None, None]:
        while True:
            yield Work(5 * WARNING + rank, cpu)
            yield Collective("allreduce 'x'")

    world = World(3, program)
    world.go_on(1200)
    assert (world.told, world.looks) == ([], 0)


def test_a_wait_shorter_than_the_warning_is_none() -> None:
    world = World(2, one_differs(1, Work(WARNING - 2, 0.0), Collective("allreduce 'loss'")))
    world.go_on(400)
    assert (world.told, world.looks) == ([], 0)


def test_a_wait_that_ends_while_ranks_are_looked_at_is_not_told() -> None:
    world = World(2, one_differs(1, Work(WARNING + 1.5, 0.0), Collective("allreduce 'loss'")))
    world.go_on(400)
    assert (world.told, world.looks) == ([], 1)


def test_without_a_stall_warning_nothing_is_said() -> None:
    world = World(2, one_differs(1, Work(FOREVER, 0.0)), warning=None)
    world.go_on(1200)
    assert (world.told, world.looks) == ([], 0)


def test_ranks_of_a_process_set_do_not_wait_for_those_outside() -> None:
    def program(rank: int) -> Generator[Action, None, None]:
        if rank == 2:
            yield Work(FOREVER, 0.0)
        while True:
            yield Work(1.0)
            yield Collective("allreduce 'pair'", (0, 1))

    world = World(3, program)
    world.go_on(600)
    assert world.told == []


def test_ranks_that_have_joined_wait_for_those_with_more_data_in_peace() -> None:
    def program(rank: int) -> Generator[Action, None, None]:
        if rank == 0:
            yield Collective("join 'join'")
        for _ in range(500):
            yield Work(1.0)
            yield Collective("allreduce 'more'", (1, 2))  # a collective without the joined rank
        yield Collective("join 'join'")

    world = World(3, program)
    world.go_on(400)
    assert world.told == []


def test_a_rank_that_has_left_or_gone_silent_is_no_hang_while_nobody_waits() -> None:
    def program(rank: int) -> Generator[Action, None, None]:
        yield from steps(count=3)(rank)
        if rank:
            yield Work(FOREVER)

    world = World(2, program)
    world.go_on(600)
    assert world.ranks[0].ended
    world.ranks[1].silent = True  # busy in native code
    world.go_on(600)
    assert world.told == []


def test_ranks_that_have_ended_are_no_hang() -> None:
    def program(rank: int) -> Generator[Action, None, None]:
        yield from steps(count=3)(rank)
        if rank:
            yield Work(FOREVER, 0.0)

    world = World(3, program)
    world.go_on(600)
    assert (world.told, world.looks) == ([], 0)


# ---- hangs ------------------------------------------------------------------------------------------------------


def test_a_rank_that_skips_a_collective_and_idles_is_named_with_its_line() -> None:
    world = World(8, one_differs(1, Work(FOREVER, 0.0)))
    world.go_on(5 + WARNING + 10)
    (verdict,) = world.told
    assert verdict.kind is Kind.HANG
    assert verdict.ranks == (1,)
    assert verdict.headline.startswith("no progress for 6")
    assert "ranks 0, 2-7 wait in allreduce 'loss' for rank 1, which has not entered it" in verdict.headline
    assert "rank 1 is idle (no CPU) outside of collectives, at train.py, line 31, in load" in verdict.headline
    assert "its last collective was bucket 2 of 5 of the gradients" in verdict.text
    assert "  ranks 0, 2-7: in allreduce 'loss' for 6" in verdict.text
    assert "stack of ranks 0, 2-7" in verdict.text
    assert verdict.text.index("stack of rank 1") < verdict.text.index("stack of ranks 0")
    assert "threading.py" not in verdict.text
    assert "threading.py" in verdict.stacks[1]
    assert world.watch.verdict is verdict
    assert pickle.loads(pickle.dumps(verdict)) == verdict


def test_a_hang_is_told_again_each_time_that_it_has_lasted_twice_as_long() -> None:
    world = World(2, one_differs(1, Work(FOREVER, 0.0)))
    world.go_on(16 * WARNING)
    assert world.kinds == [Kind.HANG] * 4
    seconds = [verdict.seconds for verdict in world.told]
    assert all(later >= 2 * earlier for earlier, later in pairwise(seconds))


def test_when_it_goes_on_that_is_said_once_and_no_verdict_holds() -> None:
    world = World(2, one_differs(1, Work(100.0, 0.0), Collective("allreduce 'loss'")))
    world.go_on(600)
    assert world.kinds == [Kind.HANG, Kind.OVER]
    assert "continues: allreduce 'loss' has ended after 10" in world.told[1].text
    assert world.watch.verdict is None


def test_a_verdict_holds_when_its_collective_fails_because_the_run_is_about_to_end() -> None:
    world = World(2, one_differs(1, Work(FOREVER, 0.0)))
    world.go_on(100)
    (verdict,) = world.told
    failing = world.ranks[0]
    failing.doing, failing.ended = Work(FOREVER), True  # the collective has raised: one last record, and no other
    world.watch.take(world.record(0), world.now)
    world.go_on(30)
    assert world.watch.verdict is verdict


def test_ranks_that_wait_in_different_collectives() -> None:
    def program(rank: int) -> Generator[Action, None, None]:
        yield from steps(count=3)(rank)
        yield Collective("allreduce 'a'" if rank != 1 else "broadcast 'b'")

    world = World(4, program)
    world.go_on(100)
    (verdict,) = world.told
    assert verdict.kind is Kind.HANG
    assert "different collectives, ranks 0, 2, 3 in allreduce 'a', rank 1 in broadcast 'b'" in verdict.headline
    assert verdict.ranks == (0, 1, 2, 3)
    assert verdict.text.splitlines()[1].startswith("  ranks 0, 2, 3: in allreduce 'a' for 6")
    assert verdict.text.splitlines()[2].startswith("  rank 1: in broadcast 'b' for 6")


def test_a_chain_of_waits_names_the_rank_at_its_end() -> None:
    def program(rank: int) -> Generator[Action, None, None]:
        yield from steps(count=3)(rank)
        if rank == 1:
            yield Collective("allreduce 'pair'", (1, 2))
        if rank == 2:
            yield Work(FOREVER, 0.0)
        yield Collective("allreduce 'all'")

    world = World(3, program)
    world.go_on(100)
    (verdict,) = world.told
    assert verdict.ranks == (2,)
    assert "rank 1: in allreduce 'pair' instead" in verdict.text


def test_a_rank_that_waits_for_data_which_nobody_prepares() -> None:
    world = World(2, one_differs(1, Work(FOREVER, 0.0, fetching=True)))
    world.go_on(100)
    (verdict,) = world.told
    assert verdict.kind is Kind.HANG
    assert "rank 1 is waiting for its next batch for 6" in verdict.headline


def test_a_stopped_process_is_named_though_it_says_nothing() -> None:
    world = World(2, steps())
    world.go_on(20)
    world.ranks[1].frozen = True
    world.go_on(WARNING + 10)
    (verdict,) = world.told
    assert verdict.kind is Kind.HANG
    assert verdict.ranks == (1,)
    assert "rank 1 is stopped by a signal" in verdict.headline
    world.ranks[1].frozen = False
    world.go_on(30)
    assert world.kinds == [Kind.HANG, Kind.OVER]


def test_a_process_that_is_stopped_while_nobody_waits_for_it_is_told_as_well() -> None:
    world = World(2, lambda rank: iter([Work(FOREVER)]))  # type: ignore[arg-type,return-value]
    world.go_on(20)
    world.ranks[1].frozen = True
    world.go_on(WARNING + 10)
    (verdict,) = world.told
    assert verdict.ranks == (1,)
    assert "no sign of life: rank 1 is stopped" in verdict.headline


def test_a_process_that_was_stopped_before_it_said_a_word() -> None:
    world = World(2, lambda rank: iter([Work(FOREVER)]))  # type: ignore[arg-type,return-value]
    world.ranks[1].frozen = True
    world.go_on(WARNING + 10)
    (verdict,) = world.told
    assert "rank 1 is stopped by a signal" in verdict.headline
    world.ranks[1].frozen = False
    world.go_on(20)
    assert world.kinds == [Kind.HANG, Kind.OVER]


def test_a_rank_whose_task_does_not_answer_is_named_so() -> None:
    world = World(3, steps())
    world.go_on(20)
    world.ranks[2].silent, world.ranks[2].answers = True, False
    world.ranks[2].program, world.ranks[2].doing = iter(()), Work(FOREVER)  # type: ignore[assignment]
    world.go_on(WARNING + 15)
    (verdict,) = world.told
    assert verdict.ranks == (2,)
    assert "rank 2 is silent for 6" in verdict.headline
    assert "its task does not answer" in verdict.headline


def test_a_rank_in_native_code_that_holds_the_lock_and_waits() -> None:
    world = World(2, one_differs(1, Work(FOREVER, 0.0)))
    world.go_on(20)
    world.ranks[1].silent = True
    world.go_on(WARNING)
    (verdict,) = world.told
    assert verdict.kind is Kind.HANG
    assert "holds Python's lock and waits" in verdict.headline


def test_a_collective_that_all_have_entered_and_that_does_not_end() -> None:
    world = World(3, one_differs(-1, name="allreduce 'cut'"))
    world.go_on(4)
    for rank in world.ranks:  # all enter it, and none returns
        rank.doing, rank.since = Collective("allreduce 'cut'", seconds=FOREVER), world.now
    world.go_on(100)
    (verdict,) = world.told
    assert verdict.kind is Kind.HANG
    assert "ranks 0-2 have all entered allreduce 'cut'" in verdict.headline


def test_ranks_that_wait_for_one_that_has_ended() -> None:
    world = World(2, one_differs(1, Work(1.0)))
    world.ranks[1].program = iter([Work(3.0)])  # type: ignore[assignment]
    world.go_on(100)
    (verdict,) = world.told
    assert "rank 1 is out of the world" in verdict.headline


# ---- stragglers -------------------------------------------------------------------------------------------------


def test_a_rank_that_works_while_others_wait_is_a_straggler_and_never_called_hung() -> None:
    world = World(4, one_differs(3, Work(500.0), Collective("allreduce 'loss'")))
    world.go_on(900)
    assert world.kinds == [Kind.STRAGGLER] * 3 + [Kind.OVER]
    first = world.told[0]
    assert first.ranks == (3,)
    assert first.headline.startswith("rank 3 keeps ranks 0-2 waiting in allreduce 'loss', for 6")
    assert "working (100 % of a core), at train.py, line 31, in load" in first.headline
    assert "no progress" not in first.text


def test_one_that_is_slow_in_every_step_is_told_once() -> None:
    def program(rank: int) -> Generator[Action, None, None]:
        while True:
            yield Work(100.0 if rank == 1 else 1.0)
            yield Collective("allreduce 'x'")

    world = World(2, program)
    world.go_on(1200)
    assert world.kinds == [Kind.STRAGGLER, Kind.OVER]


def test_a_rank_that_goes_on_with_steps_of_its_own_is_a_straggler() -> None:
    world = World(2, one_differs(1, Work(FOREVER, 0.0, steps=True)))
    world.go_on(100)
    assert world.kinds == [Kind.STRAGGLER]


def test_a_rank_whose_data_are_being_prepared_is_a_straggler() -> None:
    world = World(2, one_differs(1, Work(FOREVER, 2.0, fetching=True)))
    world.go_on(100)
    (verdict,) = world.told
    assert verdict.kind is Kind.STRAGGLER
    assert "waiting for its next batch" in verdict.headline


def test_a_straggler_that_falls_asleep_becomes_a_hang() -> None:
    world = World(2, one_differs(1, Work(80.0), Work(FOREVER, 0.0)))
    world.go_on(300)
    assert world.kinds == [Kind.STRAGGLER, Kind.HANG, Kind.HANG]


def test_idle_ranks_may_be_waiting_for_one_that_works() -> None:
    def program(rank: int) -> Generator[Action, None, None]:
        yield from steps(count=3)(rank)
        if rank:
            yield Work(FOREVER, 1.0 if rank == 2 else 0.0)
        yield Collective("allreduce 'x'")

    world = World(3, program)
    world.go_on(100)
    (verdict,) = world.told
    assert verdict.kind is Kind.STRAGGLER
    assert verdict.ranks == (2,)


# ---- worlds that follow each other ------------------------------------------------------------------------------


def test_a_new_generation_is_judged_afresh() -> None:
    world = World(3, one_differs(1, Work(FOREVER, 0.0)))
    world.go_on(100)
    old = world.record(0)
    assert world.watch.verdict is not None
    world.generation, world.size = 1, 2
    world.start()
    world.go_on(20)
    assert world.watch.verdict is None
    world.watch.take(old, world.now)  # a record that was in transit
    world.go_on(WARNING + 10)
    assert world.kinds == [Kind.HANG, Kind.HANG]
    assert "rank 0 waits in allreduce 'loss' for rank 1" in world.told[1].headline


# ---- any world --------------------------------------------------------------------------------------------------

NAMES = ["allreduce 'a'", "broadcast 'b'", "bucket 0 of 2 of the gradients"]


@given(st.data())
def test_no_healthy_world_is_ever_called_hung(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4))
    slow = st.floats(0.1, 30)
    rounds = data.draw(
        st.lists(st.tuples(st.sampled_from(NAMES), st.lists(slow, min_size=size, max_size=size)), max_size=6)
    )

    def program(rank: int) -> Generator[Action, None, None]:
        for name, seconds in rounds:
            yield Work(seconds[rank])
            yield Collective(name)

    world = World(size, program, warning=5.0)
    world.go_on(sum(max(seconds) for _, seconds in rounds) + 20)
    assert Kind.HANG not in world.kinds


@given(st.data())
def test_every_rank_that_stays_away_is_named(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    away = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    rounds = data.draw(st.lists(st.sampled_from(NAMES), max_size=4))
    last = data.draw(st.sampled_from(NAMES))

    def program(rank: int) -> Generator[Action, None, None]:
        for name in rounds:
            yield Work(1.0 + rank)
            yield Collective(name)
        if rank in away:
            yield Work(FOREVER, 0.0)
        yield Collective(last)

    world = World(size, program, warning=10.0)
    world.go_on(40)
    verdict = world.told[0]
    assert verdict.kind is Kind.HANG
    assert set(verdict.ranks) == away
    assert len(verdict.text.splitlines()) <= 40
