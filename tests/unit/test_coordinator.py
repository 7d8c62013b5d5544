"""The coordinator's decisions, without a socket or a clock."""

from __future__ import annotations

import itertools

import pytest

from spark_hvd.collectives.messages import Decision, Entry, Fail, Learn, Request, Run, RunKnown
from spark_hvd.engine.coordinator import Coordinator
from tests.coordinated import (
    OTHER,
    USUAL,
    by_number,
    failure,
    fresh,
    gather,
    numbered,
    round_of,
    run_names,
    splits,
    three,
    works_by_number,
)

# ---- names without a number -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_name_runs_when_the_last_rank_is_ready(order: tuple[int, ...]) -> None:
    to = three()
    for place in order[:2]:
        assert fresh(to, place, "a") == []
        assert to.has_waiting
    assert fresh(to, order[2], "a") == [Run([Entry("a", USUAL)])]
    assert not to.has_waiting


def test_names_run_in_the_order_in_which_they_become_ready() -> None:
    to = three()
    fresh(to, 0, "a", "b", "c")
    fresh(to, 1, "c", "b", "a")
    assert run_names(fresh(to, 2, "b")) == ["b"]
    assert run_names(fresh(to, 2, "c", "a")) == ["c", "a"]


def test_what_is_ready_at_once_is_one_decision() -> None:
    to = three()
    fresh(to, 0, "a", "b", "c")
    fresh(to, 1, "a", "b", "c")
    assert fresh(to, 2, "c", "a", "b") == [Run([Entry(name, USUAL) for name in "cab"])]


def test_a_world_of_one_is_always_ready() -> None:
    assert fresh(Coordinator([0]), 0, "a", "b") == [Run([Entry("a", USUAL), Entry("b", USUAL)])]


def test_a_mismatch_fails_the_name_and_the_world_goes_on() -> None:
    to = three()
    fresh(to, 0, "a", "b")
    fresh(to, 1, "a", request=OTHER)
    fresh(to, 1, "b")
    fail, run = fresh(to, 2, "a", "b")
    assert isinstance(fail, Fail)
    assert (fail.names, fail.error, fail.places) == (["a"], "mismatch", None)
    for words in ("allreduce 'a'", "ranks 1, 6 passed shape (3,)", "rank 4 passed shape (4,)"):
        assert words in fail.text
    assert run == Run([Entry("b", USUAL)])
    assert round_of(to, "a") == [Run([Entry("a", USUAL)])]


def test_rows_of_allgather_and_splits_of_alltoall_make_a_table() -> None:
    to = three()
    gather = Request("allgather", ["float32", "int64"], [[1, 2], [7]], "cpu")
    fresh(to, 1, "g", request=gather._replace(shapes=[[0, 2], []]))  # a 0-dim tensor is one row
    fresh(to, 2, "g", request=gather._replace(shapes=[[5, 2], [9]]))
    assert fresh(to, 0, "g", request=gather) == [Run([Entry("g", gather, [[1, 7], [0, 1], [5, 9]])])]
    exchange = Request("alltoall", ["float32"], [[3]], "cpu", splits=[1, 1, 1])
    fresh(to, 0, "x", request=exchange)
    fresh(to, 2, "x", request=exchange._replace(shapes=[[0]], splits=[0, 0, 0]))
    last = fresh(to, 1, "x", request=exchange._replace(shapes=[[5]], splits=[0, 5, 0]))
    assert last == [Run([Entry("x", exchange, [[1, 1, 1], [0, 5, 0], [0, 0, 0]])])]


def test_seals_of_ranks_make_a_table_and_get_no_number() -> None:
    to = three()
    entry = Entry("o", USUAL._replace(seal="4 ab"), seals=["4 ab", None, "5 cd"])
    for _ in range(3):
        said = [fresh(to, place, "o", request=USUAL._replace(seal=seal)) for place, seal in enumerate(entry.seals)]
        assert said == [[], [], [Run([entry])]]


# ---- names with a number --------------------------------------------------------------------------------------------


def test_a_name_is_numbered_when_it_comes_again() -> None:
    to = three()
    entry = Entry("a", USUAL)
    assert round_of(to, "a") == [Run([entry])]
    assert round_of(to, "a") == [Learn(0, entry), Run([entry])]
    assert to.name_of(0) == "a"
    assert works_by_number(to, 0)


