"""Rows of a DataFrame on a task's disk: unchanged, in the requested order, whatever order they arrived in."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from spark_hvd.data.bucketing import BUCKETS, Piece, buckets_of, keys_of, mixing, order_of, windows_of
from spark_hvd.data.column_form import ColumnForm
from spark_hvd.data.columns import numpy_batch
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.spool import Spool, SpoolSource, SpoolWriter

SCHEMA = pa.schema([("x", pa.float32()), ("name", pa.string()), ("many", pa.list_(pa.int64()))])
ROWS = 5000


def rows_of(ids: np.ndarray[Any, Any]) -> pa.RecordBatch:
    """Some rows whose values follow from their ids, as Spark's tasks get them; some are null."""
    values = [
        pa.array((ids * 7 % BUCKETS).astype(np.int32)),
        pa.array(ids),
        pa.array(ids.astype(np.float32)),
        pa.array([None if i % 5 == 0 else f"row {i}" for i in ids], pa.string()),
        pa.array([[int(i)] * int(i % 4) for i in ids], pa.list_(pa.int64())),
    ]
    return pa.RecordBatch.from_arrays(values, names=["__bucket", "__id", *SCHEMA.names])


def written(folder: Path, order: np.ndarray[Any, Any], **limits: int) -> Spool:
    writer = SpoolWriter(str(folder), SCHEMA, **limits)
    for start in range(0, len(order), 700):
        writer.write(rows_of(order[start : start + 700]))
    writer.close()
    return Spool(str(folder))


@pytest.fixture(scope="module", params=[{}, {"chunk_rows": 1000}, {"chunk_rows": 1000, "plain_bytes": 100_000}])
def spool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spool]:
    """A spool of one chunk, of several, and of several of which only the first few are uncompressed."""
    order = np.random.default_rng(1).permutation(ROWS)
    return written(tmp_path_factory.mktemp("spool") / "rows", order, **request.param)


def ids_in(spool: Spool, pieces: list[Piece], seed: tuple[int, int] | None, window: int) -> list[int]:
    tables = list(spool.tables(pieces, seed, window))
    assert {table.schema for table in tables} <= {SCHEMA}
    read = pa.concat_tables(tables or [SCHEMA.empty_table()])
    ids = read.column("x").to_numpy().astype(np.int64)
    assert read == pa.Table.from_batches([rows_of(ids).drop_columns(["__bucket", "__id"])])  # rows are complete
    return ids.tolist()


def expected(pieces: list[Piece], seed: tuple[int, int] | None, window: int) -> list[int]:
    ids = np.arange(ROWS)
    line: list[int] = []
    for number, window_pieces in enumerate(windows_of(pieces, window)):
        rows: list[int] = []
        for bucket, first, _, rows_meant in window_pieces:
            own = ids[ids * 7 % BUCKETS == bucket]
            rows += own[np.argsort(keys_of(own, seed))][first : first + rows_meant].tolist()
        line += np.array(rows)[mixing(window_pieces, seed, number)].tolist()
    return line


@pytest.mark.parametrize(
    ("seed", "window"),
    [
        ((3, 4), 1),
        ((3, 4), 300),
        ((3, 4), 1 << 30),
        (None, 300),
        *(pytest.param(None, window, marks=pytest.mark.slow) for window in (1, 1 << 30)),
    ],
)
def test_the_line_of_an_epoch_depends_on_nothing_but_the_seed(
    spool: Spool, seed: tuple[int, int] | None, window: int
) -> None:
    own = [bucket for bucket in order_of(seed).tolist() if bucket in buckets_of(1, 3)]
    own = own[:300] if window == 1 else own
    whole = [(bucket, 0, 0, int(spool.counts[bucket])) for bucket in own]
    assert ids_in(spool, whole, seed, window) == expected(whole, seed, window)


def test_what_is_left_of_buckets_comes_in_their_order(spool: Spool) -> None:
    seed = (0, 7)
    pieces = [(bucket, 0, 1, int(spool.counts[bucket])) for bucket in (5, 4000, 903, 6) if spool.counts[bucket]]
    pieces.append((0, 0, 0, int(spool.counts[0])))
    assert ids_in(spool, pieces, seed, 1 << 20) == expected(pieces, seed, 1 << 20)


def test_every_row_is_counted_once(spool: Spool) -> None:
    assert spool.counts.tolist() == np.bincount(np.arange(ROWS) * 7 % BUCKETS, minlength=BUCKETS).tolist()
    assert spool.schema == SCHEMA
    again = pickle.dumps(spool)  # for a spawned process, which maps the files and gets no rows
    assert len(again) < 1000
    assert pickle.loads(again).counts.tolist() == spool.counts.tolist()


