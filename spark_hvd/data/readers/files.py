"""Reads row groups of Parquet files as Arrow tables, in several threads. Errors name the file and the row group."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from spark_hvd.data.readers.dataset import DatasetMeta, RowGroup, listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.schemas.table import Deleted, plain_schema
from spark_hvd.store import Store
from spark_hvd.store.paths import OBJECT_STORES, protocol_of


def arrow_filesystem(store: Store) -> pyarrow.fs.FileSystem:
    """Return the file system of ``store`` for pyarrow, which takes paths from ``store.inner_path``.

    It suits Parquet better than ``store.open``, which would also read row groups and columns that are not needed.
    """
    if store.is_local:
        return pyarrow.fs.LocalFileSystem()
    handler = _Exact if protocol_of(store.url) in OBJECT_STORES else pyarrow.fs.FSSpecHandler
    return pyarrow.fs.PyFileSystem(handler(store.filesystem))


class _Exact(pyarrow.fs.FSSpecHandler):  # type: ignore[misc]
    """Reads only the ranges that Arrow requests. By default, fsspec reads up to 50 MiB ahead of each."""

    def open_input_file(self, path: str) -> pyarrow.PythonFile:
        return pyarrow.PythonFile(self.fs.open(path, mode="rb", cache_type="none"), mode="r")


def parquet_file(source: Any, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file, from an open file or from a path with ``filesystem=``, so that timestamps are as in Spark.

    Spark writes timestamps as INT96, which Arrow reads as 64-bit nanoseconds by default. Timestamps before 1677 or
    after 2262, such as 9999-12-31, would change.
    """
    return pq.ParquetFile(source, coerce_int96_timestamp_unit="us", **options)


_MAX_OPEN = 16
"""Maximum number of unused files that stay open for their next row group."""

_BUFFER_BYTES = 1 << 16
"""Bytes of each column that are read ahead when a row group is streamed from a disk."""


class RowGroups:
    """Reads row groups. Only one thread uses an open file at a time, because Arrow's readers are not thread-safe."""

    def __init__(self, store: Store, dataset: DatasetMeta, columns: tuple[str, ...]) -> None:
        self._filesystem = arrow_filesystem(store)
        self._inner_path = store.inner_path
        self._version = dataset.version
        self._columns = list(columns)
        partitions = dataset.partitions
        outside = {} if partitions is None else dict(zip(partitions.column_names, partitions.columns, strict=True))
        self._added = {name: outside[name] for name in columns if name in outside}
        self._number = {file: number for number, file in enumerate(dataset.files)} if self._added else {}
        self._stored = [name for name in columns if name not in self._added]
        self._table = dataset.table
        self._deleted = dataset.deleted
        # Reading columns ahead saves round trips on a network, but costs a copy on a disk.
        self._pre_buffer = not isinstance(self._filesystem, pyarrow.fs.LocalFileSystem)
        self._lock = threading.Lock()
        self._idle: OrderedDict[tuple[str, bool], list[_File]] = OrderedDict()

    def read(self, group: RowGroup, start: int, stop: int) -> pa.Table:
        """Return rows ``start`` to ``stop`` (exclusive) of a row group, with the columns in the requested order.

        Raises:
            DataError: The file was deleted, has changed, or is damaged.
        """
        deleted = self._deleted.get((group.file, group.index))
        with reading(group, self._version), self._opened(group) as file:
            _check_rows(file.reader, group, deleted)
            table = file.reader.read_row_group(group.index, columns=file.columns, use_threads=False)
            if deleted is not None:
                table = table.filter(deleted.kept())
            table = self._complete(table, group, file)
        return table if stop - start == table.num_rows else table.slice(start, stop - start)

    def stream(self, group: RowGroup, chunk: int) -> Generator[pa.RecordBatch, None, None]:
        """Yield all rows of a row group that is too large for memory, at most ``chunk`` rows at a time.

        Raises:
            DataError: As :meth:`read`.
        """
        deleted, at = self._deleted.get((group.file, group.index)), 0
        kept = None if deleted is None else deleted.kept()
        with reading(group, self._version), self._opened(group, streamed=True) as file:
            _check_rows(file.reader, group, deleted)
            some, columns = [group.index], file.columns
            # Threads read the columns in parallel, because the parts of a row group are read one after the other.
            for batch in file.reader.iter_batches(chunk, row_groups=some, columns=columns, use_threads=True):
                rows = batch if kept is None else batch.filter(kept.slice(at, batch.num_rows))
                at += batch.num_rows
                if rows.num_rows:
                    yield self._complete(rows, group, file)

    def close(self) -> None:
        """Close the files that are not in use."""
        with self._lock:
            files = [file for idle in self._idle.values() for file in idle]
            self._idle.clear()
        for file in files:
            file.reader.close()

    def _complete(self, rows: Any, group: RowGroup, file: _File) -> Any:
        """Return a file's table or batch with the requested columns, in their order and with the data set's types."""
        if self._table is None:
            schema = plain_schema(rows.schema)
            if schema != rows.schema:
                rows = rows.cast(schema)
        else:
            values = [
                self._table.default(name, rows.num_rows)
                if found is None
                else self._table.convert(name, rows.column(found.name), found)
                for name, found in file.found.items()
            ]
            rows = type(rows).from_arrays(values, names=list(file.found)) if values else rows
        for name, column in self._added.items():
            rows = rows.append_column(name, pa.repeat(column[self._number[group.file]], rows.num_rows))
        return rows if rows.schema.names == self._columns else rows.select(self._columns)

    @contextlib.contextmanager
    def _opened(self, group: RowGroup, streamed: bool = False) -> Iterator[_File]:
        key = (group.file, streamed)
        with self._lock:
            idle = self._idle.get(key)
            file = idle.pop() if idle else None
        if file is None:
            file = self._open(group, streamed)
        try:
            yield file
        except BaseException:
            file.reader.close()
            raise
        with self._lock:
            self._idle.setdefault(key, []).append(file)
            self._idle.move_to_end(key)
            surplus = self._idle.popitem(last=False)[1] if len(self._idle) > _MAX_OPEN else []
        for each in surplus:
            each.reader.close()

    def _open(self, group: RowGroup, streamed: bool) -> _File:
        inner = self._inner_path(group.file)
        # Several row groups are streamed at once. Small buffers keep little of each in memory.
        buffer = _BUFFER_BYTES if streamed and not self._pre_buffer else 0
        file = parquet_file(inner, filesystem=self._filesystem, pre_buffer=self._pre_buffer, buffer_size=buffer)
        try:
            if self._table is None:
                check_columns(self._stored, file.schema_arrow.names, where(group))
                return _File(file, self._stored, {})
            schema = plain_schema(file.schema_arrow)
            found = {name: self._table.find(name, schema, where(group)) for name in self._stored}
            return _File(file, [each.name for each in found.values() if each is not None], found)
        except ValueError:
            file.close()
            raise


