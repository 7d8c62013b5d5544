"""What ranks without Spark get: tables of this program, and the paths of files."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import dataset

from spark_hvd import DataError
from spark_hvd.runner import run_elastic_local, run_local
from spark_hvd.runner.launch.data import run_data_of
from spark_hvd.testing import FaultPlan

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
TABLE = pa.table({"id": range(500), "name": [f"row {i}" for i in range(500)]})


def read(name: str) -> tuple[str, list[dict[str, Any]]]:
    from spark_hvd.data.registry import source_of

    source = source_of(name)
    rows = source.open()
    pieces = [(bucket, 0, 0, int(rows.counts[bucket])) for bucket in source.buckets]
    return source.folder, [row for table in rows.tables(pieces, None) for row in table.to_pylist()]


class Exported:
    """A table of another library: Arrow can import it, but it has its own types."""

    def __init__(self, *columns: pa.ChunkedArray | pa.Array) -> None:
        self._table = pa.table([TABLE.column("id"), *columns], ["id", "name"])

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


NAMES = TABLE.column("name")
VIEWS = NAMES.combine_chunks().cast(pa.string_view())
EXPORTED = [
    Exported(VIEWS),
    Exported(NAMES.cast(pa.large_string()).dictionary_encode()),
    Exported(pa.DictionaryArray.from_arrays(pa.array(range(500), pa.uint32()), VIEWS)),
]


@pytest.mark.parametrize(
    "value",
    [TABLE, TABLE.to_pandas(), *EXPORTED, TABLE.to_reader(100)],
    ids=["arrow", "pandas", "views", "dictionary", "dictionary of views", "a stream"],
)
def test_ranks_share_the_rows_of_a_table(value: Any) -> None:
    (folder, some), (same, others) = run_local(read, ("train",), num_proc=2, data={"train": value})
    assert sorted(some + others, key=lambda row: row["id"]) == TABLE.to_pylist()
    assert abs(len(some) - len(others)) < 8
    assert folder == same
    assert not os.path.exists(folder)


@pytest.mark.parametrize("launch", [run_local, run_elastic_local])
def test_paths_go_to_the_ranks(launch: Any, tmp_path: Path) -> None:
    def fn() -> Any:
        from spark_hvd.data.registry import source_of

        return [source_of(name).rows for name in ("train", "val")]

    for name, rows in (("train", 500), ("val", 100)):
        pq.write_table(TABLE.slice(0, rows), tmp_path / f"{name}.parquet")
    paths = {"train": str(tmp_path / "train.parquet"), "val": tmp_path / "val.parquet"}
    assert launch(fn, num_proc=2, data=paths) == [[500, 100]] * 2


def test_a_list_of_paths_is_one_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    paths = [tmp_path / "first.parquet", folder, tmp_path / "unused.parquet"]
    for path, start in zip((paths[0], folder / "second.parquet", paths[2]), (0, 100, 200), strict=True):
        pq.write_table(TABLE.slice(start, 100), path)

    def fn() -> list[int]:
        import spark_hvd.torch as hvd

        hvd.init()
        shard = hvd.get_dataset_shard("train")
        return [row for batch in shard.arrow_batches(30) for row in batch.column("id").to_pylist()]

    some, others = run_local(fn, num_proc=2, data={"train": paths[:2]})
    assert sorted(some + others) == list(range(200))
    (tmp_path / "parts" / "day=1").mkdir(parents=True)
    pq.write_table(TABLE, tmp_path / "parts" / "day=1" / "a.parquet")
    for bad, said in (
        ([paths[0], paths[0]], "first.parquet is in the list of paths more than once"),
        ([paths[0], tmp_path / "parts"], "parts is partitioned by the names of its directories"),
        ([paths[0], "memory://x"], "memory://x is not in the file system of"),
    ):
        with pytest.raises(DataError, match=said):
            run_local(fn, num_proc=2, data={"train": bad})
    with pytest.raises(TypeError, match="is of type list: expected a Spark DataFrame"):
        run_local(fn, num_proc=2, data={"train": []})


def test_files_that_arrow_reads_are_a_table(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    assert run_data_of({"train": dataset.dataset(tmp_path)}).tables == {"train": TABLE}


def test_a_table_has_the_types_that_files_have() -> None:
    """All ways to store dates, runs and what other libraries put into their own types become one type."""
    columns = {
        "days": pa.array([0, 86_400_000], pa.date64()),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array(["x"])),
        "images": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8).reshape(2, 2, 2)),
        "flags": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0], pa.int8())),
        "inside": pa.array([[datetime.date(1970, 1, 2)], []], pa.list_(pa.date64())),
    }
    table = run_data_of({"train": pa.table(columns)}).tables["train"]
    assert table.schema.types == [
        pa.date32(),
        pa.string(),
        pa.list_(pa.int64(), 4),
        pa.int8(),
        pa.list_(pa.date32()),
    ]
    assert table.column("days").cast(pa.int32()).to_pylist() == [0, 1]
    assert table.column("runs").to_pylist() == ["x", "x"]
    assert table.column("images").to_pylist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("polars.lazyframe.frame", "LazyFrame", r"frame\.collect\(\)"),
        ("_duckdb", "DuckDBPyConnection", r"connection\.sql\(query\)"),
        ("datasets.dataset_dict", "DatasetDict", "it directly as data="),
        ("datasets.iterable_dataset", "IterableDataset", "the paths of its Parquet files"),
    ],
)
def test_what_holds_no_rows_says_what_to_give(module: str, name: str, instead: str) -> None:
    value = type(name, (), {"__module__": module})()
    with pytest.raises(TypeError, match=rf"^data\['train'\] is a {name}: pass {instead}"):
        run_data_of({"train": value})


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (NAMES, "of type ChunkedArray"),
        (pd.DataFrame(np.ones((2, 2)), columns=["a", "a"]), "of type DataFrame, .*Duplicate column names found"),
        (pd.DataFrame({"a": [1j]}), "of type DataFrame, .*column a with type complex128"),
        (pd.DataFrame({"a": pd.Series([2**70], dtype=object)}), "of type DataFrame, .*too large"),
    ],
)
def test_what_arrow_makes_no_table_of_is_refused(value: Any, why: str) -> None:
    with pytest.raises(TypeError, match=rf"data\['train'\] is {why}") as refused:
        run_data_of({"train": value})
    assert "which Arrow cannot convert to a table" in str(refused.value)


def test_a_column_that_arrow_cannot_lay_out_plainly_is_named() -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array(["x"]))
    lists = pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), runs)
    with pytest.raises(DataError, match=r"data\['train'\]: column 'x' of list<.*run_end.* to list<.*Next: convert"):
        run_data_of({"train": pa.table({"x": lists})})


def test_tables_go_to_the_ranks_at_one_version(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")

    def fn() -> list[list[tuple[int, str]]]:
        import spark_hvd.torch as hvd

        hvd.init()
        shards = [hvd.get_dataset_shard(name) for name in ("old", "new")]
        return [
            [(row["id"], row["part"]) for batch in shard.arrow_batches(100, shuffle=True) for row in batch.to_pylist()]
            for shard in shards
        ]

    folder = tmp_path / "table"
    parts = pa.array([f"{i % 3}/3" for i in range(500)])
    deltalake.write_deltalake(folder, TABLE.append_column("part", parts), partition_by=["part"])
    deltalake.DeltaTable(folder).delete("id >= 100")
    (old, new), (others, rest) = run_local(
        fn, num_proc=2, data={"old": deltalake.DeltaTable(folder, version=0), "new": folder}
    )
    assert sorted(old + others) == [(i, f"{i % 3}/3") for i in range(500)]
    assert sorted(new + rest) == [(i, f"{i % 3}/3") for i in range(100)]


def test_a_run_without_data_says_how_to_give_it() -> None:
    def fn() -> None:
        with pytest.raises(DataError, match=r"no data set 'train': this run was given none.*run\(fn, data="):
            read("train")

    run_local(fn, num_proc=1)


def elastic_epoch(faults: FaultPlan) -> tuple[list[int], str, int]:
    """Return the rows that ranks saw up to the last commit, their location, and the number of the world."""
    import spark_hvd.torch as hvd
    from spark_hvd.data.registry import source_of

    loader = hvd.get_dataset_shard("train").torch_batches(20, shuffle=True, window_rows=100)

    @hvd.elastic.run
    def train(state: Any) -> list[int]:
        for batch in state.loader:
            faults.at(len(state.seen))
            found = hvd.allgather_object(list(zip(batch["id"].tolist(), batch["name"], strict=True)))
            assert all(name == f"row {number}" for rows in found for number, name in rows)
            state.seen = [*state.seen, [number for rows in found for number, _ in rows]]
            state.commit()
        return [number for step in state.seen for number in step]

    rows = train(hvd.elastic.TorchState(loader=loader, seen=[]))
    return rows, source_of("train").dataset.url, hvd.generation()


@pytest.mark.parametrize("value", [TABLE, TABLE.to_pandas()], ids=["arrow", "pandas"])
def test_elastic_ranks_see_each_row_of_a_table_once(value: Any) -> None:
    faults = FaultPlan().kill(rank=1, step=4)
    results = run_elastic_local(elastic_epoch, (faults,), num_proc=2, data={"train": value})
    for rows, folder, generation in results:
        assert generation == 1
        assert sorted(rows) == list(range(500))
        assert not os.path.exists(folder)


def test_a_table_without_rows_is_refused_before_ranks_start() -> None:
    with pytest.raises(DataError, match=r"data\['train'\] has no rows"):
        run_elastic_local(elastic_epoch, (FaultPlan(),), data={"train": TABLE.slice(0, 0)})


def test_rows_have_weights_that_make_up_for_ranks_with_fewer() -> None:
    def fn() -> tuple[list[float], list[list[float]], str]:
        import spark_hvd.torch as hvd

        hvd.init()
        shard = hvd.get_dataset_shard("train")
        means, weights = [], []
        for batch in shard.torch_batches(3, row_weights="weight"):
            assert batch["weight"].dtype.itemsize == 4
            weights.append(batch["weight"].tolist())
            sums = hvd.allreduce((batch["id"].double() * batch["weight"]).mean())  # an average over ranks
            rows = hvd.allgather(batch["id"]).double()
            means += [float(sums - rows.mean())]
        assert [batch["weight"].tolist() for batch in shard.numpy_batches(3, row_weights="weight")] == weights
        with pytest.raises(DataError) as caught:
            shard.torch_batches(3, row_weights="id")
        return means, weights, str(caught.value)

    ranks = run_local(fn, num_proc=2, data={"train": TABLE.slice(0, 9)})
    for off, weights, error in ranks:
        assert off == pytest.approx([0.0, 0.0], abs=1e-6)
        assert weights[0] == [1.0] * 3
        assert "row_weights='id': expected a name that nothing else in the batch has" in error
    assert sorted(weights[1] for _, weights, _ in ranks) == [pytest.approx([2 / 3]), pytest.approx([4 / 3] * 2)]
