"""The same seed and the same global batch give the same global batches on 1, 2, 3 and 4 ranks, and each row once."""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from spark_hvd.data.column_form import ColumnForm
from spark_hvd.data.columns import numpy_batch
from spark_hvd.data.readers import dataset
from spark_hvd.data.readers.feed import Feed
from spark_hvd.data.readers.forms import TableForm
from spark_hvd.data.readers.sharding import Position, lane_order, rows_of
from spark_hvd.data.source import ParquetSource, ReadOptions, parquet_source
from spark_hvd.estimators.training.rows import validation_rows
from spark_hvd.store import Store
from tests.contract.reader_data import every, numbered, opened, write

FULL = 24
"""Rows of a global batch."""


def source(folder: Path, rows: int, group_rows: int) -> ParquetSource:
    folder.mkdir()
    table = pa.table({"row": np.arange(rows), "text": [f"text {row}" for row in range(rows)]})
    for number, start in enumerate(range(0, rows, -(-rows // 2))):
        pq.write_table(table.slice(start, -(-rows // 2)), folder / f"{number}.parquet", row_group_size=group_rows)
    return parquet_source(folder)


def feeds(of: ParquetSource, size: int, options: ReadOptions, position: Position, form: Any = None) -> list[Feed[Any]]:
    sharding = of.sharding(FULL // size, False, options)
    make = form or (lambda: ColumnForm(numpy_batch, None, np.concatenate))
    return [Feed(of.open(options, make()), sharding, rank, size, position) for rank in range(size)]


def batches_of(ranks: list[Feed[Any]], most: int = 10**6) -> list[list[int]]:
    """Return the rows of global batches, to the end of the epoch or this many."""
    found, epoch = [], ranks[0].position.epoch
    while len(found) < most and ranks[0].position.epoch == epoch:
        found.append(sorted(itertools.chain(*(next(each)["row"].tolist() for each in ranks))))
    return found


CASES = [
    # By day each pair of any two occurs.
    pytest.param(*data, order, window_rows, marks=pytest.mark.slow if (a + b + c) % 2 else ())
    for (a, data), (b, order), (c, window_rows) in itertools.product(
        enumerate([(240, 13), (250, 200), (247, 50), (80, 1)]),
        enumerate(["shuffled", "in order", "in order, large"]),
        enumerate([None, 70]),
    )
]


@pytest.mark.parametrize(("rows", "group_rows", "order", "window_rows"), CASES)
def test_any_number_of_ranks(
    tmp_path: Path, rows: int, group_rows: int, order: str, window_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if order == "in order, large":
        monkeypatch.setattr(dataset, "SMALL_BYTES", 0)
    of = source(tmp_path / "data", rows, group_rows)
    options = ReadOptions(columns=("row",), shuffle=order == "shuffled", seed=3, window_rows=window_rows)
    for epoch in (0, 1):
        one, *others = (batches_of(feeds(of, size, options, Position(epoch))) for size in (1, 2, 3, 4))
        seen = list(itertools.chain(*one))
        assert sorted(seen) == list(range(rows))
        assert all(other == one for other in others)
        lanes = of.dataset.lanes(options.shuffle)
        assert order != "in order" or lanes == 1
        if not options.shuffle:
            lane_of = np.searchsorted(
                np.cumsum([rows_of(rows, each, lanes) for each in lane_order(lanes)]), seen, "right"
            )
            for lane in range(lanes):
                assert np.all(np.diff(np.array(seen)[lane_of == lane]) > 0), "each lane in the order of the files"
            assert lanes > 1 or seen == list(range(rows))


@pytest.mark.parametrize("form", [TableForm, lambda: ColumnForm(numpy_batch, None, np.concatenate)])
def test_columns_of_all_kinds_stay_together(tmp_path: Path, form: Any) -> None:
    of = source(tmp_path / "data", 300, 7)
    for each in feeds(of, 2, ReadOptions(columns=("row", "text"), shuffle=True, window_rows=50), Position(), form):
        for _ in range(each.left):
            batch = next(each)
            batch = batch.to_pydict() if isinstance(batch, pa.RecordBatch) else batch
            assert list(batch["text"]) == [f"text {row}" for row in batch["row"]]


@pytest.mark.parametrize("large", [False, True])
def test_the_first_batches_of_a_validation(tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With validation_steps_per_epoch, or Lightning's limit_val_batches: the same rows on any number of ranks."""
    if large:
        monkeypatch.setattr(dataset, "SMALL_BYTES", 0)
    meta = source(tmp_path / "data", 240, 13).dataset
    where = {"validation": meta, "columns": ("row",), "store": Store.create(tmp_path), "stack": (), "reader": {}}
    first = []
    for size in (1, 2, 3, 4):
        spec: Any = SimpleNamespace(
            **where,
            seed=0,
            uses=None,
            val_reader_num_workers=1,
            val_batch_size=FULL // size,
            validation_depends_on_batches=True,
        )
        rows = validation_rows(spec, spec)
        with closing(rows.reader):
            first.append(
                sorted(row for rank in range(size) for row in next(rows.first_epoch(rank, size))["row"].tolist())
            )
    assert first == [first[0]] * 4
    assert large or first[0] == list(range(FULL))


def test_ranks_that_change_within_an_epoch(tmp_path: Path) -> None:
    of = source(tmp_path / "data", 480, 13)
    options = ReadOptions(columns=("row",), shuffle=True, seed=3, window_rows=100)
    whole = batches_of(feeds(of, 1, options, Position()))
    position, found = Position(), []
    for size, most in ((4, 3), (3, 4), (1, 2), (2, 100)):
        ranks = feeds(of, size, options, Position.from_json(position.to_json()))
        found += batches_of(ranks, most)
        position = ranks[0].position
    assert found == whole
    # Seven ranks have no global batch of the same rows; still each row occurs once, before and after.
    first = feeds(of, 3, options, Position())
    seen = batches_of(first, 5)
    seven = feeds(of, 7, options, first[0].position)
    seen += batches_of(seven, 4)
    seen += batches_of(feeds(of, 2, options, seven[0].position))
    assert sorted(itertools.chain(*seen)) == list(range(480))


@every
def test_a_reader_of_estimators_where_ranks_change(kind: str, tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    meta = replace(write(store, numbered(400), 3, 11), bytes=1)
    for shuffle, window_rows in itertools.product((True, False), (None, 60)):
        options: dict[str, Any] = {"shuffle": shuffle, "seed": 2, "window_rows": window_rows}
        readers = {
            size: [opened(kind, meta, store, FULL // size, rank=rank, size=size, **options) for rank in range(size)]
            for size in (1, 2, 3, 4)
        }
        found = {
            size: [
                torch.cat([batch["row"] for batch in step]).sort().values.tolist()
                for step in zip(*(each.batches(0) for each in ranks), strict=True)
            ]
            for size, ranks in readers.items()
        }
        assert all(batches == found[1] for batches in found.values())
        for each in itertools.chain(*readers.values()):
            each.close()
