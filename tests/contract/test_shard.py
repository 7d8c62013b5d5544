"""What ``fn`` reads of a data set: each row once over all ranks, equal steps, and a state that resumes anywhere."""

from __future__ import annotations

import datetime
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

import spark_hvd.torch as hvd
from spark_hvd import DataError, run_local
from spark_hvd.data.loader import ShardLoader
from spark_hvd.data.registry import get_dataset_shard, register
from spark_hvd.data.shard import DatasetShard
from spark_hvd.data.source import ParquetSource, parquet_source
from spark_hvd.store import Store
from tests.contract.reader_data import no_thread_stays, numbered, write

ROWS = 103


def source_in(folder: Path) -> ParquetSource:
    store = Store.create(folder)
    return ParquetSource(write(store, numbered(ROWS), 3, 10), store)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[DatasetShard]:
    """The data set's shard in a world of one."""
    hvd.init()
    register({"train": pickle.dumps(source_in(tmp_path))})
    with no_thread_stays():
        yield get_dataset_shard("train")
    register({})
    hvd.shutdown()


def rows_of(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["row"].tolist()]


def test_what_a_shard_says(shard: DatasetShard) -> None:
    assert shard.rows == ROWS
    assert shard.schema == pa.schema({"row": pa.int64(), "half": pa.float32(), "other": pa.float32()})
    assert (shard.steps(10), shard.steps(10, drop_last=True)) == (11, 10)
    assert repr(shard) == "DatasetShard('train', rows=103, columns='row', 'half', 'other')"


def test_batches_in_each_form(shard: DatasetShard) -> None:
    loader = shard.torch_batches(10)
    tensors, arrays, tables = list(loader), list(shard.numpy_batches(10)), list(shard.arrow_batches(10))
    assert len(loader) == len(tensors) == len(arrays) == len(tables) == 11
    for tensor, array, table in zip(tensors, arrays, tables, strict=True):
        assert isinstance(table, pa.RecordBatch)
        for name in ("row", "half", "other"):
            assert tensor[name].tolist() == array[name].tolist() == table.column(name).to_pylist()
    assert [len(batch["row"]) for batch in tensors] == [10] * 10 + [3]
    assert rows_of(tensors) == list(range(ROWS))
    assert list(next(iter(shard.torch_batches(10, columns=["other", "row"])))) == ["other", "row"]
    sums = list(shard.torch_batches(10, collate_fn=lambda batch: pa.compute.sum(batch.column("row")).as_py()))
    assert sum(sums) == sum(range(ROWS))
    stacked = next(iter(shard.torch_batches(10, features=["half", "other"])))
    assert torch.equal(stacked["features"], torch.stack([tensors[0]["half"], tensors[0]["other"]], 1))
    first = next(iter(shard.torch_batches(10, shuffle=True)))
    assert first["half"].untyped_storage().data_ptr() == first["other"].untyped_storage().data_ptr()


