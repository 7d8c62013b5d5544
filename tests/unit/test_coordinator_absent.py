"""The coordinator's decisions if ranks have joined, do not arrive or are gone."""

from __future__ import annotations

import pytest

from spark_hvd.collectives.messages import AllJoined, Decision, Entry, Gone, Run
from spark_hvd.engine.coordinator import Coordinator, bits
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

# ---- ranks that have joined -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("when", range(3))
@pytest.mark.parametrize("known", [False, True])
def test_a_joined_rank_is_not_waited_for(when: int, counts: bool, known: bool) -> None:
    to = numbered("a") if known else three()

    def event(place: int) -> list[Decision]:
        if place == 1:
            return to.joined(1, counts)
        return by_number(to, place, 0) if known else fresh(to, place, "a")

    places = [0, 2]
    places.insert(when, 1)
    *early, last = map(event, places)
    assert early == [[], []]
    assert last == [Run([Entry("a", USUAL, None, [1], 3 if counts else 2)])]
    assert not to.has_waiting


def test_a_joined_rank_gives_no_rows() -> None:
    to = three()
    to.joined(0, False)
    fresh(to, 1, "g", request=gather(2, 3))
    last = fresh(to, 2, "g", request=gather(4, 5))
    assert last == [Run([Entry("g", gather(2, 3), [[0, 0], [2, 3], [4, 5]], [0], 2)])]


def test_what_a_rank_submitted_before_it_joined_counts() -> None:
    to = numbered("known")
    assert to.submitted(0, 1, [("new", USUAL)], 0.0) == []
    to.joined(0, False)
    to.submitted(1, 1, [("new", USUAL)], 0.0)
    last = to.submitted(2, 1, [("new", USUAL)], 0.0)
    entries = [entry for decision in last if isinstance(decision, Run) for entry in decision.entries]
    assert entries == [Entry("known", USUAL), Entry("new", USUAL)]


def test_all_joined() -> None:
    to = numbered("a")
    fresh(to, 1, "left over")
    assert to.joined(1, False) == []
    assert to.joined(0, True) == []
    run, joined = to.joined(2, False)
    assert run == Run([Entry("left over", USUAL, None, [0, 2], 2)])
    assert joined == AllJoined(6)
    assert not to.has_waiting
    # the next epoch needs all of them again
    assert works_by_number(to, 0)
    assert round_of(to, "b") == [Run([Entry("b", USUAL)])]
    assert [to.joined(place, False) for place in (2, 0, 1)] == [[], [], [AllJoined(4)]]


def test_what_needs_all_ranks_fails_when_one_has_joined() -> None:
    to = three()
    to.joined(2, False)
    fresh(to, 0, "x", request=splits(1, 1, 1))
    fail = failure(fresh(to, 1, "x", request=splits(1, 1, 1)))
    assert "rank 6 called join()" in fail.text
    assert run_names([*fresh(to, 0, "x"), *fresh(to, 1, "x")]) == ["x"]


# ---- ranks that do not come -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [False, True])
def test_what_waits_for_too_long_fails_and_the_late_rank_is_told_the_same(known: bool) -> None:
    to = numbered("a", stall_timeout=10.0)

    def come(place: int, now: float) -> list[Decision]:
        return by_number(to, place, 0, now=now) if known else fresh(to, place, "a", request=OTHER, now=now)

    come(2, 100.0)
    come(0, 105.0)
    assert to.overdue(109.9) == []
    fail = failure(to.overdue(110.0))
    assert (fail.names, fail.error, fail.places) == (["a"], "stall", [0, 2])
    assert not to.has_waiting
    assert to.overdue(200.0) == []
    # The others may already be trying again: they are not told twice.
    come(0, 201.0)
    assert come(1, 202.0) == [fail._replace(places=[1])]
    come(1, 203.0)
    assert run_names(come(2, 204.0)) == ["a"]
    assert works_by_number(to, 0)


def test_each_name_has_an_age_of_its_own() -> None:
    to = numbered("slow", "quick", stall_timeout=10.0)
    by_number(to, 0, 0, 1, now=0.0)
    by_number(to, 1, 1, now=1.0)
    by_number(to, 2, 1, now=1.0)
    by_number(to, 0, 1, now=9.0)
    assert list(to.waiting()) == [("slow", 0.0), ("quick", 9.0)]
    assert [failure([decision]).names for decision in to.overdue(10.0)] == [["slow"]]
    assert [failure([decision]).names for decision in to.overdue(30.0)] == [["quick"]]


def test_a_failure_is_forgotten_when_all_have_joined() -> None:
    to = three(stall_timeout=10.0)
    fresh(to, 0, "a")
    to.overdue(10.0)
    for place in range(3):  # rank 4 has joined instead of calling "a"
        to.joined(place, False)
    assert round_of(to, "a") == [Run([Entry("a", USUAL)])]


def test_nothing_fails_without_a_timeout() -> None:
    to = three()
    fresh(to, 0, "a")
    assert to.overdue(1e9) == []


def test_a_stall_is_told_in_full() -> None:
    to = numbered("a", "b")
    fresh(to, 1, "c", now=3.0)
    by_number(to, 0, 1, now=5.0)
    text = to.stall_text("b", 7.5)
    assert text == (
        "allreduce 'b' has waited 2.5 s for ranks 4, 6 (rank 4 last called 'c', 4.5 s ago; rank 6 last called 'b', "
        "7.5 s ago); ready: rank 1."
    )
    to.joined(0, False)  # after it had called b
    assert to.missing("b") == {1, 2}
    assert to.stall_text("b", 7.5) == text
    many = Coordinator(range(100))
    fresh(many, 50, "a")
    assert "for ranks 0-49, 51-99 (rank 0 has called nothing yet; " in many.stall_text("a", 1.0)
    assert "; and 93 more)" in many.stall_text("a", 1.0)


def test_a_rank_that_is_gone_ends_everything() -> None:
    to = numbered("a", stall_timeout=1.0)
    by_number(to, 0, 0)
    fresh(to, 0, "b")
    assert to.gone(1, "rank 4 has left", left=True) == [Gone(4, "rank 4 has left", True)]
    assert not to.has_waiting
    assert list(to.waiting()) == []
    assert to.gone(2, "and another", left=False) == []
    for place in range(3):
        assert by_number(to, place, 0) == fresh(to, place, "b") == to.joined(place, False) == []
    assert to.overdue(100.0) == []


def test_bits() -> None:
    assert list(bits(0)) == []
    assert list(bits(1 << 3000 | 0b101)) == [0, 2, 3000]
