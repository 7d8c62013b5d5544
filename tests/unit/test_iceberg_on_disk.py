"""Iceberg tables on disk with hidden partitions and delete files, in an SQLite catalog, against pyiceberg's reader.

pyiceberg writes no delete files. Those here are written by its own manifest writers, as the second version of the
format requires.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import closing
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_hvd.data.readers.errors import TableError
from spark_hvd.data.readers.feed import Feed
from spark_hvd.data.readers.forms import TableForm
from spark_hvd.data.readers.sharding import Position
from spark_hvd.data.source import ParquetSource, ReadOptions, parquet_source

ROWS = pa.table(
    {
        "x": pa.array(range(12), pa.int64()),
        "name": [f"{'ab'[at % 2]}{at}" for at in range(12)],
        "at": [datetime(2024, 1, 30) + timedelta(hours=8 * at) for at in range(12)],
    }
)


@pytest.fixture
def table(tmp_path: Path) -> Any:
    """An empty table of the second version."""
    catalogs = pytest.importorskip("pyiceberg.catalog.sql")
    folder = tmp_path / "warehouse"
    catalog = catalogs.SqlCatalog("c", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{folder}")
    catalog.create_namespace("db")
    yield catalog.create_table("db.t", ROWS.schema, properties={"format-version": "2"})
    catalog.close()


def ordered(rows: pa.Table) -> list[dict[str, Any]]:
    return sorted(rows.to_pylist(), key=repr)


def rows_of(source: ParquetSource) -> list[dict[str, Any]]:
    options = ReadOptions(columns=tuple(source.schema.names))
    with closing(source.open(options, TableForm())) as reader:
        return ordered(
            pa.Table.from_batches([next(Feed(reader, source.sharding(source.rows, False, options), 0, 1, Position()))])
        )


def add(table: Any, rows: pa.Table, content: str = "DATA", partition: Sequence[Any] = (), **told: Any) -> None:
    """Add a snapshot to a table, with a file of rows or of deletes and a manifest that names it."""
    from pyiceberg import manifest
    from pyiceberg.table.snapshots import Operation
    from pyiceberg.table.update.snapshot import _FastAppendFiles
    from pyiceberg.typedef import Record

    class Deletes(manifest.ManifestWriterV2):
        def content(self) -> manifest.ManifestContent:
            return manifest.ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return {**super()._meta, "content": "deletes"}

    class Adds(_FastAppendFiles):
        def new_manifest_writer(self, spec: Any) -> manifest.ManifestWriter:
            if content == "DATA":
                return super().new_manifest_writer(spec)
            return Deletes(spec, self.schema(), self.new_manifest_output(), self._snapshot_id, self._compression)

    path = Path(table.location().removeprefix("file://"), "data", f"{uuid.uuid4()}.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path)
    file = manifest.DataFile.from_args(
        content=manifest.DataFileContent[content],
        file_path=f"file://{path}",
        file_format=manifest.FileFormat.PARQUET,
        partition=Record(*partition),
        record_count=rows.num_rows,
        file_size_in_bytes=path.stat().st_size,
        column_sizes={},
        value_counts={},
        null_value_counts={},
        nan_value_counts={},
        lower_bounds={},
        upper_bounds={},
        **told,
    )
    file.spec_id = table.spec().spec_id
    with table.transaction() as change, Adds(Operation.OVERWRITE, change, table.io) as adds:
        adds.append_data_file(file)


def test_hidden_partitions_that_change(table: Any) -> None:
    """Rows by day, then by bucket and the prefix of a text, then by nothing; a column is renamed in between."""
    transforms = pytest.importorskip("pyiceberg.transforms")
    with table.update_spec() as update:
        update.add_field("at", transforms.DayTransform(), "day")
    fields = table.schema().as_arrow()
    for day in sorted({at.date() for at in ROWS["at"].to_pylist()}):
        rows = ROWS.filter([at.date() == day for at in ROWS["at"].to_pylist()])
        add(table, rows.cast(fields), partition=[(day - date(1970, 1, 1)).days])
    with table.update_spec() as update:
        update.remove_field("day")
        update.add_field("x", transforms.BucketTransform(3), "bucket")
        update.add_field("name", transforms.TruncateTransform(1), "begins")
    for at in (0, 1):
        add(table, ROWS.take([*range(at, 12, 2)]).cast(fields), partition=[at, "ab"[at]])
    with table.update_schema() as update:
        update.rename_column("name", "called")
    with table.update_spec() as update:
        update.remove_field("bucket")
        update.remove_field("begins")
    table.append(ROWS.rename_columns(["x", "called", "at"]))
    source = parquet_source(table)
    assert len(source.dataset.files) == 4 + 2 + 1
    assert (source.schema.names, source.rows) == (["x", "called", "at"], 36)
    assert rows_of(source) == ordered(table.scan().to_arrow())
    assert sorted(row["called"] for row in rows_of(source)) == sorted(3 * ROWS["name"].to_pylist())


def test_rows_that_delete_files_mark(table: Any) -> None:
    table.append(ROWS)
    table.append(ROWS.slice(0, 4))
    files = {task.file.record_count: task.file.file_path for task in table.scan().plan_files()}
    marked = pa.table({"file_path": [files[12], files[12], files[4]], "pos": pa.array([0, 11, 2], pa.int64())})
    add(table, marked, "POSITION_DELETES")
    again = pa.table({"file_path": [files[12], files[12]], "pos": pa.array([5, 11], pa.int64())})
    add(table, again, "POSITION_DELETES")
    table.append(ROWS.slice(0, 1))  # later than the deletes, which do not apply to it
    left = sorted([1, 2, 3, 4, 6, 7, 8, 9, 10, 0, 1, 3, 0])
    for given in (table, table.metadata_location):
        source = parquet_source(given)
        assert source.rows == len(left)
        assert [row["x"] for row in rows_of(source)] == [row["x"] for row in ordered(table.scan().to_arrow())]
        assert sorted(row["x"] for row in rows_of(source)) == left


def test_equality_deletes_are_sparks_to_read(table: Any) -> None:
    table.append(ROWS)
    add(table, pa.table({"x": pa.array([3], pa.int64())}), "EQUALITY_DELETES", equality_ids=[1])
    with pytest.raises(TableError, match=r"cannot list the files of .* equality deletes.* Next: "):
        parquet_source(table)
