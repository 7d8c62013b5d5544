"""What a Delta or Iceberg table's files do not show: their columns' names and types, and deleted rows.

Delta's logs are written by hand according to its protocol, since deltalake writes few of its features; compared with
deltalake's and pyiceberg's own readers or, if these cannot read a table, with known rows.
"""

from __future__ import annotations

import json
import logging
import uuid
from contextlib import closing
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_hvd import DataError
from spark_hvd.data.readers.errors import TableError
from spark_hvd.data.readers.feed import Feed
from spark_hvd.data.readers.forms import TableForm
from spark_hvd.data.readers.sharding import Position
from spark_hvd.data.source import ParquetSource, ReadOptions, parquet_source
from tests.delta_log import added, column, head, logged, vector, vector_beside

NESTED = tuple(map(int, pa.__version__.split(".")[:2])) >= (20, 0)
"""Whether Arrow adds fields to structs."""


def rows_of(source: ParquetSource, **options: Any) -> list[dict[str, Any]]:
    """Return all rows with all columns, as a rank reads them, in an order that does not depend on the files'."""
    read_options = ReadOptions(columns=tuple(source.schema.names), **options)
    with closing(source.open(read_options, TableForm())) as reader:
        feed = Feed(reader, source.sharding(source.rows, False, read_options), 0, 1, Position())
        return ordered(pa.Table.from_batches([next(feed)]))


def ordered(table: pa.Table) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=repr)


# -- Delta Lake


def deltalake_rows(folder: Path) -> list[dict[str, Any]]:
    """Return what deltalake's own engine reads."""
    deltalake = pytest.importorskip("deltalake")
    query = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(folder)).execute("select * from t")
    return ordered(pa.table(query.read_all()))


def mapping(mode: str) -> dict[str, Any]:
    return {"configuration": {"delta.columnMapping.mode": mode, "delta.columnMapping.maxColumnId": "9"}}


def numbered(table: pa.Table, *numbers: int) -> pa.Table:
    """Return the same with field IDs for its columns."""
    ids = [{b"PARQUET:field_id": str(number).encode()} for number in numbers]
    return table.cast(pa.schema([each.with_metadata(told) for each, told in zip(table.schema, ids, strict=True)]))


def test_delta_columns_under_other_names_by_name(tmp_path: Path) -> None:
    """Renamed columns, a dropped one, and an added one; the same inside a struct, and partitions."""
    inner = {"type": "struct", "fields": [column("u", "long", 4, "c4"), column("added", "string", 5, "c5")]}
    columns = [
        column("x", "long", 1, "c1"),
        column("day", "string", 2, "c2"),
        column("s", inner, 3, "c3"),
        column("later", {"type": "array", "elementType": "long", "containsNull": True}, 6, "c6"),
    ]
    inside = {"partitionValues": {"c2": "a"}}
    old = pa.table({"c1": [1, 2, 3], "dropped": [0, 0, 0], "c3": [{"c4": 1, "u": 7}, {"c4": 2, "u": 7}, None]})
    new = pa.table({"c6": [[9]], "c3": [{"c4": 4, "c5": "e"}], "c1": [4]})
    mine = (
        old
        if NESTED
        else old.drop_columns("c3").append_column("c3", [[{"c4": 1, "c5": None}, {"c4": 2, "c5": None}, None]])
    )
    files = [added(tmp_path, "old.parquet", mine, **inside), added(tmp_path, "new.parquet", new, **inside)]
    logged(tmp_path, [*head(columns, ["columnMapping"], partitionColumns=["day"], **mapping("name")), *files])
    source = parquet_source(tmp_path)
    assert source.schema.names == ["x", "s", "later", "day"]
    expected = [
        {"x": 1, "s": {"u": 1, "added": None}, "later": None, "day": "a"},
        {"x": 2, "s": {"u": 2, "added": None}, "later": None, "day": "a"},
        {"x": 3, "s": None, "later": None, "day": "a"},
        {"x": 4, "s": {"u": 4, "added": "e"}, "later": [9], "day": "a"},
    ]
    assert rows_of(source) == rows_of(source, shuffle=True) == expected
    assert source.schema.field("s").type == pa.struct({"u": pa.int64(), "added": pa.string()})


def test_delta_columns_under_other_names_by_id(tmp_path: Path) -> None:
    columns = [column("x", "long", 1, "c1"), column("y", "double", 2, "c2")]
    files = [
        added(tmp_path, "a.parquet", numbered(pa.table({"c2": [1, 2], "other": [0.5, 1.5]}), 1, 2)),
        added(tmp_path, "b.parquet", numbered(pa.table({"c2": [3]}), 1)),
    ]
    log = [*head(columns, ["columnMapping"], **mapping("id")), *files]
    source = parquet_source(logged(tmp_path, log))
    assert rows_of(source) == [{"x": 1, "y": 0.5}, {"x": 2, "y": 1.5}, {"x": 3, "y": None}]
    logged(tmp_path, [*log, added(tmp_path, "c.parquet", pa.table({"c1": [4]}))])
    with pytest.raises(
        TableError, match=r"c\.parquet has no field IDs, by which version 0 of the Delta table .* Next:"
    ):
        parquet_source(tmp_path)


