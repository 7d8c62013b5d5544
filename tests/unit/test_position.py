"""The rest of a pass among other ranks: every row once, whatever the numbers are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_hvd.estimators.readers.feed import Feed
from spark_hvd.estimators.readers.position import Position, Shares
from spark_hvd.estimators.readers.reader import Batch
from spark_hvd.estimators.readers.sharding import batch_rows


class Numbers:
    """A reader of the numbers of a rank's rows, in an order that differs with rank and pass as a shuffled one does."""

    def __init__(self, shares: Shares, rank: int, size: int, opened: list[tuple[int, int]]) -> None:
        self.shares, self.rank, self.size, self.opened = shares, rank, size, opened
        opened.append((rank, size))

    def batches(self, number: int):  # type: ignore[no-untyped-def]
        start = sum(sum(batch_rows(self.shares.rows, r, self.size, self.shares.batch_size)) for r in range(self.rank))
        sizes = batch_rows(self.shares.rows, self.rank, self.size, self.shares.batch_size, self.shares.drop_last)
        total = sum(batch_rows(self.shares.rows, self.rank, self.size, self.shares.batch_size))
        order = torch.randperm(total, generator=torch.Generator().manual_seed(number * 100 + self.rank)) + start
        for batch in order[: sum(sizes)].split(sizes) if sum(sizes) else ():  # type: ignore[no-untyped-call]
            yield {"row": batch}

    def close(self) -> None:
        self.opened.remove((self.rank, self.size))


def feed(shares: Shares, rank: int, size: int, position: Position, opened: list[tuple[int, int]] | None = None) -> Feed:
    opened = [] if opened is None else opened

    def open_share(rank: int, size: int) -> Numbers:
        return Numbers(shares, rank, size, opened)

    return Feed(open_share(rank, size), open_share, shares, rank, size, position)


def rows_of_batch(batch: Batch) -> list[int]:
    return batch["row"].tolist()


@given(
    rows=st.integers(8, 90),
    batch_size=st.integers(1, 9),
    sizes=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 12)), min_size=1, max_size=4),
)
@settings(max_examples=150)
def test_every_row_comes_once_whatever_happens_to_the_ranks(
    rows: int, batch_size: int, sizes: list[tuple[int, int]]
) -> None:
    shares, position, seen, last = Shares(rows, batch_size), Position(3), [], 8
    for size, batches in [*sizes, (1, 1000)]:
        last = size
        feeds = [feed(shares, rank, size, position) for rank in range(size)]
        for _ in range(batches):
            if feeds[0].position.number != 3:
                break
            seen += [row for each in feeds for row in rows_of_batch(next(each))]
        assert len({each.position for each in feeds}) == 1, "ranks agree"
        position = feeds[0].position
        if position.number != 3:
            break
    assert position == Position(4), "the next pass starts as ever"
    assert len(set(seen)) == len(seen)
    assert rows - len(seen) < max(last, 1), "fewer rows than ranks are left out"


def test_the_same_number_of_ranks_goes_on_to_the_bit() -> None:
    shares = Shares(50, 4)
    whole = [feed(shares, rank, 3, Position()) for rank in range(3)]
    expected = [[rows_of_batch(next(each)) for _ in range(12)] for each in whole]
    for done in range(11):
        first = [feed(shares, rank, 3, Position()) for rank in range(3)]
        for each in first:
            for _ in range(done):
                next(each)
        plain = first[0].position.to_json()
        again = [feed(shares, rank, 3, Position.from_json(plain)) for rank in range(3)]
        assert [[rows_of_batch(next(each)) for _ in range(12 - done)] for each in again] == [
            batches[done:] for batches in expected
        ]


def test_readers_of_others_shares_are_closed() -> None:
    shares, opened = Shares(40, 4), []  # type: ignore[var-annotated]
    mine = feed(shares, 1, 2, Position(0, ((4, 1),)), opened)
    next(mine)
    assert opened[0] == (1, 2)
    assert len(opened) == 2
    while mine.position.number == 0:
        next(mine)
    assert opened == [(1, 2)]
    mine = feed(shares, 1, 2, Position(0, ((4, 1),)), opened)
    next(mine)
    mine.skip(1)
    assert len(opened) == 2, "its own, and that of the one before"


def test_skipping_is_as_good_as_reading() -> None:
    shares = Shares(50, 4)
    for position in (Position(), Position(0, ((2, 3),)), Position(1, ((4, 1), (5, 2)))):
        read, skipped = (feed(shares, 0, 3, position) for _ in range(2))
        for _ in range(9):
            next(read)
        skipped.skip(9)
        assert (skipped.position, skipped.given) == (read.position, read.given)
        assert rows_of_batch(next(skipped)) == rows_of_batch(next(read))


def test_full_batches_only_where_the_rest_is_dropped() -> None:
    shares, position = Shares(50, 4, drop_last=True), Position(0, ((2, 2),))
    sizes = [len(rows_of_batch(next(each))) for each in [feed(shares, rank, 3, position) for rank in range(3)]]
    assert sizes == [4, 4, 4]
    assert shares.left(((2, 2),)) == 32, "of 50 rows, 2 were dropped and 16 done"
    assert [len(shares.batches(((2, 2),), rank, 3)) for rank in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("position", [Position(), Position(2, ((3, 4), (2, 1)))])
def test_a_position_is_plain_data(position: Position) -> None:
    assert Position.from_json(position.to_json()) == position
