"""Shards and steps: pure functions, so properties over many cases."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_hvd.data.readers.sharding import batch_rows, overlaps, rows_of, steps_of
from spark_hvd.data.readers.windows import Piece, even_rows, row_groups_of, windows_of

groups = st.lists(st.integers(1, 50), min_size=1, max_size=30)


def flat(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    return [(piece.group, row) for piece in pieces for row in range(piece.start, piece.stop)]


@given(groups, st.booleans(), st.integers(0, 9), st.integers(0, 3))
def test_row_groups_come_once_in_an_order_that_seed_and_epoch_decide(
    rows: list[int], shuffle: bool, seed: int, epoch: int
) -> None:
    found = row_groups_of(rows, shuffle=shuffle, seed=seed, epoch=epoch)
    assert sorted(flat(found)) == flat(row_groups_of(rows))
    assert found == row_groups_of(rows, shuffle=shuffle, seed=seed, epoch=epoch)
    assert shuffle or [piece.group for piece in found] == list(range(len(rows)))


def test_another_epoch_has_another_order() -> None:
    orders = {
        tuple(piece.group for piece in row_groups_of([5] * 20, shuffle=True, seed=1, epoch=epoch)) for epoch in range(5)
    }
    assert len(orders) == 5


@given(groups, st.lists(st.integers(0, 1500), max_size=8, unique=True).map(sorted))
def test_overlaps_are_the_rows_of_the_intervals(lengths: list[int], ends: list[int]) -> None:
    ends = [end for end in ends if end <= sum(lengths)]
    intervals = list(zip(ends[::2], ends[1::2], strict=False))
    line = [(number, row) for number, length in enumerate(lengths) for row in range(length)]
    found = [(number, row) for number, start, stop in overlaps(lengths, intervals) for row in range(start, stop)]
    assert found == [place for start, stop in intervals for place in line[start:stop]]


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_windows_are_even_and_a_power_of_two_in_number(rows: int, most: int) -> None:
    each = even_rows(rows, most)
    windows = -(-rows // each)
    assert 1 <= each <= most
    assert windows <= 2 * -(-rows // most)
    assert each * (1 << (windows - 1).bit_length()) >= rows
    assert even_rows(800, 300) == 200


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


@given(groups, st.integers(1, 120))
def test_windows_keep_rows_and_their_order_and_are_bounded(lengths: list[int], rows: int) -> None:
    pieces = row_groups_of(lengths, shuffle=True)
    windows = list(windows_of(pieces, rows))
    assert all(0 < sum(piece.rows for piece in window) <= rows for window in windows)
    assert flat(piece for window in windows for piece in window) == flat(pieces)