def test_columns_of_every_kind_together(tmp_path: Path) -> None:
    rows = range(30)
    table = pa.table(
        {
            "row": rows,
            "text": [str(row) for row in rows],
            "score": [row / 2 for row in rows],
            "pair": [[row, -row] for row in rows],
            "tags": [["x"] * (row % 3) for row in rows],
            "days": [[datetime.date(2020, 1, 1 + row)] * (row % 2) for row in rows],
            "inner": [{"half": row / 2, "name": str(row)} for row in rows],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=8)
    hvd.init()
    register({"train": pickle.dumps(parquet_source(str(tmp_path)))})
    loader = get_dataset_shard("train").torch_batches(5, shuffle=True, features={"wide": ["row", "pair"]})
    seen, weight = [], torch.full((), 2.0, requires_grad=True)
    for batch in loader:
        assert list(batch) == ["wide", "text", "score", "tags", "days", "inner"]
        found = batch["wide"][:, 0].tolist()
        assert batch["wide"].tolist() == [[row, row, -row] for row in found]
        assert batch["text"] == batch["inner"]["name"] == [str(row) for row in found]
        assert batch["tags"] == [["x"] * (row % 3) for row in found]
        assert batch["days"] == [[datetime.date(2020, 1, 1 + row)] * (row % 2) for row in found]
        assert batch["inner"]["half"].tolist() == [row / 2 for row in found]
        seen += found
        assert not batch["score"].requires_grad
        assert batch["score"].mul_(weight).tolist() == found
    assert sorted(seen) == list(rows)
    assert seen != list(rows)
    first, second, *_ = loader
    loss = (first["score"] * weight).sum()
    second["score"].zero_()  # a batch may be changed while another is needed
    loss.backward()


def test_timestamps_as_spark_writes_them(tmp_path: Path) -> None:
    """Spark writes INT96. In nanoseconds, 64 bits cover 1677 to 2262."""
    far = [datetime.datetime(*day) for day in ((1, 1, 1), (1582, 10, 15), (2024, 2, 29), (9999, 12, 31, 23, 59, 59, 1))]
    table = pa.table({"at": pa.array(far, pa.timestamp("us")), "all": pa.array([[each] for each in far])})
    pq.write_table(table, tmp_path / "rows.parquet", use_deprecated_int96_timestamps=True)
    hvd.init()
    register({"train": pickle.dumps(parquet_source(tmp_path))})
    shard = get_dataset_shard("train")
    assert shard.schema.field("at").type == pa.timestamp("us")
    (batch,) = shard.arrow_batches(4)
    assert batch.to_pydict() == {"at": far, "all": [[each] for each in far]}
    (arrays,) = shard.numpy_batches(4)
    assert arrays["at"].tolist() == far
    (tensors,) = shard.torch_batches(4)
    assert tensors["at"].tolist() == pa.array(far).cast(pa.int64()).to_pylist()


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (["1", "+02"], [1, 2]),
        (["3000000000", "-1"], [3_000_000_000, -1]),
        (["12345678901234567891", "1"], [Decimal("12345678901234567891"), Decimal(1)]),
        (["007", "9" * 39], ["007", "9" * 39]),
        (["1e3", ".5"], [1000.0, 0.5]),
        (["0x10", "0x11"], ["0x10", "0x11"]),
        (["nan", "inf"], ["nan", "inf"]),
        (["1", "a"], ["1", "a"]),
        (["2024-02-29", "1969-12-31"], [datetime.date(2024, 2, 29), datetime.date(1969, 12, 31)]),
        (["7", "__HIVE_DEFAULT_PARTITION__"], [7, None]),
    ],
)
def test_names_of_directories_are_the_values_that_spark_reads(
    tmp_path: Path, names: list[str], values: list[Any]
) -> None:
    for number, name in enumerate(names):
        (tmp_path / f"key={name}").mkdir()
        pq.write_table(pa.table({"row": [number]}), tmp_path / f"key={name}" / "rows.parquet")
    hvd.init()
    register({"train": pickle.dumps(parquet_source(tmp_path))})
    rows = [row for batch in get_dataset_shard("train").arrow_batches(4) for row in batch.to_pylist()]
    assert sorted(rows, key=lambda row: row["row"]) == [{"row": at, "key": each} for at, each in enumerate(values)]


