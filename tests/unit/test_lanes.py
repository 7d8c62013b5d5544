"""Global batches are the same rows on any number of ranks, in an order that a pure function of counts determines."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_hvd.data.readers.sharding import (
    RANKS_TOGETHER,
    Interval,
    Position,
    Sharding,
    cut_at,
    gaps_of,
    lane_order,
    lanes_of,
    length,
)
from spark_hvd.data.readers.windows import EpochLine, runs_of

Rows = list[tuple[int, int]]
"""Rows identified by the number of their row group and their own number in it."""

lane_counts = st.sampled_from([1, 2, 4, 12])


def rows_in(intervals: Iterable[Interval]) -> list[int]:
    return [row for start, stop in intervals for row in range(start, stop)]


def steps_in(rows: list[Any], sizes: list[int]) -> list[list[Any]]:
    left = iter(rows)
    return [list(itertools.islice(left, size)) for size in sizes]


def taken(sharding: Sharding, position: Position, size: int) -> list[list[list[int]]]:
    """Return the positions in the order that each rank takes in each step."""
    ranks = range(size)
    return [
        steps_in(rows_in(sharding.share(position, rank, size)), sharding.batches(position, rank, size))
        for rank in ranks
    ]


def together(ranks: list[list[list[Any]]]) -> list[list[Any]]:
    """Return the rows of each global batch."""
    return [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)]


@given(rows=st.integers(12, 400), each=st.integers(1, 5), lanes=lane_counts, drop_last=st.booleans())
def test_the_same_global_batches_on_any_number_of_ranks(rows: int, each: int, lanes: int, drop_last: bool) -> None:
    found, full = [], 12 * each
    for size in (1, 2, 3, 4, 6, 12):
        if size <= max(lanes, RANKS_TOGETHER):
            ranks = taken(Sharding(rows, full // size, drop_last, lanes), Position(), size)
            found.append(together(ranks))
            places = list(itertools.chain(*found[-1]))
            assert len(set(places)) == len(places)
            assert drop_last or len(places) == rows
            assert {len(step) for rank in ranks for step in rank[:-1]} <= {full // size}
    # The remainder is its own step if each rank has a row of it; otherwise it belongs to the step before.
    whole = [batches[: rows // full - 1] for batches in found]
    assert all(batches == whole[0] for batches in whole)
    if drop_last or rows % full == 0 or rows % full >= 12:
        assert all(batches == found[0] for batches in found)


@given(
    rows=st.integers(1, 250),
    batch_size=st.integers(1, 7),
    lanes=lane_counts,
    drop_last=st.booleans(),
    worlds=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 6)), min_size=1, max_size=4),
)
def test_every_row_comes_once_in_an_epoch_whose_ranks_change(
    rows: int, batch_size: int, lanes: int, drop_last: bool, worlds: list[tuple[int, int]]
) -> None:
    sharding, position = Sharding(rows, batch_size, drop_last, lanes), Position()
    for size, batches in worlds:
        left = rows_in(gaps_of(rows, position.done))
        ranks = taken(sharding, position, size)
        assert (len(ranks[0]) == 0) == (len(left) < size)
        after = sharding.after(position, batches, size)
        if after.epoch:
            return
        seen = list(itertools.chain(*together(ranks)[:batches]))
        assert sorted(seen + rows_in(gaps_of(rows, after.done))) == left, "each row is done or left"
        assert taken(sharding, after, size) == [steps[batches:] for steps in ranks], "as many ranks go on to the bit"
        position = after


@given(
    rows=st.integers(24, 300),
    each=st.integers(1, 4),
    lanes=lane_counts,
    done=st.integers(1, 5),
    sizes=st.permutations([1, 2, 3, 4]),
)
def test_global_batches_stay_the_same_where_ranks_change_within_an_epoch(
    rows: int, each: int, lanes: int, done: int, sizes: list[int]
) -> None:
    rows -= rows % 12
    expected = together(taken(Sharding(rows, 12 * each, lanes=lanes), Position(), 1))
    position, found = Position(), []
    for size in sizes:
        sharding = Sharding(rows, 12 * each // size, lanes=lanes)
        found += together(taken(sharding, position, size))[:done]
        position = sharding.after(position, done, size)
        if position.epoch:
            break
    assert found == expected[: len(found)]


groups_of_rows = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def order(line: EpochLine, share: Any) -> Rows:
    """Return the rows that a reader yields, by its rounds."""
    found: Rows = []
    for one in line.rounds(share):
        rows = [(piece.group, row) for piece in one.pieces for row in range(piece.start, piece.stop)]
        places = one.places()
        assert sorted(places[places >= 0].tolist()) == list(range(one.rows))
        by_place = {place: row for place, row in zip(places.tolist(), rows, strict=True) if place >= 0}
        found += [by_place[place] for place in range(one.rows)]
    return found


@given(
    groups=groups_of_rows,
    window=st.integers(1, 200),
    size=st.integers(1, 13),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 2),
    shuffle=st.booleans(),
    chunk=st.sampled_from([0, 3, 16]),
)
def test_ranks_read_every_row_once(
    groups: list[int], window: int, size: int, seed: int, epoch: int, shuffle: bool, chunk: int
) -> None:
    lanes = lanes_of(groups)
    line = EpochLine(groups, lanes, window, shuffle=shuffle, seed=seed, epoch=epoch, drawn=epoch, chunk=chunk)
    rows = sum(groups)
    if rows < size:
        return
    sharding, position = Sharding(rows, 5, lanes=lanes), Position()
    sharding_done = sharding.after(position, 2, 3) if rows > 40 else position
    ranks = [order(line, sharding.share(position, rank, size)) for rank in range(size)]
    every = [(group, row) for group, count in enumerate(groups) for row in range(count)]
    assert sorted(itertools.chain(*ranks)) == every
    rest = [order(line, sharding.share(sharding_done, rank, size)) for rank in range(size)]
    assert len(set(itertools.chain(*rest))) == sum(map(len, rest)) == rows - length(sharding_done.done)
    whole = EpochLine(groups, lanes, window, shuffle=shuffle, seed=seed, epoch=epoch, drawn=epoch)
    assert [order(whole, sharding.share(position, rank, size)) for rank in range(size)] == ranks, (
        "chunks change nothing"
    )
    for rank in range(size):
        share = sharding.share(sharding_done, rank, size)
        read = list(itertools.chain(*line.runs(share)))
        asked = [(number, piece) for number, one in enumerate(line.rounds(share)) for piece in one.pieces]
        assert sorted(read, key=str) == sorted(asked, key=str)
        assert all(a <= b for run in line.runs(share) for (a, _), (b, _) in itertools.pairwise(run)), "read in turn"
        if lanes * line.height <= max(lanes, window):
            assert all(sum(one.windows.values()) <= max(lanes, window) for one in line.rounds(share))


@pytest.mark.parametrize(("groups", "size", "most"), [(64, 2, 34), (64, 4, 18), (64, 3, 36), (240, 3, 88), (16, 2, 9)])
def test_a_rank_reads_its_lanes_and_little_else(groups: int, size: int, most: int) -> None:
    counts = [100] * groups
    line = EpochLine(counts, lanes_of(counts), 800, shuffle=True, seed=1, epoch=0, drawn=0)
    sharding = Sharding(sum(counts), 48 // size, lanes=lanes_of(counts))
    for rank in range(size):
        share = sharding.share(Position(), rank, size)
        read = {piece.group for one in line.rounds(share) for piece in one.pieces}
        assert len(read) <= most


def test_one_rank_reads_a_row_group_at_the_border_of_two_lanes_once() -> None:
    counts = [100] * 18
    line = EpochLine(counts, 4, 800, shuffle=True, seed=1, epoch=0, drawn=0)
    share = Sharding(1800, 10, lanes=4).share(Position(), 0, 1)
    in_rounds = {(number, piece.group) for number, one in enumerate(line.rounds(share)) for piece in one.pieces}
    runs = [run for run in line.runs(share) if len(run) > 1]  # kept until then if it continues in the next window
    again = sum(len(run) - 1 for run in runs)
    assert len(in_rounds) - again == 18


def test_of_a_large_row_group_the_larger_part_is_the_first() -> None:
    line = EpochLine([100, 50], 2, 10, shuffle=False, seed=0, epoch=0, drawn=0)
    share = Sharding(150, 10, lanes=2).share(Position(), 0, 1)
    parts = sorted((piece.start, piece.stop) for one in line.rounds(share) for piece in one.pieces if not piece.group)
    assert (parts[0][0], parts[-1][1]) == (0, 100)
    assert any(stop == 75 for _, stop in parts)


def test_how_many_lanes_a_line_has() -> None:
    assert [lanes_of([10] * groups) for groups in (1, 2, 7, 8, 191, 192)] == [1, 2, 2, 4, 4, 12]
    assert lanes_of([1000, *[1] * 100]) == 1, "one row group has nearly all rows"
    assert [lane_order(lanes).tolist() for lanes in (1, 2, 4)] == [[0], [0, 1], [0, 2, 1, 3]]
    halves = lane_order(12) % 2
    assert halves.tolist() == [0] * 6 + [1] * 6, "two ranks have a half of the line each"


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=10), st.lists(st.tuples(st.integers(0, 150), st.integers(1, 50)))
)
def test_intervals_are_cut_at_edges(lengths: list[int], asked: list[tuple[int, int]]) -> None:
    edges = np.cumsum([0, *lengths])
    asked = [(start, min(start + rows, int(edges[-1]))) for start, rows in asked if start < edges[-1]]
    bounds = np.array(asked, np.int64).reshape(-1, 2)
    number, starts, stops = cut_at(bounds[:, 0], bounds[:, 1], edges)
    assert rows_in(zip(starts.tolist(), stops.tolist(), strict=True)) == rows_in(asked)
    assert (edges[number] <= starts).all()
    assert (stops <= edges[number + 1]).all()
    assert (starts < stops).all()


def test_runs_go_on_in_later_rounds_only() -> None:
    line = EpochLine([6, 2], 1, 4, shuffle=False, seed=0, epoch=0, drawn=0)
    (first, second) = line.rounds([(0, 8)])
    a, b, c = *first.pieces, *second.pieces
    assert list(runs_of([(0, a), (1, b), (1, c)])) == [[(0, a), (1, b)], [(1, c)]]
    assert list(runs_of([(1, a), (0, b)])) == [[(1, a)], [(0, b)]]