def test_numbers_run_together_in_any_order() -> None:
    to = numbered(*"abcd")
    assert by_number(to, 2, 3, 0) == []
    assert by_number(to, 0, 0, 1, 2, 3) == []
    assert by_number(to, 1, 1, 3) == [RunKnown(0b1000)]
    assert by_number(to, 1, 0, 2) == [RunKnown(0b0001)]
    assert by_number(to, 2, 2, 1) == [RunKnown(0b0110)]
    assert not to.has_waiting


def test_numbers_and_new_names_in_one_message() -> None:
    to = numbered("a")
    for place in range(2):
        assert to.submitted(place, 1, [("new", USUAL)], 0.0) == []
    assert to.submitted(2, 1, [("new", USUAL)], 0.0) == [RunKnown(1), Run([Entry("new", USUAL)])]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("odd", list(itertools.product([False, True], repeat=3)))
def test_another_request_for_a_numbered_name(order: tuple[int, ...], odd: tuple[bool, ...]) -> None:
    to = numbered("before", "a", "after")

    def come(place: int) -> list[Decision]:
        return fresh(to, place, "a", request=OTHER) if odd[place] else by_number(to, place, 1)

    assert come(order[0]) == []
    assert by_number(to, order[0], 0, 2) == []  # these continue at the same time
    assert come(order[1]) == []
    last = come(order[2])
    if not any(odd):
        assert last == [RunKnown(0b010)]
    elif all(odd):
        assert last == [Run([Entry("a", OTHER)])]
    else:
        fail = failure(last)
        assert (fail.names, fail.error) == (["a"], "mismatch")
        assert "shape (3,)" in fail.text
        assert "shape (4,)" in fail.text
    assert by_number(to, order[1], 0, 2) == []
    assert by_number(to, order[2], 0, 2) == [RunKnown(0b101)]
    assert not to.has_waiting
    assert works_by_number(to, 1)


def test_the_usual_request_may_come_in_words() -> None:
    to = numbered("a")
    by_number(to, 0, 0)
    fresh(to, 1, "a")
    assert run_names(by_number(to, 2, 0)) == ["a"]
    assert works_by_number(to, 0)


def test_a_changed_entry_takes_over_the_number() -> None:
    to = numbered("a", "b")
    assert round_of(to, "a", request=OTHER) == [Run([Entry("a", OTHER)])]
    assert round_of(to, "a", request=OTHER) == [Learn(0, Entry("a", OTHER)), Run([Entry("a", OTHER)])]
    assert works_by_number(to, 0)
    by_number(to, 0, 0)  # from now on this stands for the other request
    fresh(to, 1, "a", request=OTHER)
    assert run_names(by_number(to, 2, 0)) == ["a"]


def test_what_alternates_gets_no_number() -> None:
    to = three()
    for request in (USUAL, OTHER) * 3:
        assert round_of(to, "a", request=request) == [Run([Entry("a", request)])]


@pytest.mark.parametrize("capacity", [0, 2])
def test_numbers_are_limited(capacity: int) -> None:
    to = three(capacity)
    round_of(to, *"abc")
    learned = [decision for decision in round_of(to, *"abc") if isinstance(decision, Learn)]
    assert [decision.id for decision in learned] == list(range(capacity))
    assert round_of(to, "c") == [Run([Entry("c", USUAL)])]
    if capacity:
        assert works_by_number(to, 1)


@pytest.mark.parametrize(
    ("usual", "odd", "table"),
    [
        ([gather(1, 7), gather(2, 8), gather(3, 9)], gather(5, 0), [[1, 7], [5, 0], [3, 9]]),
        ([splits(1, 0, 0), splits(0, 2, 2), splits(3, 3, 3)], splits(5, 0, 1), [[1, 0, 0], [5, 0, 1], [3, 3, 3]]),
    ],
    ids=["allgather", "alltoall"],
)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_number_stands_for_each_ranks_own_rows(
    usual: list[Request], odd: Request, table: list[list[int]], order: tuple[int, ...]
) -> None:
    to = three()
    last = [fresh(to, place, "a", request=usual[place]) for place in (*range(3), *range(3))][-1]
    assert isinstance(last[0], Learn)
    assert works_by_number(to, 0)
    for place in order:
        last = fresh(to, place, "a", request=odd) if place == 1 else by_number(to, place, 0)
    assert last == [Run([Entry("a", usual[0], table)])]
    assert works_by_number(to, 0)
