"""What a Spark Connect server reports tells whether the tasks of ranks run, or those of their input."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from spark_hvd.runner.spark.job import Reported


class Stage(NamedTuple):
    """As in the handler of PySpark's progress."""

    stage_id: int
    num_tasks: int
    num_completed_tasks: int = 0
    done: bool = False


@pytest.mark.parametrize(
    ("stages", "running", "told"),
    [
        ([Stage(0, 3)], 0, "nothing"),
        ([Stage(0, 3, 1)], 2, "computing"),
        ([Stage(0, 2)], 2, "computing"),  # as many tasks as there are ranks
        ([Stage(0, 3, 3, True)], 0, "nothing"),
        ([Stage(0, 3, 3, True), Stage(1, 3), Stage(2, 2)], 0, "nothing"),  # adaptive execution: 1 is skipped
        ([Stage(0, 3, 3, True), Stage(1, 3), Stage(2, 2)], 2, "placed"),
        ([Stage(0, 3, 3, True), Stage(1, 3), Stage(2, 2, 1)], 1, "placed"),
        ([Stage(1, 2), Stage(0, 3)], 3, "computing"),  # without adaptive execution
        ([Stage(0, 3, 3, True), Stage(1, 5, 1), Stage(2, 2)], 3, "computing"),
        ([Stage(0, 3, 3, True), Stage(1, 5, 5, True), Stage(2, 2)], 2, "placed"),
    ],
)
def test_tasks_of_the_input_are_not_those_of_ranks(stages: list[Stage], running: int, told: str) -> None:
    reported = Reported(2, True)
    reported.note(stages, running)
    assert (reported.placed, reported.computing) == (told == "placed", told == "computing")


def test_without_input_all_tasks_are_of_ranks() -> None:
    reported = Reported(2, False)
    for running, placed in ((1, False), (2, True), (1, True)):
        reported.note([Stage(0, 2)], running)
        assert (reported.placed, reported.computing) == (placed, False)


def test_a_stage_that_looked_like_that_of_ranks_is_forgotten() -> None:
    reported = Reported(2, True)
    before = [Stage(0, 3, 3, True), Stage(1, 3), Stage(2, 2)]
    reported.note(before, 2)
    assert reported.placed
    reported.note([*before[:2], Stage(2, 2, 2, True), Stage(3, 3), Stage(4, 2), Stage(5, 2)], 0)
    assert not reported.placed