def test_rows_that_deletion_vectors_mark(tmp_path: Path) -> None:
    """In row groups of two rows: a whole group, a half, and none; below a folder whose name is escaped twice."""
    columns = [column("x", "long"), column("part", "string")]
    folder = tmp_path / "my table"
    written = {"path": "part=a%2520b%2525/a.parquet", "partitionValues": {"part": "a b%"}}
    actions = [
        *head(columns, ["deletionVectors"], partitionColumns=["part"]),
        added(
            folder, "part=a%20b%25/a.parquet", pa.table({"x": [*range(7)]}), deletionVector=vector(0, 1, 3), **written
        ),
        added(folder, "b.parquet", pa.table({"x": [7, 8]}), partitionValues={"part": "c"}),
    ]
    source = parquet_source(logged(folder, actions))
    assert rows_of(source) == deltalake_rows(folder)
    assert [row["x"] for row in rows_of(source)] == [2, 4, 5, 6, 7, 8]
    assert sorted(group.rows for group in source.dataset.row_groups) == [1, 1, 2, 2]
    for shuffle in (False, True):  # a window of one row: row groups are streamed
        assert rows_of(source, shuffle=shuffle, window_rows=1) == rows_of(source)
    logged(folder, actions[:3])
    some = {**actions[2]["add"], "deletionVector": vector(*range(7))}
    with pytest.raises(DataError, match="has no rows"):
        parquet_source(logged(folder, [*actions[:2], {"add": some}]))


def test_deletion_vectors_in_files_of_their_own_and_columns_by_name(tmp_path: Path) -> None:
    """Databricks writes both today."""
    log = head([column("x", "long", 1, "c1")], ["deletionVectors", "columnMapping"], **mapping("name"))
    tmp_path.joinpath("t").mkdir()
    marked = vector_beside(tmp_path / "t", 1, 2)
    file = added(tmp_path / "t", "a.parquet", pa.table({"c1": [*range(5)]}), deletionVector=marked)
    source = parquet_source(logged(tmp_path / "t", [*log, file]))
    assert rows_of(source) == deltalake_rows(tmp_path / "t") == [{"x": 0}, {"x": 3}, {"x": 4}]


def test_types_that_delta_has_widened(tmp_path: Path) -> None:
    kinds = (
        "long",
        "double",
        "decimal(12,3)",
        "timestamp_ntz",
        "short",
        {"type": "array", "elementType": "long", "containsNull": True},
    )
    columns = [column(name, kind) for name, kind in zip("abcdef", kinds, strict=True)]
    old = {
        "a": pa.array([1], pa.int32()),
        "b": pa.array([2], pa.int16()),
        "c": pa.array([Decimal("1.5")], pa.decimal128(5, 1)),
        "d": pa.array([date(2024, 1, 31)]),
        "e": pa.array([3], pa.int8()),
        "f": pa.array([[4, None]], pa.list_(pa.int32())),
    }
    new = {
        **old,
        "a": [2**40],
        "b": pa.array([0.25], pa.float32()),
        "d": pa.array([datetime(2024, 1, 31, 5)], pa.timestamp("us")),
    }
    files = [added(tmp_path, "old.parquet", pa.table(old)), added(tmp_path, "new.parquet", pa.table(new))]
    log = [*head(columns, ["typeWidening", "timestampNtz"]), *files]
    source = parquet_source(logged(tmp_path, log))
    same = {"c": Decimal("1.500"), "e": 3, "f": [4, None]}
    assert rows_of(source) == [
        {"a": 1, "b": 2.0, "d": datetime(2024, 1, 31), **same},
        {"a": 2**40, "b": 0.25, "d": datetime(2024, 1, 31, 5), **same},
    ]
    for name, values in (("a", ["1"]), ("e", [1]), ("c", [Decimal("1.0001")]), ("f", [[1.5]]), ("b", [2**60])):
        other = added(tmp_path, "other.parquet", pa.table({**new, name: values}))
        logged(tmp_path, [*log, other])
        with pytest.raises(
            TableError, match=rf"^column '{name}' is .* in .*other\.parquet and .* in version 0 .* Next: pass"
        ):
            parquet_source(tmp_path)


