"""Which files make up a table: real Delta and Iceberg tables, directories, and what is refused."""

from __future__ import annotations

import datetime
import json
import sys
import urllib.parse
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_hvd.data.parquet import dataset_of
from spark_hvd.data.readers.dataset import DatasetMeta
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.feed import Feed
from spark_hvd.data.readers.forms import TableForm
from spark_hvd.data.readers.sharding import Position
from spark_hvd.data.source import ParquetSource, ReadOptions, parquet_source
from spark_hvd.store import Store, StoreError

ROWS = pa.table({"x": [1, 2, 3, 4], "name": ["a", "b", "c", "d"], "day": ["1", "1", "2", None]})


def meta_of(path: Path) -> DatasetMeta:
    return dataset_of(Store.create(path), str(path))


def names_of(meta: DatasetMeta) -> list[str]:
    return [column.name for column in meta.columns]


# -- Delta Lake


@pytest.fixture
def delta(tmp_path: Path) -> Callable[..., Path]:
    """Write a Delta table, or another version of it, and return its folder."""
    deltalake = pytest.importorskip("deltalake")

    def write(table: pa.Table = ROWS, **options: Any) -> Path:
        deltalake.write_deltalake(tmp_path / "t", table, **options)
        return tmp_path / "t"

    return write


def test_a_delta_table_is_what_its_log_says(delta: Callable[..., Path]) -> None:
    folder = delta()
    delta(ROWS.slice(0, 1), mode="overwrite")
    delta(ROWS.slice(2), mode="append")
    assert len(list(folder.glob("*.parquet"))) == 3
    meta = meta_of(folder)
    assert (meta.rows, len(meta.files), names_of(meta)) == (3, 2, ["x", "name", "day"])
    assert meta.version == f"version 2 of the Delta table {folder}"
    assert meta.url == str(folder)
    assert list(meta.files) == sorted(meta.files)
    assert set(meta.files) <= {str(file) for file in folder.glob("*.parquet")}
    assert meta.bytes == sum(Path(file).stat().st_size for file in meta.files)


def test_files_of_one_table_lay_out_text_and_lists_as_their_writers_do(delta: Callable[..., Path]) -> None:
    from deltalake import DeltaTable

    kinds = pa.schema({"x": pa.int64(), "s": pa.large_string(), "l": pa.list_(pa.string()), "b": pa.binary()})
    rows = {"x": [1, 2], "s": ["a", "b"], "l": [["a"], ["b"]], "b": [b"a", b"b"]}
    folder = delta(pa.table(rows, kinds))
    DeltaTable(folder).delete("x = 1")  # writes the rest again, as views
    delta(pa.table(rows, kinds), mode="append")
    files = meta_of(folder).files
    assert len({str(pq.read_schema(file)) for file in files}) == 2
    source = parquet_source(folder)
    assert source.schema.types == [pa.int64(), pa.string(), pa.list_(pa.string()), pa.binary()]
    for shuffle in (False, True):
        reader = source.open(ReadOptions(columns=("x", "s", "l", "b"), shuffle=shuffle), TableForm())
        (batch,) = reader.batches(0, [(0, 3)], [3])
        reader.close()
        found = sorted(batch.to_pylist(), key=lambda row: row["x"])
        assert found == [{"x": x, "s": "?ab"[x], "l": ["?ab"[x]], "b": b"?ab"[x : x + 1]} for x in (1, 2, 2)]


def test_a_delta_table_object_keeps_its_version(delta: Callable[..., Path]) -> None:
    from deltalake import DeltaTable

    folder = delta()
    delta(ROWS.slice(0, 1), mode="overwrite")
    source = parquet_source(DeltaTable(folder, version=0))
    assert (source.rows, source.dataset.version) == (4, f"version 0 of the Delta table {folder}")
    assert parquet_source(folder).rows == 1


def test_partitions_of_a_delta_table_are_columns(delta: Callable[..., Path]) -> None:
    odd = ["a/b=c", "d e%", None]
    days = [datetime.date(2024, 1, 31)] * 2 + [None]
    table = pa.table({"x": [1, 2, 3], "odd": odd, "day": days})
    folder = delta(table, partition_by=["odd", "day"])
    meta = meta_of(folder)
    assert names_of(meta) == ["x", "odd", "day"]
    assert meta.partitions is not None
    rows = dict(zip(meta.files, meta.partitions.to_pylist(), strict=True))
    assert all(Path(file).is_file() for file in rows)
    found = {pq.ParquetFile(file).read(["x"])["x"][0].as_py(): row for file, row in rows.items()}
    assert found == {x: {"odd": odd[x - 1], "day": days[x - 1]} for x in (1, 2, 3)}
    assert parquet_source(folder).schema.field("day").type == pa.date32()
    chosen = dataset_of(Store.create(folder), str(folder), ["day", "x"])
    assert names_of(chosen) == ["day", "x"]