def test_a_file_with_two_columns_of_one_name(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet has more than one column 'a'"):
        parquet_source(tmp_path)


@pytest.mark.parametrize("shuffle", [False, True])
def test_arrays_that_differ_between_row_groups(tmp_path: Path, shuffle: bool) -> None:
    table = pa.table({"many": [[row] * (1 + row // 8) for row in range(16)]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=8)
    hvd.init()
    register({"train": pickle.dumps(parquet_source(str(tmp_path)))})
    with pytest.raises(DataError, match=r"column 'many' has arrays of shape \(.,\) in .*row group .*before.*padded"):
        list(get_dataset_shard("train").numpy_batches(8, shuffle=shuffle, workers=1))


@pytest.mark.parametrize("window_rows", [None, 7], ids=["whole row groups", "parts of row groups"])
def test_columns_that_are_in_no_file(tmp_path: Path, window_rows: int | None) -> None:
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(numbered(40).slice(20 * (day - 1), 20), tmp_path / f"day={day}" / "rows.parquet")
    hvd.init()
    register({"train": pickle.dumps(parquet_source(tmp_path))})
    shard = get_dataset_shard("train")
    assert shard.schema.names == ["row", "half", "other", "day"]
    for shuffle in (False, True):
        loader = shard.arrow_batches(8, columns=["other", "day", "row"], shuffle=shuffle, window_rows=window_rows)
        rows = [row for batch in loader for row in batch.to_pylist()]
        assert sorted(rows, key=lambda row: row["row"]) == [
            {"other": -row, "day": 1 + row // 20, "row": row} for row in range(40)
        ]
        assert list(rows[0]) == ["other", "day", "row"]
        days = [day for batch in shard.torch_batches(8, columns=["day"], shuffle=shuffle) for day in batch["day"]]
        assert (len(days), sum(days)) == (40, 60)
    stacked = next(iter(shard.torch_batches(40, features=["row", "day"])))["features"]
    assert stacked.tolist() == [[row, 1 + row // 20] for row in range(40)]
    register({})
    hvd.shutdown()


def test_a_table_vacuumed_while_it_is_read(tmp_path: Path) -> None:
    source = source_in(tmp_path)
    source = replace(source, dataset=replace(source.dataset, version="version 3 of the Delta table /t"))
    hvd.init()
    register({"train": pickle.dumps(source)})
    loader = get_dataset_shard("train").torch_batches(10)
    next(iter(loader))
    for file in source.dataset.files[1:]:
        Path(file).unlink()
    loader.close()
    loader.set_epoch(0)
    with pytest.raises(
        DataError, match=r"part-00001.parquet, row group 0: .* part of version 3 of the Delta table /t: "
    ):
        list(loader)
    loader.close()
    register({})
    hvd.shutdown()


@pytest.mark.parametrize("first", [True, False], ids=["the first file", "another file"])
def test_a_column_that_went_after_the_files_were_listed(tmp_path: Path, first: bool) -> None:
    source = source_in(tmp_path)
    file = source.dataset.files[0 if first else -1]
    kept = pq.read_table(file).drop_columns(["half"])
    pq.write_table(kept, file, row_group_size=source.dataset.row_groups[0].rows)
    hvd.init()
    register({"train": pickle.dumps(source)})
    try:
        with no_thread_stays(), pytest.raises(DataError, match=r"has no column 'half': the file changed"):
            list(get_dataset_shard("train").torch_batches(10))
    finally:
        register({})
        hvd.shutdown()


def test_each_iteration_is_the_next_epoch(shard: DatasetShard) -> None:
    loader = shard.torch_batches(10, shuffle=True, seed=3, window_rows=20)
    epochs = [rows_of(loader) for _ in range(3)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert loader.epoch == 3
    loader.set_epoch(1)
    assert rows_of(loader) == epochs[1]
    next(iter(loader))  # abandoned: the next epoch is another, complete one
    assert sorted(rows_of(loader)) == list(range(ROWS))
    again = shard.torch_batches(10, shuffle=True, seed=3, window_rows=20)
    assert rows_of(again) == epochs[0]


def test_what_a_gradient_does_to_a_batch_stays_there(shard: DatasetShard) -> None:
    weight = torch.full((), 2.0, requires_grad=True)
    for batch in shard.torch_batches(10):
        assert not batch["half"].requires_grad
        assert batch["half"].mul_(weight).tolist() == batch["row"].tolist()


def test_threads_share_an_iterator(shard: DatasetShard) -> None:
    batches = iter(shard.torch_batches(2))
    seen: list[list[int]] = [[], []]
    threads = [threading.Thread(target=lambda mine=mine: mine.extend(rows_of(batches))) for mine in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen[0] + seen[1]) == list(range(ROWS))


@pytest.mark.parametrize("make", [DatasetShard.torch_batches, DatasetShard.numpy_batches, DatasetShard.arrow_batches])
def test_two_iterators_side_by_side(shard: DatasetShard, make: Callable[..., ShardLoader[Any]]) -> None:
    loader = make(shard, 10)
    pairs = list(zip(loader, loader, strict=True))
    assert [(len(a["row"]), len(b["row"])) for a, b in pairs] == [(10, 10)] * 10 + [(3, 3)]


@pytest.mark.parametrize("how", [None, pytest.param("spawn", marks=pytest.mark.slow)])
def test_data_loaders(shard: DatasetShard, how: str | None) -> None:
    loader = shard.torch_batches(10)
    assert rows_of(DataLoader(loader, batch_size=None)) == list(range(ROWS))
    if how == "spawn":
        next(iter(loader))  # an epoch has begun, and its reader has threads
        loader.set_epoch(0)
    assert rows_of(DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context=how)) == [*range(ROWS)]


def test_data_loaders_whose_workers_end_with_their_epoch(shard: DatasetShard) -> None:
    one, loader = shard.torch_batches(10, shuffle=True), shard.torch_batches(10, shuffle=True)
    wanted = [rows_of(one), rows_of(one)]
    workers = DataLoader(loader, batch_size=None, num_workers=2, worker_init_fn=_warnings_are_errors)
    assert rows_of(workers) == wanted[0]
    with pytest.raises(RuntimeWarning, match=r"repeats epoch 0 of data set 'train'.*Call set_epoch"):
        rows_of(workers)
    with pytest.raises(RuntimeError, match="expected num_workers=0, so that one process counts"):
        loader.state_dict()
    loader.set_epoch(1)
    assert loader.state_dict() == one.state_dict() | {"position": [1, []]}
    assert rows_of(workers) == wanted[1]
    rows_of(loader)  # in this process, so it counts again
    assert loader.state_dict()["position"][0] == 2
    loader.set_epoch(0)
    kept = DataLoader(loader, batch_size=None, num_workers=2, persistent_workers=True)
    assert [rows_of(kept), rows_of(kept)] == wanted


def _warnings_are_errors(worker: int) -> None:
    warnings.simplefilter("error", RuntimeWarning)


def test_an_iterator_that_is_not_used_begins_no_epoch(shard: DatasetShard) -> None:
    loader = shard.torch_batches(10, shuffle=True)
    whole = [rows_of(loader), rows_of(loader)]
    loader = shard.torch_batches(10, shuffle=True)
    iter(loader)
    early = iter(loader)
    assert loader.state_dict() == shard.torch_batches(10, shuffle=True).state_dict()
    assert [rows_of(loader), rows_of(early)] == whole


def test_the_state_goes_on_where_it_was_taken(shard: DatasetShard) -> None:
    asked: dict[str, Any] = {"shuffle": True, "seed": 3, "window_rows": 20}
    loader = shard.torch_batches(10, **asked)
    whole = [rows_of(loader), rows_of(loader)]
    for epoch, taken in ((0, 0), (0, 4), (1, 10), (1, 11)):
        loader = shard.torch_batches(10, **asked)
        loader.set_epoch(epoch)
        batches = iter(loader)
        first = rows_of(next(batches) for _ in range(taken))
        state = loader.state_dict()
        other = shard.torch_batches(10, **asked)
        other.load_state_dict(state)
        assert other.state_dict() == state
        if taken < 11:
            assert first + rows_of(other) == whole[epoch]
        assert sorted(rows_of(other)) == list(range(ROWS))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 4}, "seed=3, now 4"),
        ({"shuffle": False}, "shuffle=True, now False"),
        ({"window_rows": 30}, "window_rows=20, now 30"),
    ],
)
def test_a_state_of_another_order_is_refused(shard: DatasetShard, change: dict[str, Any], text: str) -> None:
    asked: dict[str, Any] = {"shuffle": True, "seed": 3, "window_rows": 20}
    state = shard.torch_batches(10, **asked).state_dict()
    with pytest.raises(DataError, match=f"the state does not fit data set 'train': .*{text}.*set_epoch"):
        shard.torch_batches(10, **{**asked, **change}).load_state_dict(state)


def test_what_is_asked_for_wrongly(shard: DatasetShard) -> None:
    for call, text in [
        (lambda: get_dataset_shard("test"), "no data set 'test': this run has 'train'. Data sets are named"),
        (lambda: shard.torch_batches(0), "batch_size=0: expected at least 1"),
        (lambda: shard.torch_batches(1, workers=0), "workers=0: expected at least 1"),
        (lambda: shard.numpy_batches(1, columns=["row", "nope"]), "of data set 'train': 'row', 'half', 'other'"),
        (lambda: shard.arrow_batches(columns=["row", "row"]), r"columns=\['row', 'row'\]: expected each name once"),
        (lambda: shard.arrow_batches(columns="row"), r"columns='row': expected a list of names, \['row'\]"),
    ]:
        with pytest.raises(DataError, match=text):
            call()
    register({})
    with pytest.raises(
        DataError, match=r"no data set 'train': this run was given none. .*run\(fn, data={'train': df}\)"
    ):
        get_dataset_shard("train")


def some_batches(source: ParquetSource, state: dict[str, Any] | None, batches: int) -> tuple[list[int], dict[str, Any]]:
    register({"train": pickle.dumps(source)})
    loader = get_dataset_shard("train").torch_batches(7, shuffle=True, window_rows=25)
    if state is not None:
        loader.load_state_dict(state)
    found = rows_of(batch for _, batch in zip(range(batches), loader, strict=False))
    return found, loader.state_dict()


def test_ranks_come_and_go_in_an_epoch(tmp_path: Path) -> None:
    source, state, seen = source_in(tmp_path), None, []
    for size, batches in ((2, 3), (3, 1), (1, 100)):
        values = run_local(some_batches, (source, state, batches), num_proc=size, verbose=0)
        seen += [row for found, _ in values for row in found]
        states = [after for _, after in values]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert sorted(seen) == list(range(ROWS))


def too_few(source: ParquetSource) -> str:
    register({"train": pickle.dumps(source)})
    with pytest.raises(DataError) as caught:
        list(get_dataset_shard("train").torch_batches(1))
    return str(caught.value)


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    source = ParquetSource(write(store, numbered(2)), store)
    for text in run_local(too_few, (source,), num_proc=3, verbose=0):
        assert text.startswith("data set 'train' has 2 rows for 3 ranks: expected at least one for each. Next: ")
