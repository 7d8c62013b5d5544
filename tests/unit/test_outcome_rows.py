"""Outcomes cut into rows and joined again."""

from __future__ import annotations

import random

import pytest

from spark_hvd.runner.outcome.rows import Failed, FailureKind, Ok, PickledOutcome, from_rows, to_rows


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 95])
def test_rows_join_in_any_order(size: int) -> None:
    packed = [PickledOutcome(rank, rank != 1, bytes([rank]) * size) for rank in range(3)]
    rows = [row for item in packed for row in to_rows(item, chunk_bytes=10)]
    assert all(len(chunk) <= 10 for *_, chunk in rows)
    random.Random(0).shuffle(rows)
    assert from_rows(rows) == packed


def test_open_gives_values_and_failures() -> None:
    failure = Failed(2, "h", FailureKind.EXIT, "the process exited with code 7 before fn returned")
    assert PickledOutcome.failed(failure).open() == failure
    assert PickledOutcome(1, True, b"\x80\x04K\x05.").open() == Ok(1, 5)


def test_a_value_that_the_hub_has_is_put_in_its_place() -> None:
    packed = [PickledOutcome(0, True, b"own"), PickledOutcome.handed_over(1)]
    rows = [row for item in packed for row in to_rows(item)]
    assert from_rows(rows, {1: b"large"}) == [PickledOutcome(0, True, b"own"), PickledOutcome(1, True, b"large")]