def rows_of(source: ParquetSource, *columns: str) -> list[dict[str, Any]]:
    """Return all rows, as a rank reads them."""
    options = ReadOptions(columns=columns)
    with closing(source.open(options, TableForm())) as reader:
        feed = Feed(reader, source.sharding(source.rows, False, options), 0, 1, Position())
        rows: list[dict[str, Any]] = next(feed).to_pylist()
        return rows


@pytest.mark.parametrize("newest_first", [False, True])
def test_columns_that_an_old_file_has_not_are_null_there(delta: Callable[..., Path], newest_first: bool) -> None:
    folder = delta(ROWS.select(["x"]))
    delta(ROWS.select(["x", "name"]), mode="append", schema_mode="merge")
    source = parquet_source(folder)
    if newest_first:  # files are ordered by their random names
        groups = sorted(source.dataset.row_groups, key=lambda group: "name" not in pq.read_schema(group.file).names)
        source = replace(source, dataset=replace(source.dataset, row_groups=tuple(groups)))
    assert source.schema.names == ["x", "name"]
    assert source.schema.field("name").type == pa.string()
    rows = sorted(rows_of(source, "name", "x"), key=lambda row: (row["x"], row["name"] or ""))
    assert rows == [
        {"name": name, "x": x} for x, name in zip([1, 2, 3, 4], "abcd", strict=True) for name in (None, name)
    ]
    assert [row["x"] for row in rows_of(source, "x")].count(1) == 2


def test_a_column_that_no_file_has_yet_is_null(delta: Callable[..., Path]) -> None:
    from deltalake import DeltaTable, Field
    from deltalake.schema import PrimitiveType

    folder = delta(ROWS.select(["x"]))
    table = DeltaTable(folder)
    table.alter.add_columns([Field("later", PrimitiveType("double"))])
    source = parquet_source(table)
    assert source.schema.field("later").type == pa.float64()
    assert [row["later"] for row in rows_of(source, "later")] == [None] * 4


def test_a_vacuumed_version_is_named(delta: Callable[..., Path]) -> None:
    from deltalake import DeltaTable

    folder = delta()
    early = parquet_source(folder)
    delta(ROWS.slice(0, 1), mode="overwrite")
    old = DeltaTable(folder, version=0)
    assert DeltaTable(folder).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    text = rf"{early.dataset.files[0]}.*: the file is gone, but part of version 0 of the Delta table .*vacuumed.* Next:"
    with pytest.raises(DataError, match=text):
        parquet_source(old)
    with pytest.raises(DataError, match=text):
        rows_of(early, "x")


def test_a_log_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deltalake")
    (tmp_path / "_delta_log").mkdir()
    text = rf"the Delta table {tmp_path}.* Next: .*pass the DataFrame that Spark reads"
    with pytest.raises(DataError, match=f"cannot list the files of {text}"):
        meta_of(tmp_path)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(DataError, match=rf"lists the files of {text.replace('Next: ', r'Next: pip install .*delta')}"):
        meta_of(tmp_path)


# -- Iceberg