def test_what_deltalake_does_not_read_is_named(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    file = added(tmp_path, "a.parquet", pa.table({"x": [1, 2]}), deletionVector=vector(0))
    for features, said in (
        (["deletionVectors", "typeWidening"], "cannot list the files of version 0 of .*TypeWidening"),
        (["frobnicate"], "cannot list the files of the Delta table .*'frobnicate'"),
    ):
        logged(tmp_path, [*head([column("x", "long")], features), file])
        with pytest.raises(TableError, match=rf"{said}.* Next: .* or pass the DataFrame that Spark reads"):
            parquet_source(tmp_path)


def test_a_delta_table_with_liquid_clustering_and_a_checkpoint_of_the_second_form(tmp_path: Path) -> None:
    """The log before the checkpoint is gone; a sidecar lists the files."""
    files = [added(tmp_path, f"{name}.parquet", pa.table({"x": [at]})) for at, name in enumerate("abc")]
    protocol = head([column("x", "long")], ["v2Checkpoint"], ["clustering", "domainMetadata", "rowTracking"])
    clustered = json.dumps({"clusteringColumns": [["x"]], "domainName": "delta.clustering"})
    domain = {"domainMetadata": {"domain": "delta.clustering", "configuration": clustered, "removed": False}}
    log = logged(tmp_path, [*protocol, domain], version=1) / "_delta_log"
    (log / "_sidecars").mkdir()
    strings = pa.map_(pa.string(), pa.string())
    kind = pa.struct(
        {
            "path": pa.string(),
            "partitionValues": strings,
            "size": pa.int64(),
            "modificationTime": pa.int64(),
            "dataChange": pa.bool_(),
            "stats": pa.string(),
        }
    )
    adds = [{**each["add"], "partitionValues": []} for each in files[:2]]
    pq.write_table(pa.table({"add": pa.array(adds, kind)}), log / "_sidecars" / "s.parquet")
    size = (log / "_sidecars" / "s.parquet").stat().st_size
    sidecar = {"sidecar": {"path": "s.parquet", "sizeInBytes": size, "modificationTime": 0}}
    top = [{"checkpointMetadata": {"version": 1}}, *protocol, domain, sidecar]
    name = f"{1:020}.checkpoint.00000000-0000-0000-0000-000000000001.json"
    (log / name).write_text("".join(f"{json.dumps(action)}\n" for action in top))
    (log / "_last_checkpoint").write_text(json.dumps({"version": 1, "size": len(top)}))
    removed = {"remove": {"path": "a.parquet", "deletionTimestamp": 0, "dataChange": True}}
    logged(tmp_path, [removed, files[2]], version=2)
    assert rows_of(parquet_source(tmp_path)) == deltalake_rows(tmp_path) == [{"x": 1}, {"x": 2}]


def test_a_delta_log_that_points_outside_its_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("deltalake")
    table, other = tmp_path / "table", tmp_path / "other"
    rows = pa.table({"x": [1, 2]})
    there = f"{(other / 'a.parquet').as_uri()}"
    clone = [*head([column("x", "long")]), added(other, "a.parquet", rows, path=there)]
    with caplog.at_level(logging.WARNING):
        assert rows_of(parquet_source(logged(table, clone))) == [{"x": 1}, {"x": 2}]
    assert f"has 1 of its 1 files elsewhere, as {other / 'a.parquet'}" in caplog.text
    for path in ("../other/a.parquet", "%2e%2e/other/a.parquet"):
        logged(table, [*clone[:2], added(other, "a.parquet", rows, path=path)])
        with pytest.raises(
            DataError, match=r"has the file .*/table/\.\./other/a\.parquet, whose path leads out of the"
        ):
            parquet_source(table)
    logged(table, [*clone[:2], added(other, "a.parquet", rows, path="memory://other/a.parquet")])
    with pytest.raises(
        DataError, match=r"has the file memory://other/a\.parquet, in another file system than the table"
    ):
        parquet_source(table)


def test_a_column_that_appears_while_a_run_reads_is_of_the_next_run(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    first = [*head([column("x", "long")]), added(tmp_path, "a.parquet", pa.table({"x": [1, 2]}))]
    early = parquet_source(logged(tmp_path, first))
    second = head([column("x", "long"), column("y", "long")])[1:]
    file = added(tmp_path, "b.parquet", pa.table({"x": [3], "y": [4]}))
    logged(tmp_path, [*second, file], version=1)
    assert rows_of(early) == [{"x": 1}, {"x": 2}]
    assert rows_of(parquet_source(tmp_path)) == [{"x": 1, "y": None}, {"x": 2, "y": None}, {"x": 3, "y": 4}]


def test_a_column_that_cannot_be_null_is_in_all_files(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    columns = [column("x", "long"), column("y", "long", nullable=False)]
    logged(tmp_path, [*head(columns), added(tmp_path, "a.parquet", pa.table({"x": [1, 2]}))])
    with pytest.raises(
        TableError, match=r"a\.parquet has no column 'y', for which version 0 of the Delta table .* Next: pass"
    ):
        parquet_source(tmp_path)


# -- Iceberg


ROWS = pa.table({"x": pa.array([1, 2, 3, 4], pa.int32()), "name": ["a", "b", "c", "d"], "s": [{"u": 1.0, "v": 2}] * 4})


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


def test_columns_that_iceberg_has_changed(iceberg: Any) -> None:
    """Renamed, widened, moved, dropped and added again as others; the same inside a struct."""
    types = pytest.importorskip("pyiceberg.types")
    with iceberg.update_schema() as update:
        update.rename_column("x", "y")
        update.update_column("x", types.LongType())
        update.rename_column("s.u", "w")
        update.delete_column("name")
    with iceberg.update_schema() as update:
        update.add_column("name", types.DoubleType())
        update.add_column("x", types.StringType())
        if NESTED:
            update.add_column(("s", "later"), types.StringType())
        update.move_first("s")
    source = parquet_source(iceberg)
    assert source.schema.names == ["s", "y", "name", "x"]
    assert rows_of(source) == ordered(iceberg.scan().to_arrow())
    assert [row["y"] for row in rows_of(source)] == [1, 1, 2, 3, 4]


def test_partitions_that_iceberg_has_changed(iceberg: Any) -> None:
    transforms = pytest.importorskip("pyiceberg.transforms")
    with iceberg.update_spec() as update:
        update.add_field("name", transforms.IdentityTransform())
    iceberg.append(ROWS)
    with iceberg.update_spec() as update:
        update.remove_field("name")
        update.add_field("x", transforms.IdentityTransform())
    iceberg.append(ROWS)
    assert rows_of(parquet_source(iceberg)) == ordered(iceberg.scan().to_arrow())


def test_iceberg_columns_with_defaults(iceberg: Any, tmp_path: Path) -> None:
    types = pytest.importorskip("pyiceberg.types")
    with iceberg.update_schema() as update:
        update.add_column("later", types.DoubleType())
        update.add_column("day", types.DateType())
    changed = json.loads(Path(iceberg.metadata_location.removeprefix("file://")).read_text())
    later, day = changed["schemas"][-1]["fields"][-2:]
    later["initial-default"], file = 7.5, tmp_path / "changed.metadata.json"  # pyiceberg cannot write it yet
    file.write_text(json.dumps(changed))
    assert [(row["later"], row["day"]) for row in rows_of(parquet_source(file))] == [(7.5, None)] * 5
    day["initial-default"] = "2024-01-31"
    file.write_text(json.dumps(changed))
    assert [row["day"] for row in rows_of(parquet_source(file))] == [date(2024, 1, 31)] * 5
    del day["initial-default"]
    day["required"] = True
    file.write_text(json.dumps(changed))
    with pytest.raises(TableError, match=r"\.parquet has no column 'day', for which snapshot .* has no default value"):
        parquet_source(file)


def test_an_iceberg_column_of_ids_is_one_of_bytes(iceberg: Any) -> None:
    types = pytest.importorskip("pyiceberg.types")
    with iceberg.update_schema() as update:
        update.add_column("id", types.UUIDType())
    mine = uuid.UUID(int=7)
    iceberg.append(ROWS.append_column("id", pa.array([mine.bytes] * 4, pa.binary(16))))
    assert {row["id"] for row in rows_of(parquet_source(iceberg))} == {None, mine.bytes}


def test_files_of_iceberg_without_ids(iceberg: Any, tmp_path: Path) -> None:
    types = pytest.importorskip("pyiceberg.types")
    pq.write_table(ROWS.select(["x", "name"]), tmp_path / "older.parquet")
    iceberg.add_files([str(tmp_path / "older.parquet")])  # records the names by which such files have the columns
    with iceberg.update_schema() as update:
        update.rename_column("x", "y")
        update.add_column("later", types.DoubleType())
    assert rows_of(parquet_source(iceberg)) == ordered(iceberg.scan().to_arrow())
    with iceberg.transaction() as change:
        change.remove_properties("schema.name-mapping.default")
    with pytest.raises(TableError, match=r"older\.parquet has no field IDs, by which snapshot .* no mapping of names"):
        parquet_source(iceberg)


def test_files_of_iceberg_that_are_no_parquet(iceberg: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SimpleNamespace(file_path="/x.orc", file_format="ORC", file_size_in_bytes=1)
    orc = SimpleNamespace(file=file, delete_files=set())
    monkeypatch.setattr("pyiceberg.table.DataScan.plan_files", lambda scan: [orc])
    with pytest.raises(TableError, match=r"^snapshot \d+ of .* has /x\.orc, which is not Parquet\. Next: rewrite it"):
        parquet_source(iceberg)