@pytest.mark.parametrize("limits", [{}, {"chunk_rows": 100}, {"chunk_rows": 100, "plain_bytes": 10_000}])
def test_numbers_lie_side_by_side_unless_some_are_null(tmp_path: Path, limits: dict[str, int]) -> None:
    ids = np.arange(600)
    half, twice = ids.astype(np.float32) / 2, ids.astype(np.float32) * 2
    table = pa.table(
        {
            "row": ids,
            "half": half,
            "holes": pa.array(twice, mask=(ids % 9 == 0) & (ids // 100 == 3)),  # in one chunk only
            "twice": twice,
            "text": [str(each) for each in ids],
        }
    )
    writer = SpoolWriter(str(tmp_path / "rows"), table.schema, **limits)
    for batch in table.to_batches(max_chunksize=50):
        at = batch.column("row").to_numpy()
        own = {"__bucket": pa.array((at * 7 % BUCKETS).astype(np.int32)), "__id": pa.array(at)}
        writer.write(pa.RecordBatch.from_pydict(own | dict(zip(table.column_names, batch.columns, strict=True))))
    writer.close()
    spool, names = Spool(str(tmp_path / "rows")), ["twice", "text", "row", "holes", "half"]
    pieces = [(bucket, 0, 0, int(spool.counts[bucket])) for bucket in order_of((1, 2)).tolist()]
    for window in spool.windows(pieces, (1, 2), 250, names):
        rows = window.column("row").to_numpy()
        assert pa.Table.from_batches([window.batch()]) == table.select(names).take(rows)
        form = ColumnForm(numpy_batch, {"wide": ["twice", "half"], "holed": ["half", "holes"]}, np.concatenate)
        part = form.of_batch(window, "")
        found = dict(zip(part.layout.names, part.layout.columns_of(part.blocks), strict=True))
        assert list(found) == ["wide", "holed", "row"]
        np.testing.assert_array_equal(found["wide"], np.stack([twice[rows], half[rows]], 1))
        holed = np.where((rows % 9 == 0) & (rows // 100 == 3), np.nan, twice[rows])
        np.testing.assert_array_equal(found["holed"], np.stack([half[rows], holed], 1))
        assert (found["row"] == rows).all()
        assert found["wide"].dtype == np.float32


def test_what_is_beyond_the_limit_is_compressed(tmp_path: Path) -> None:
    written(tmp_path / "rows", np.arange(ROWS), chunk_rows=1000, plain_bytes=1)
    sizes = [os.path.getsize(tmp_path / "rows" / f"{number:06}.arrow") for number in range(2)]
    with pa.ipc.open_file(tmp_path / "rows" / "000001.arrow") as reader:
        assert reader.num_record_batches > 100
    assert sizes[0] != sizes[1]


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows_are_no_special_case(tmp_path: Path, rows: int) -> None:
    spool = written(tmp_path / "rows", np.arange(rows))
    whole = [(bucket, 0, 0, int(spool.counts[bucket])) for bucket in range(BUCKETS)]
    assert ids_in(spool, whole, (1, 1), 1 << 20) == list(range(rows))
    assert spool.schema == SCHEMA


def test_a_full_disk_is_named_with_what_to_do(tmp_path: Path) -> None:
    writer = SpoolWriter(str(tmp_path / "rows"), SCHEMA)
    (tmp_path / "rows" / "000000.arrow").symlink_to("/dev/full")
    writer.write(rows_of(np.arange(10)))
    with pytest.raises(DataError, match=r"rows: the rows of the DataFrame cannot be kept here: .* 0 bytes") as caught:
        writer.close()
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert "spark.local.dir" in str(caught.value)


def test_a_rank_waits_for_its_rows(tmp_path: Path) -> None:
    writer = SpoolWriter(str(tmp_path / "rows"), SCHEMA)
    read: list[int] = []
    waiting = threading.Thread(
        target=lambda: read.append(int(SpoolSource(str(tmp_path / "rows"), 0, 2).open().counts.sum()))
    )
    waiting.start()
    writer.write(rows_of(np.arange(10)))
    assert not read
    writer.close()
    waiting.join()
    assert read == [10]


def test_a_rank_hears_why_its_rows_do_not_come(tmp_path: Path) -> None:
    source = SpoolSource(str(tmp_path / "rows"), 0, 2)
    with pytest.raises(DataError, match="kept here were deleted"):
        source.open()
    SpoolWriter(str(tmp_path / "rows"), SCHEMA).fail(ValueError("of the task's"))
    with pytest.raises(DataError, match="ValueError: of the task's"):
        source.open()
    with pytest.MonkeyPatch.context() as full:
        full.setattr(Path, "write_text", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        SpoolWriter(str(tmp_path / "others"), SCHEMA).fail(ValueError("of the task's"))
    with pytest.raises(DataError, match="disk takes no file"):
        SpoolSource(str(tmp_path / "others"), 0, 2).open()
    assert list(SpoolSource("", 1, 2).buckets) == list(range(BUCKETS // 2, BUCKETS))