@dataclass(frozen=True, slots=True)
class _File:
    """An open file.

    Attributes:
        reader: Arrow's reader of the file.
        columns: The names, in the file, of the columns to read.
        found: Column of the table -> its field in the file, or None if rows have the default.
    """

    reader: pq.ParquetFile
    columns: list[str]
    found: dict[str, pa.Field | None]


class Parts:
    """Reads consecutive parts of a row group in order, although several threads request them.

    Together, the parts are rows ``start`` to ``stop`` (exclusive). ``chunk`` rows are decoded at once.
    """

    def __init__(self, files: RowGroups, group: RowGroup, start: int, stop: int, chunk: int) -> None:
        self._batches = files.stream(group, chunk)
        self._rest: pa.RecordBatch | None = None
        self._row = 0  # the next row of the stream
        self._next = start  # the first row of the part that is read next
        self._stop = stop
        self._turn = threading.Condition()

    def read(self, start: int, stop: int, wanted: bool = True) -> pa.Table | None:
        """Wait until the previous part was read, and return rows ``start`` to ``stop``, or skip them if not ``wanted``.

        Raises:
            DataError: As :meth:`RowGroups.read`, or the previous part could not be read.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._next in (start, _FAILED))
            try:
                if self._next == _FAILED:
                    raise DataError("the previous part of the row group could not be read")
                table = self._take(start, stop) if wanted else None
                self._next = stop
                if stop == self._stop:
                    self._rest = None
                    self._batches.close()
            except BaseException:
                self._next = _FAILED
                raise
            finally:
                self._turn.notify_all()
            return table

    def _take(self, start: int, stop: int) -> pa.Table:
        taken = []
        while self._row < stop:
            batch = next(self._batches) if self._rest is None else self._rest
            low, high = max(start - self._row, 0), min(stop - self._row, batch.num_rows)
            if low < high:
                taken.append(batch.slice(low, high - low))
            self._row += high
            self._rest = batch.slice(high) if high < batch.num_rows else None
        return pa.Table.from_batches(taken).combine_chunks()


_FAILED = -1


@contextlib.contextmanager
def reading(group: RowGroup, version: str = "") -> Iterator[None]:
    """Turn any error in this context into a DataError that names the row group, and the table's ``version`` if any."""
    try:
        yield
    except (DataError, GeneratorExit):
        raise
    except FileNotFoundError as error:
        raise gone(where(group), version) from error
    except Exception as error:  # file systems of fsspec may raise anything
        raise DataError(f"cannot read {where(group)}: {type(error).__name__}: {error}") from error


def gone(what: str, version: str) -> DataError:
    """Return the error for a file that has disappeared since it was listed, with its table's ``version`` if any."""
    if not version:
        return DataError(f"{what}: the file is gone since its rows were counted; call fit again")
    return DataError(
        f"{what}: the file is gone, but part of {version}: the table was vacuumed, or its snapshots expired. Next: "
        "start again, which reads the newest version, and let old files stay for longer than a run takes"
    )


def _check_rows(file: pq.ParquetFile, group: RowGroup, deleted: Deleted | None) -> None:
    metadata = file.metadata
    rows = metadata.row_group(group.index).num_rows if group.index < metadata.num_row_groups else None
    expected = group.rows if deleted is None else deleted.rows
    if rows != expected:
        problem = "does not exist" if rows is None else f"has {rows} rows"
        raise DataError(f"{where(group)} {problem}, expected {expected}: the file changed; call fit again")


def check_columns(wanted: Iterable[str], existing: Iterable[str], file: str) -> None:
    """Check that a file has the wanted columns, because Arrow silently omits missing ones.

    Raises:
        DataError: Columns are missing. The message names them.
    """
    existing = set(existing)
    if missing := [name for name in wanted if name not in existing]:
        raise DataError(
            f"{file} has no column {listed(missing)}: the file changed, or differs from the others. Next: start again "
            "with the columns that exist now"
        )


def where(group: RowGroup) -> str:
    """Return the name of a row group, for error messages."""
    return f"{group.file}, row group {group.index}"
