"""An epoch is shared among ranks: every row once, however their number changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spark_hvd.data.readers.feed import Feed
from spark_hvd.data.readers.reader import Batch, Reader
from spark_hvd.data.readers.sharding import Interval, Position, Sharding


class Numbers(Reader[Batch]):
    """A reader of row numbers, in an order that changes with the epoch, like a shuffled one."""

    def __init__(self, rows: int) -> None:
        self.rows, self.left_early = rows, 0

    def batches(self, epoch: int, share: Sequence[Interval], sizes: Sequence[int]):  # type: ignore[no-untyped-def]
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(epoch))
        mine = torch.cat([order[start:stop] for start, stop in share])
        try:
            for batch in mine[: sum(sizes)].split(list(sizes)):  # type: ignore[no-untyped-call]
                yield {"row": batch}
        except GeneratorExit:
            self.left_early += 1
            raise

    def close(self) -> None:
        pass


def feed(sharding: Sharding, rank: int, size: int, position: Position) -> Feed[Batch]:
    return Feed(Numbers(sharding.rows), sharding, rank, size, position)


def rows_of_batch(batch: Batch) -> list[int]:
    found: list[int] = batch["row"].tolist()
    return found


def rows_in(intervals: Iterable[Interval]) -> list[int]:
    return [row for start, stop in intervals for row in range(start, stop)]


worlds = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 12)), min_size=1, max_size=4)


@given(rows=st.integers(8, 90), batch_size=st.integers(1, 9), sizes=worlds)
def test_every_row_comes_once_whatever_happens_to_the_ranks(
    rows: int, batch_size: int, sizes: list[tuple[int, int]]
) -> None:
    sharding, position, seen, last = Sharding(rows, batch_size), Position(3), [], 8
    for size, batches in [*sizes, (1, 1000)]:
        last = size
        feeds = [feed(sharding, rank, size, position) for rank in range(size)]
        for _ in range(batches):
            if feeds[0].position.epoch != 3:
                break
            seen += [row for each in feeds for row in rows_of_batch(next(each))]
        assert len({each.position for each in feeds}) == 1, "ranks agree"
        position = feeds[0].position
        if position.epoch != 3:
            break
    assert position == Position(4), "the next epoch starts as ever"
    assert len(set(seen)) == len(seen)
    assert rows - len(seen) < max(last, 1), "fewer rows than ranks are left out"


@given(rows=st.integers(1, 200), batch_size=st.integers(1, 20), sizes=worlds, drop_last=st.booleans())
def test_as_many_ranks_go_on_with_the_same_rows(
    rows: int, batch_size: int, sizes: list[tuple[int, int]], drop_last: bool
) -> None:
    sharding, position = Sharding(rows, batch_size, drop_last), Position()
    for size, batches in sizes:
        left = sorted(set(range(rows)) - set(rows_in(position.done)))
        shares = [rows_in(sharding.share(position, rank, size)) for rank in range(size)]
        counts = [sharding.batches(position, rank, size) for rank in range(size)]
        assert sorted(row for share in shares for row in share) == left
        assert len(set(map(len, counts))) == 1
        position = sharding.after(position, batches, size)
        if position.epoch:
            assert batches >= len(counts[0])
            return
        for rank in range(size):
            assert sharding.batches(position, rank, size) == counts[rank][batches:]
            assert rows_in(sharding.share(position, rank, size)) == shares[rank][sum(counts[rank][:batches]) :]
        assert Position.from_json(position.to_json()) == position


def test_a_feed_goes_on_to_the_bit() -> None:
    sharding = Sharding(50, 4)
    whole = [feed(sharding, rank, 3, Position()) for rank in range(3)]
    expected = [[rows_of_batch(next(each)) for _ in range(12)] for each in whole]
    for done in range(11):
        first = [feed(sharding, rank, 3, Position()) for rank in range(3)]
        for each in first:
            for _ in range(done):
                next(each)
        again = [feed(sharding, rank, 3, Position.from_json(first[0].position.to_json())) for rank in range(3)]
        assert [[rows_of_batch(next(each)) for _ in range(12 - done)] for each in again] == [
            batches[done:] for batches in expected
        ]


def test_skipping_is_as_good_as_reading() -> None:
    sharding = Sharding(50, 4)
    for position in (Position(), Position(0, ((0, 12), (20, 26))), Position(1, ((4, 8), (10, 12)))):
        read, skipped = (feed(sharding, 0, 3, position) for _ in range(2))
        for _ in range(9):
            next(read)
        skipped.skip(9)
        assert (skipped.position, skipped.given) == (read.position, read.given)
        assert rows_of_batch(next(skipped)) == rows_of_batch(next(read))


def test_a_reader_is_left_to_end_and_closed_when_it_is_skipped() -> None:
    reader = Numbers(20)
    mine = Feed(reader, Sharding(20, 5), 0, 2, Position())
    next(mine), next(mine)
    assert (mine.position, reader.left_early) == (Position(1), 0)
    next(mine)
    mine.skip(1)
    assert (mine.position, reader.left_early) == (Position(2), 1)


def test_full_batches_only_where_the_rest_is_dropped() -> None:
    sharding, position = Sharding(50, 4, drop_last=True), Position(0, ((0, 8), (25, 33)))
    assert [sharding.batches(position, rank, 3) for rank in range(3)] == [[4, 4]] * 3, "34 rows are left"


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_fewer_rows_than_ranks_are_left_out(rows: int) -> None:
    sharding = Sharding(10 + rows, 5)
    assert sharding.batches(Position(0, ((0, 10),)), 0, 3) == []
    assert feed(sharding, 0, 3, Position(0, ((0, 10),))).position == Position(1)