@pytest.fixture
def iceberg(tmp_path: Path) -> Any:
    """A table with two files and three columns."""
    catalogs = pytest.importorskip("pyiceberg.catalog.sql")
    folder = tmp_path / "warehouse"
    catalog = catalogs.SqlCatalog("c", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{folder}")
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", ROWS.schema)
    table.append(ROWS)
    table.append(ROWS.slice(0, 1))
    yield table
    catalog.close()


def test_an_iceberg_table_is_its_current_snapshot(iceberg: Any) -> None:
    source = parquet_source(iceberg)
    assert (source.rows, source.schema.names, len(source.dataset.files)) == (5, ROWS.schema.names, 2)
    assert source.dataset.version.startswith(
        f"snapshot {iceberg.current_snapshot().snapshot_id} of the Iceberg table /"
    )
    assert all(Path(file).is_file() for file in source.dataset.files)
    iceberg.delete("x == 1")
    assert parquet_source(iceberg).rows == 3
    assert parquet_source(iceberg.metadata_location).rows == 3


def test_an_iceberg_table_in_a_folder(iceberg: Any) -> None:
    folder = Path(iceberg.location().removeprefix("file://"))
    with pytest.raises(DataError, match=r"is an Iceberg table of a catalog, which alone knows .* Next: pass the table"):
        parquet_source(folder)
    hint = Path(iceberg.metadata_location).name.removesuffix(".metadata.json")
    (folder / "metadata" / "version-hint.text").write_text(hint)
    assert parquet_source(folder).rows == 5


def test_columns_that_iceberg_has_added_are_null_in_older_files(iceberg: Any) -> None:
    types = pytest.importorskip("pyiceberg.types")
    with iceberg.update_schema() as update:
        update.add_column("later", types.DoubleType())
        update.add_column("texts", types.ListType(9, types.StringType(), element_required=False))
    source = parquet_source(iceberg)
    assert source.schema.field("later").type == pa.float64()
    assert [(row["later"], row["texts"]) for row in rows_of(source, "later", "texts")] == [(None, None)] * 5
    iceberg.append(ROWS.append_column("later", pa.array([0.5, None, 1.5, 2.5])).append_column("texts", [[["a"]] * 4]))
    found = rows_of(parquet_source(iceberg), "texts", "later", "x")
    assert sorted((row["x"], str(row["later"]), row["texts"]) for row in found if row["texts"]) == [
        (x, later, ["a"]) for x, later in ((1, "0.5"), (2, "None"), (3, "1.5"), (4, "2.5"))
    ]
    assert sorted(row["x"] for row in found if row["texts"] is None and row["later"] is None) == [1, 1, 2, 3, 4]


# -- directories


def put(path: Path, table: pa.Table = ROWS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (["2", "10"], pa.array([10, 2], pa.int32())),
        (["2", "__HIVE_DEFAULT_PARTITION__"], pa.array([2, None], pa.int32())),
        (["3000000000", "1"], pa.array([1, 3000000000], pa.int64())),
        (["1", "1.5"], pa.array([1.5, 1.0])),
        (["2024-01-31", "2023-12-01"], pa.array([datetime.date(2023, 12, 1), datetime.date(2024, 1, 31)])),
        (["a%2Fb", "7"], pa.array(["7", "a/b"])),
        (["__HIVE_DEFAULT_PARTITION__"], pa.array([None], pa.string())),
    ],
)
def test_names_of_directories_are_columns_of_the_type_that_all_have(
    tmp_path: Path, names: list[str], values: pa.Array
) -> None:
    for name in names:
        put(tmp_path / f"kind={name}/file.parquet", ROWS.select(["x"]))
    meta = meta_of(tmp_path)
    assert meta.partitions is not None
    assert meta.partitions.column("kind").combine_chunks() == values
    assert names_of(meta) == ["x", "kind"]


def test_a_column_in_files_and_names_is_that_of_the_names(tmp_path: Path) -> None:
    put(tmp_path / "day=7/file.parquet")
    put(tmp_path / "day=8/empty.parquet", ROWS.slice(0, 0))
    source = parquet_source(tmp_path)
    assert source.schema == pa.schema({"x": pa.int64(), "name": pa.string(), "day": pa.int32()})
    assert source.dataset.partitions == pa.table({"day": pa.array([7], pa.int32())})


def test_directories_that_name_different_columns(tmp_path: Path) -> None:
    put(tmp_path / "day=7/file.parquet")
    put(tmp_path / "month=7/file.parquet")
    with pytest.raises(DataError, match=r"month=7/file.parquet name 'month', those of .*day=7/file.parquet 'day'"):
        meta_of(tmp_path)


# -- directories that a stream wrote


def log_of(folder: Path, batch: str, *names: str, action: str = "add") -> None:
    """Write a batch of the log, in which paths are URIs."""
    log = folder / "_spark_metadata" / batch
    log.parent.mkdir(exist_ok=True)
    uris = [f"file://{urllib.parse.quote(str(folder / name))}" for name in names]
    entries = [{"path": uri, "size": 1, "isDir": False, "modificationTime": 1, "action": action} for uri in uris]
    log.write_text("\n".join(["v1", *map(json.dumps, entries)]))


def test_files_that_a_stream_has_not_committed_do_not_count(tmp_path: Path) -> None:
    for name in (
        "day=a b/part-0.parquet",
        "day=a b/part-1.parquet",
        "day=c%2F/part-2.parquet",
        "day=c%2F/part-3.parquet",
    ):
        put(tmp_path / name, ROWS.select(["x"]))
    log_of(tmp_path, "0", "day=a b/part-1.parquet")  # it is in the compact batch, too
    log_of(tmp_path, "1.compact", "day=a b/part-0.parquet", "day=a b/part-1.parquet")
    log_of(tmp_path, "2", "day=c%2F/part-3.parquet")
    log_of(tmp_path, "3")
    log_of(tmp_path, "4", "day=a b/part-0.parquet", action="delete")
    meta = meta_of(tmp_path)
    assert [Path(file).name for file in meta.files] == ["part-1.parquet", "part-3.parquet"]
    assert names_of(meta) == ["x", "day"]
    (tmp_path / "_spark_metadata" / "3").unlink()
    with pytest.raises(StoreError, match=r"_spark_metadata/3 is missing: expected every batch"):
        meta_of(tmp_path)
    log_of(tmp_path, "3")
    (tmp_path / "day=c%2F" / "part-3.parquet").unlink()
    with pytest.raises(StoreError, match=r"names 1 files that are not there, such as .*/day=c%2F/part-3.parquet"):
        meta_of(tmp_path)
