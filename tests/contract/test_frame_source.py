"""The rows of a DataFrame on the disks of several ranks form one order per epoch, whatever the number of ranks."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_hvd.data.bucketing import BUCKET, BUCKETS, ID, STRIDE, buckets_of, moves_of
from spark_hvd.data.frame import FrameSource
from spark_hvd.data.readers.feed import Feed
from spark_hvd.data.readers.forms import TableForm
from spark_hvd.data.readers.sharding import Position
from spark_hvd.data.source import ReadOptions
from spark_hvd.data.spool import Spool, SpoolWriter, spool_table

PARTITIONS = 3


def sources(folder: Path, rows: int, size: int) -> list[FrameSource]:
    """Return what each of ``size`` ranks has of a DataFrame with three partitions, in chunks of a few rows."""
    number = np.arange(rows)
    ids = (number % PARTITIONS << 33) + number // PARTITIONS
    buckets = (number // PARTITIONS * STRIDE + number % PARTITIONS * 977) % BUCKETS
    spools = []
    parts = tuple(reversed(range(size)))  # ranks are numbered by host, and tasks are not
    for part in parts:
        mine = buckets_of(part, size)
        here = np.random.default_rng(rows).permutation(np.flatnonzero((buckets >= mine.start) & (buckets < mine.stop)))
        place = tempfile.mkdtemp(dir=folder) + "/rows"
        writer = SpoolWriter(place, pa.schema({"row": pa.int64(), "half": pa.float64()}), chunk_rows=7)
        found = pa.table({BUCKET: buckets[here].astype(np.int32), ID: ids[here], "row": here, "half": here / 2})
        for batch in found.to_batches(max_chunksize=4):
            writer.write(batch)
        writer.close()
        spools.append(Spool(place))
    counts = np.sum([spool.counts for spool in spools], axis=0)
    brought: dict[int, SpoolWriter] = {}
    for move in itertools.chain(*moves_of(counts, counts, parts, [spool.local_buckets for spool in spools], 2)):
        if move.target not in brought:
            brought[move.target] = SpoolWriter(f"{spools[move.target].folder}-more", spools[move.target].schema)
        brought[move.target].write(spools[move.source].rows(*move[2:]))
    for rank, writer in brought.items():
        writer.close()
        spools[rank] = Spool(str(spools[rank].folder), f"{spools[rank].folder}-more")
    return [FrameSource(spool, counts, parts, part, window_rows=50) for spool, part in zip(spools, parts, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frames")


def rows_of(batch: pa.RecordBatch) -> list[int]:
    found: list[int] = batch.column("row").to_pylist()
    return found


def in_line(folder: Path, size: int, options: ReadOptions, epoch: int, rows: int) -> list[int]:
    """Return an epoch's rows in order, from what ``size`` ranks read and tell each other."""
    line: dict[int, int] = {}
    for rank, source in enumerate(sources(folder, rows, size)):
        sharding = source.sharding(7, False, options)
        share, sizes = (part(Position(epoch), rank, size) for part in (sharding.share, sharding.batches))
        batches = source.open(options, TableForm()).batches(epoch, share, sizes)
        before: set[int] = set()
        for number, row in enumerate(row for batch in batches for row in rows_of(batch)):
            taken = {place for one in sharding.taken(Position(epoch), rank, size, number + 1) for place in range(*one)}
            (place,) = taken - before
            line[place], before = row, taken
    return [line[place] for place in range(rows)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_does_not_depend_on_the_number_of_ranks(folder: Path, shuffle: bool) -> None:
    options = ReadOptions(columns=("row",), shuffle=shuffle, seed=3)
    line = in_line(folder, 1, options, 1, 120)
    assert sorted(line) == list(range(120))
    assert in_line(folder, 2, options, 1, 120) == in_line(folder, 5, options, 1, 120) == line
    assert (in_line(folder, 1, options, 2, 120) == line) is not shuffle
    assert in_line(folder, 2, ReadOptions(columns=("row",), shuffle=shuffle, seed=4), 1, 120) != line or not shuffle


def test_rows_that_share_a_batch_do_not_in_the_next_epoch(tmp_path: Path) -> None:
    spool_table(str(tmp_path / "rows"), pa.table({"row": np.arange(40 * BUCKETS)}))  # buckets of about a batch
    spool = Spool(str(tmp_path / "rows"))
    source = FrameSource(spool, spool.counts, (0,), 0, spool.window_rows)
    options = ReadOptions(columns=("row",), shuffle=True)
    batches = [
        list(source.open(options, TableForm()).batches(epoch, [(0, source.rows)], [40] * (source.rows // 40)))
        for epoch in range(2)
    ]
    later = {row: at for at, batch in enumerate(batches[1]) for row in rows_of(batch)}
    together = [max(Counter(later[row] for row in rows_of(batch)).values()) for batch in batches[0]]
    assert max(together) <= 5


@given(
    rows=st.integers(1, 300),
    batch_size=st.integers(1, 20),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_every_row_comes_once_whatever_happens_to_the_ranks(
    folder: Path, rows: int, batch_size: int, worlds: list[tuple[int, int]], shuffle: bool, drop_last: bool
) -> None:
    options, position, seen = ReadOptions(columns=("row",), shuffle=shuffle), Position(2), []
    for size, batches in worlds:
        feeds = list(_feeds(folder, rows, size, batch_size, drop_last, options, position))
        if not feeds:
            return
        assert len({feed.left for feed in feeds}) == 1, "ranks take equal steps"
        for _ in range(min(batches, feeds[0].left)):
            taken = [rows_of(next(feed)) for feed in feeds]
            assert all(taken)
            seen += itertools.chain(*taken)
        (position,) = {feed.position for feed in feeds}
        if position.epoch != 2:
            drops = drop_last and rows // size >= batch_size  # otherwise the only batch is not dropped
            assert len(worlds) > 1 or drops or sorted(seen) == list(range(rows))
            break
    assert len(seen) == len(set(seen))


def _feeds(
    folder: Path, rows: int, size: int, batch_size: int, drop_last: bool, options: ReadOptions, position: Position
) -> Iterator[Feed[pa.RecordBatch]]:
    """One for each rank; none for a rank without rows."""
    for rank, source in enumerate(sources(folder, rows, size)):
        sharding = source.sharding(batch_size, drop_last, options)
        if not sharding.batches(position, rank, size):
            return
        yield Feed(source.open(options, TableForm()), sharding, rank, size, position)


CASES = [
    # By day each pair of any two occurs. Of 170 rows, ranks have 86 and 84: batches of 7 and 2, and of 7 and 6.
    pytest.param(shuffle, rows, stops, marks=pytest.mark.slow if (a + b + c) % 2 else ())
    for (a, shuffle), (b, rows), (c, stops) in itertools.product(
        enumerate([False, True]), enumerate([230, 170]), enumerate([[1], [5, 2], [3, 1, 8]])
    )
]


@pytest.mark.parametrize(("shuffle", "rows", "stops"), CASES)
def test_as_many_ranks_as_before_go_on_with_the_batches_that_were_left(
    folder: Path, shuffle: bool, rows: int, stops: list[int]
) -> None:
    options = ReadOptions(columns=("row",), shuffle=shuffle, seed=1)
    feeds = _feeds(folder, rows, 2, 7, False, options, Position(1))
    unbroken = [[rows_of(batch) for batch in itertools.islice(feed, feed.left)] for feed in feeds]
    position = Position(1)
    read: list[list[list[int]]] = [[], []]
    for batches in [*stops, None]:
        again = list(_feeds(folder, rows, 2, 7, False, options, position))
        for feed, found in zip(again, read, strict=True):
            found += [rows_of(batch) for batch in itertools.islice(feed, batches or feed.left)]
        (position,) = {feed.position for feed in again}
    assert read == unbroken
    assert position == Position(2)


@pytest.mark.parametrize("rows", [1000, 1001, 1019, 442, 9])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_ranks_differ_by_a_row_at_most_and_take_the_steps_of_an_equal_share(folder: Path, rows: int, size: int) -> None:
    source = sources(folder, rows, size)[0]
    for batch_size in (1, 4, 10, 50):
        sharding = source.sharding(batch_size, False, ReadOptions(columns=("row",)))
        sizes = [sharding.batches(Position(), rank, size) for rank in range(size)]
        assert {sum(each) for each in sizes} <= {rows // size, -(-rows // size)}
        assert [len(each) for each in sizes] == [-(-(rows // size) // batch_size)] * size
        assert all(each[:-1] == [batch_size] * (len(each) - 1) for each in sizes)
        last = [each[-1] for each in sizes]
        assert max(last) - min(last) <= 1
        whole = source.sharding(batch_size, True, ReadOptions(columns=("row",)))
        full = [whole.batches(Position(), rank, size) for rank in range(size)]
        assert full == [[min(batch_size, sum(each))] * max(1, rows // size // batch_size) for each in sizes]


def test_only_the_columns_asked_for(folder: Path) -> None:
    (source,) = sources(folder, 20, 1)
    assert source.schema.names == ["row", "half"]
    options = ReadOptions(columns=("half", "row"))
    (batch,) = source.open(options, TableForm()).batches(0, [(0, 20)], [20])
    assert batch.schema.names == ["half", "row"]
    assert batch.column("half").to_pylist() == [row / 2 for row in rows_of(batch)]
