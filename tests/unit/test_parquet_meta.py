"""Parquet from other writers: columns, row groups, sizes, and what is refused."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_hvd.data.parquet import dataset_of
from spark_hvd.data.readers.dataset import Column, RowGroup
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.measure import Uses
from spark_hvd.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path)


def put(path: Path, columns: dict[str, Any], rows: int | None = None) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path.stat().st_size


def test_files_and_row_groups_in_order(tmp_path: Path, store: Store) -> None:
    size = put(tmp_path / "d/b.parquet", {"x": [1, 2, 3, 4, 5]}, rows=2)
    size += put(tmp_path / "d/a.parquet", {"x": [1, 2, 3]})
    size += put(tmp_path / "d/deep/c.parquet", {"x": [7]})
    size += put(tmp_path / "d/empty.parquet", {"x": pa.array([], pa.int64())})
    put(tmp_path / "d/_temporary/x.parquet", {"other": [1]})
    put(tmp_path / "d/.hidden.parquet", {"other": [1]})
    (tmp_path / "d/_SUCCESS").write_bytes(b"")
    (tmp_path / "d/.a.parquet.crc").write_bytes(b"crc")
    meta = dataset_of(store, f"{tmp_path}/d/")
    assert meta.url == f"{tmp_path}/d"
    assert meta.row_groups == (
        RowGroup(f"{tmp_path}/d/a.parquet", 0, 3),
        RowGroup(f"{tmp_path}/d/b.parquet", 0, 2),
        RowGroup(f"{tmp_path}/d/b.parquet", 1, 2),
        RowGroup(f"{tmp_path}/d/b.parquet", 2, 1),
        RowGroup(f"{tmp_path}/d/deep/c.parquet", 0, 1),
    )
    assert (meta.rows, meta.bytes, meta.unischema) == (9, size, False)


def test_one_file(tmp_path: Path, store: Store) -> None:
    size = put(tmp_path / "one.parquet", {"x": [1, 2]})
    meta = dataset_of(store, f"{tmp_path}/one.parquet", ["x"])
    assert meta.row_groups == (RowGroup(f"{tmp_path}/one.parquet", 0, 2),)
    assert meta.bytes == size


def test_columns_of_every_type(tmp_path: Path, store: Store) -> None:
    vector = {"type": 0, "size": 3, "indices": [1], "values": [2.0]}
    columns = {
        "byte": pa.array([1], pa.int8()),
        "long": pa.array([1], pa.int64()),
        "unsigned": pa.array([1], pa.uint8()),
        "half": pa.array([np.float16(1)], pa.float16()),  # pyarrow 18 accepts no other
        "float": pa.array([1.0], pa.float32()),
        "double": pa.array([1.0], pa.float64()),
        "decimal": pa.array([Decimal("1.5")]),
        "flag": pa.array([True]),
        "text": pa.array(["a"]),
        "bytes": pa.array([b"a"]),
        "list": pa.array([[1.0]], pa.list_(pa.float64())),
        "large": pa.array([[1]], pa.large_list(pa.int16())),
        "fixed": pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)),
        "nested": pa.array([[[1, 2]] * 3], pa.list_(pa.list_(pa.int32(), 2), 3)),
        "mixed": pa.array([[[1, 2]] * 3], pa.list_(pa.list_(pa.int32(), 2))),
        "texts": pa.array([["a", "b"]], pa.list_(pa.string(), 2)),
        "vector": pa.array([vector]),
        "struct": pa.array([{"x": 1}]),
    }
    put(tmp_path / "d/a.parquet", columns)
    meta = dataset_of(store, f"{tmp_path}/d")
    assert meta.columns == (
        Column("byte", "int8"),
        Column("long", "int64"),
        Column("unsigned", "uint8"),
        Column("half", "float16"),
        Column("float", "float32"),
        Column("double", "float32"),
        Column("decimal", "float32"),
        Column("flag", "bool"),
        Column("text", "object", None),
        Column("bytes", "object", None),
        Column("list", "float32", None),
        Column("large", "int16", None),
        Column("fixed", "float32", (2,)),
        Column("nested", "int32", (3, 2)),
        Column("mixed", "int32", None),
        Column("texts", "object", None),
        Column("vector", "float32", None, encoding="sparse"),
        Column("struct", "object", None),
    )
    chosen = dataset_of(store, f"{tmp_path}/d", ["flag", "byte", "flag"])
    assert [column.name for column in chosen.columns] == ["flag", "byte"]


def test_a_missing_column_and_one_of_directories(tmp_path: Path, store: Store) -> None:
    for day in (1, 2):
        put(tmp_path / f"d/day={day}/_x={day}/a.parquet", {"x": [day], "y": [day]})
    assert dataset_of(store, f"{tmp_path}/d", ["y"]).rows == 2
    with pytest.raises(DataError, match=r"column 'z' is not in .*/d, which has 'x', 'y', 'day', '_x'"):
        dataset_of(store, f"{tmp_path}/d", ["z"])
    assert [column.name for column in dataset_of(store, f"{tmp_path}/d", ["day", "x"]).columns] == ["day", "x"]


def test_a_unischema_is_noticed(tmp_path: Path, store: Store) -> None:
    put(tmp_path / "d/a.parquet", {"x": [1]})
    schema = pa.schema([("x", pa.int64())])
    pq.write_metadata(schema, tmp_path / "d/_common_metadata")
    assert not dataset_of(store, f"{tmp_path}/d").unischema
    marked = schema.with_metadata({b"dataset-toolkit.unischema.v1": b"pickle"})
    pq.write_metadata(marked, tmp_path / "d/_common_metadata")
    assert dataset_of(store, f"{tmp_path}/d").unischema


def test_no_files(tmp_path: Path, store: Store) -> None:
    with pytest.raises(DataError, match=r"there is no .*/none: expected a Parquet file or a directory"):
        dataset_of(store, f"{tmp_path}/none")
    (tmp_path / "d").mkdir()
    with pytest.raises(DataError, match=r"no Parquet files in .*/d: expected at least one"):
        dataset_of(store, f"{tmp_path}/d")
    (tmp_path / "d/_SUCCESS").write_bytes(b"")
    with pytest.raises(DataError, match=r"no Parquet files in .*/d \(found '_SUCCESS'\)"):
        dataset_of(store, f"{tmp_path}/d")
    put(tmp_path / "d/a.parquet", {"x": pa.array([], pa.int64())})
    with pytest.raises(DataError, match="has no rows: 1 Parquet"):
        dataset_of(store, f"{tmp_path}/d")


@pytest.mark.parametrize("damage", ["text", "nothing", "cut", "thrift"])
def test_a_damaged_file_is_named(tmp_path: Path, store: Store, damage: str) -> None:
    put(tmp_path / "d/a.parquet", {"x": list(range(1000))})
    good = (tmp_path / "d/a.parquet").read_bytes()
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    thrift = good[:footer] + b"\xff" * 40 + good[footer + 40 :]
    content = {"text": b"some notes", "nothing": b"", "cut": good[:-50], "thrift": thrift}[damage]
    (tmp_path / "d/bad.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"/d/bad\.parquet is not a Parquet file or is damaged"):
        dataset_of(store, f"{tmp_path}/d")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": [1], "y": [1.5]}, "column 'y' is int64 in the one and double in the other"),
        ({"x": [1]}, "column 'y' is int64 in the one and missing in the other"),
        ({"x": [1], "y": [1], "z": [1]}, "column 'z' is missing in the one and int64 in the other"),
        ({"y": [1], "x": [1]}, "their columns are in another order"),
    ],
)
def test_different_schemas_name_both_files(tmp_path: Path, store: Store, other: dict[str, Any], message: str) -> None:
    put(tmp_path / "d/a.parquet", {"x": [1], "y": [1]})
    put(tmp_path / "d/b.parquet", {"x": [1], "y": [1]})
    put(tmp_path / "d/c.parquet", other)
    with pytest.raises(DataError, match=rf"/d/a\.parquet and .*/d/c\.parquet have different schemas: {message}"):
        dataset_of(store, f"{tmp_path}/d")


def test_a_memory_store() -> None:
    store = Store.create("memory://parquet-meta")
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": [1, 2, 3]}), buffer)
    store.write_bytes(store.join("d", "a.parquet"), buffer.getvalue().to_pybytes())
    meta = dataset_of(store, store.join("d"))
    assert meta.row_groups == (RowGroup(store.join("d", "a.parquet"), 0, 3),)
    store.delete(store.join("d"))


def test_what_files_tell_of_labels_and_weights(tmp_path: Path, store: Store) -> None:
    columns = {
        "y": [3, 0, 1],
        "z": [1.5, float("nan"), -100.0],
        "list": [["7"], ["8"], ["9"]],
        "t": ["7", "8", "9"],
        "w": [0.0, 0.0, 0.0],
    }
    put(tmp_path / "d/a.parquet", columns, rows=2)
    put(tmp_path / "d/b.parquet", {**columns, "y": [5, 6, 7]})
    meta = dataset_of(store, f"{tmp_path}/d", None, Uses(labels=("y", "z", "list", "t")))
    assert {each.name: each.lowest for each in meta.columns if each.lowest is not None} == {"y": 0.0, "z": -100.0}
    assert all(each.lowest is None for each in dataset_of(store, f"{tmp_path}/d").columns)
    with pytest.raises(DataError, match="sample_weight_col='w': all weights of the rows for this fit are 0"):
        dataset_of(store, f"{tmp_path}/d", None, Uses(weights="w"))
    assert dataset_of(store, f"{tmp_path}/d", None, Uses(weights="y")).rows == 6
    put(tmp_path / "d/c.parquet", {**columns, "w": [0.0, 1.0, 0.0]})
    assert dataset_of(store, f"{tmp_path}/d", None, Uses(weights="w")).rows == 9
