"""Shards and steps: pure functions, so properties over many cases."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_hvd.estimators.readers.sharding import Piece, batch_rows, pieces_of, rows_of, steps_of
from spark_hvd.estimators.readers.windows import windows_of

groups = st.lists(st.integers(1, 50), min_size=1, max_size=30)
case = st.fixed_dictionaries(
    {"group_rows": groups, "size": st.integers(1, 12), "shuffle": st.booleans(), "seed": st.integers(0, 9)}
)


def _shards(case: dict[str, Any], number: int = 0) -> list[list[Piece]]:
    return [pieces_of(rank=rank, number=number, **case) for rank in range(case["size"])]


@given(case, st.integers(0, 3))
def test_shards_cover_every_row_once(case: dict[str, Any], number: int) -> None:
    shards = _shards(case, number)
    rows = [(piece.group, row) for shard in shards for piece in shard for row in range(piece.start, piece.stop)]
    assert sorted(rows) == [(group, row) for group, count in enumerate(case["group_rows"]) for row in range(count)]
    total = sum(case["group_rows"])
    assert [sum(piece.rows for piece in shard) for shard in shards] == [
        rows_of(total, rank, case["size"]) for rank in range(case["size"])
    ]
    assert all(piece.rows > 0 for shard in shards for piece in shard)
    if not case["shuffle"]:
        assert rows == sorted(rows)


@given(case)
def test_shards_are_the_same_for_a_seed_and_pass(case: dict[str, Any]) -> None:
    assert _shards(case, 1) == _shards(case, 1)


def test_another_pass_has_another_order() -> None:
    orders = {
        tuple(piece.group for piece in pieces_of([5] * 20, 0, 1, shuffle=True, seed=1, number=number))
        for number in range(5)
    }
    assert len(orders) == 5


@given(st.integers(1, 1000), st.integers(1, 12), st.integers(1, 100), st.booleans())
def test_ranks_take_equal_steps(rows: int, size: int, batch_size: int, drop_last: bool) -> None:
    if rows < size:
        with pytest.raises(ValueError, match="expected at least one row for each"):
            steps_of(rows, size, batch_size, drop_last)
        return
    steps = steps_of(rows, size, batch_size, drop_last)
    for rank in range(size):
        sizes = batch_rows(rows, rank, size, batch_size, drop_last)
        assert len(sizes) == steps >= 1
        assert min(sizes) >= 1
        assert all(each == batch_size for each in sizes[:-1])
        if drop_last:
            assert sizes[-1] == min(batch_size, rows_of(rows, rank, size))
        else:
            assert sizes[-1] <= batch_size + 1
            assert sum(sizes) == rows_of(rows, rank, size)


def test_the_last_batch_takes_the_row_that_is_over() -> None:
    assert batch_rows(21, 0, 2, 5) == [5, 6]
    assert batch_rows(21, 1, 2, 5) == [5, 5]
    assert batch_rows(23, 0, 2, 5) == [5, 5, 2]
    assert batch_rows(23, 0, 2, 5, drop_last=True) == [5, 5]
    assert batch_rows(23, 0, 2, 50, drop_last=True) == [12]


@given(case, st.integers(1, 120))
def test_windows_keep_rows_and_their_order_and_are_bounded(case: dict[str, Any], rows: int) -> None:
    for shard in _shards(case):
        windows = list(windows_of(shard, rows))
        assert all(0 < sum(piece.rows for piece in window) <= rows for window in windows)
        flat = [(piece.group, row) for window in windows for piece in window for row in range(piece.start, piece.stop)]
        assert flat == [(piece.group, row) for piece in shard for row in range(piece.start, piece.stop)]
