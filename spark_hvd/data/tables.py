"""List the Parquet files of a table: those in Delta Lake's log or Iceberg's metadata, or all of a directory.

The files themselves are not read. The result also has what only the table knows: columns that are in no file or have
another name there, and rows that are deleted. Tables with other features are refused by name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from spark_hvd.data.readers.dataset import listed
from spark_hvd.data.readers.errors import DataError, TableError
from spark_hvd.data.schemas.table import ID, REQUIRED, TableSchema, names_mark, table_field
from spark_hvd.store import Store
from spark_hvd.store.errors import explaining
from spark_hvd.store.paths import complete, join, protocol_of
from spark_hvd.store.stream_log import committed

_log = logging.getLogger(__name__)

_NULL = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile("[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")  # unlike Arrow: no 0x1F, no nan
_FRAME = "or pass the DataFrame that Spark reads from the table"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFiles:
    """The files of a table at one version.

    Attributes:
        url: The name of the table in messages.
        sizes: Bytes of each file by its complete path, in the order of the paths.
        partitions: Columns that are in no file, with a row for each file; None if there are none.
        version: The table's version, such as "version 3 of the Delta table /data/x"; "" for a directory.
        schema: The columns of a table, and how its files hold them; None for the columns of the first file.
        deleted: File -> positions of the rows that are still in it but deleted, of shape (deleted rows,).
    """

    url: str
    sizes: Mapping[str, int]
    partitions: pa.Table | None = None
    version: str = ""
    schema: TableSchema | None = None
    deleted: Mapping[str, np.ndarray] = field(default_factory=dict)


def files_of(store: Store, path: str) -> TableFiles:
    """Return the files behind a path or URL: a Delta or Iceberg table, a metadata file of Iceberg, or Parquet.

    ``path`` is complete, with no slash at the end; ``store`` is that of its file system.

    Raises:
        DataError: There are no files, a table has an unsupported feature, or the package that lists it is missing.
        StoreError: The store cannot be read.
    """
    if store.exists(join(path, "_delta_log")):
        return _of_delta(_delta_table(path))
    names = {posixpath.basename(each) for each in store.list(join(path, "metadata"))}
    if path.endswith(".metadata.json") or "version-hint.text" in names:
        return _of_iceberg(_iceberg_table(path))
    if any(name.endswith(".metadata.json") for name in names):
        raise DataError(
            f"{path} is an Iceberg table of a catalog, which alone knows the current version. Next: pass the table "
            f"itself, pyiceberg.catalog.load_catalog(...).load_table(...), one of the .metadata.json files, {_FRAME}"
        )
    return _of_directory(store, path)


def files_of_paths(paths: Sequence[str | os.PathLike[str]]) -> TableFiles:
    """Return the Parquet files of several paths or URLs of files or directories, all in one file system.

    Raises:
        DataError: As :func:`files_of`; or a path is a table, has columns in the names of directories, or is in another
            file system; or a file is listed twice.
    """
    urls = [complete("data", path) for path in paths]
    sizes: dict[str, int] = {}
    for url in urls:
        if protocol_of(url) != protocol_of(urls[0]):
            raise DataError(f"{url} is not in the file system of {urls[0]}: expected one for all paths of a list")
        found = files_of(Store.create(url), url)
        if found.version or found.partitions is not None:
            what = "a table" if found.version else "partitioned by the names of its directories"
            raise DataError(f"{url} is {what}: expected files, or directories of files, in a list. Next: pass it alone")
        if twice := sizes.keys() & found.sizes.keys():
            raise DataError(f"{min(twice)} is in the list of paths more than once: expected each file once")
        sizes |= found.sizes
    return TableFiles(url=urls[0] if len(urls) == 1 else f"{urls[0]} and {len(urls) - 1} more", sizes=sizes)


def files_of_table(table: Any) -> TableFiles:
    """Return the files of a ``deltalake.DeltaTable``, or those of the current snapshot of a ``pyiceberg.table.Table``.

    Raises:
        DataError: As :func:`files_of`.
    """
    return _of_delta(table) if hasattr(table, "get_add_actions") else _of_iceberg(table)


@dataclass(frozen=True, slots=True)
class SparkRead:
    """The way Spark reads a table: ``spark.read.format(format).options(**options).load(path)``."""

    format: str
    path: str
    options: Mapping[str, str]


def spark_read_of(given: Any) -> SparkRead | None:
    """Return how Spark reads a table that :func:`files_of` or :func:`files_of_table` cannot; None if it is not one."""
    if hasattr(given, "get_add_actions"):
        return SparkRead("delta", _hadoop_path(unquote(given.table_uri)), {"versionAsOf": str(given.version())})
    if hasattr(given, "metadata_location"):
        return SparkRead("iceberg", _hadoop_path(given.metadata_location), {})
    if not isinstance(given, str | os.PathLike):
        return None
    url = complete("data", given)
    is_delta = Store.create(url).exists(join(url, "_delta_log"))
    return SparkRead("delta" if is_delta else "iceberg", _hadoop_path(os.fspath(given)), {})


def _hadoop_path(path: str) -> str:
    """Return a local file's path in a form that Spark does not look for in its cluster's file system."""
    return path if re.match(r"\w[\w+.-]+:/", path) else f"file://{os.path.abspath(os.path.expanduser(path))}"


# -- Delta Lake


def _delta_table(url: str) -> Any:
    with _listing(f"the Delta table {url}", "deltalake"):
        from deltalake import DeltaTable

        return DeltaTable(url)


def _of_delta(table: Any) -> TableFiles:
    url = complete("table", unquote(table.table_uri))
    version = f"version {table.version()} of the Delta table {url}"
    with _listing(version, "deltalake"):
        metadata = table.metadata()
        mode = metadata.configuration.get("delta.columnMapping.mode", "none")
        actions = pa.table(table.get_add_actions(flatten=True))
        sizes = actions.column("size_bytes").to_pylist()
        paths = [_below(url, path) for path in actions.column("path").to_pylist()]
        order = sorted(range(len(paths)), key=paths.__getitem__)
        inside = metadata.partition_columns
        values = {name: _in_order(actions.column(f"partition.{name}"), order) for name in inside}
        columns = [each for each in pa.schema(table.schema().to_arrow()) if each.name not in values]
        fields = [table_field(each, partial(_delta_marks, mode)) for each in columns]
        nullable = {each.name for each in columns if each.nullable}
        deleted = {}
        if "deletionVectors" in (table.protocol().reader_features or ()):
            for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
                for path, kept in zip(batch["filepath"].to_pylist(), batch["selection_vector"], strict=True):
                    positions = np.flatnonzero(~kept.values.to_numpy(zero_copy_only=False))
                    deleted[_below(url, path)] = positions
        if unknown := deleted.keys() - set(paths):
            raise TableError(
                f"{version} marks rows of {min(unknown)}, which is not one of its files. Next: {_FRAME[3:]}"
            )
    if outside := [path for path in paths if not path.startswith(join(url, ""))]:
        _log.warning("%s has %d of its %d files elsewhere, as %s", version, len(outside), len(paths), outside[0])
    return TableFiles(
        url=url,
        sizes=_in_place(version, url, {paths[at]: sizes[at] for at in order}),
        partitions=pa.table(values) if values else None,
        version=version,
        schema=TableSchema(
            pa.schema(fields),
            {each.name: pa.scalar(None, each.type) for each in fields if each.name in nullable},
            version,
        ),
        deleted=deleted,
    )


def _delta_marks(mode: str, field: pa.Field) -> dict[bytes, bytes]:
    """Return how a field is found in a file: by its ID, its physical name, or its name in the table."""
    mapping = field.metadata or {}
    if mode == "id":
        marks = {ID: mapping[b"delta.columnMapping.id"]}
    else:
        physical = mapping.get(b"delta.columnMapping.physicalName") if mode == "name" else None
        marks = names_mark([field.name if physical is None else physical.decode()])
    return marks if field.nullable else {**marks, REQUIRED: b""}


def _below(url: str, path: str) -> str:
    """Return a path of the log, which is escaped as in a URL: relative, or complete in a shallow clone."""
    path = unquote(path)
    return complete("table", path) if "://" in path or path.startswith(("/", "file:")) else join(url, path)


def _in_place(version: str, url: str, sizes: dict[str, int]) -> dict[str, int]:
    """Return the same files, if ranks may read them in place.

    Raises:
        DataError: A file is in a place to which a path of a log must not lead.
    """
    for file in sizes:
        if ".." in file.split("/"):
            raise DataError(
                f"{version} has the file {file}, whose path leads out of the table. No writer of tables writes such a "
                "path. Next: check who may write to its log, and restore an earlier version"
            )
        if protocol_of(file) != protocol_of(url):
            raise DataError(
                f"{version} has the file {file}, in another file system than the table: expected "
                f"{protocol_of(url)}://. Next: copy the table with its files, {_FRAME}"
            )
    return sizes


def _in_order(column: pa.ChunkedArray, order: Sequence[int]) -> pa.Array:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    values = column.to_pylist()
    return pa.array([values[at] for at in order], kind)


# -- Iceberg


def _iceberg_table(url: str) -> Any:
    with _listing(f"the Iceberg table {url}", "pyiceberg"):
        from pyiceberg.table import StaticTable

        return StaticTable.from_metadata(url)


def _of_iceberg(table: Any) -> TableFiles:
    url = complete("table", table.location())
    name = f"the Iceberg table {url}"
    with _listing(name, "pyiceberg"):
        scan = table.scan()
        snapshot = scan.snapshot()
        if snapshot is None:
            raise DataError(f"{name} has no rows: it has no snapshot")
        version = f"snapshot {snapshot.snapshot_id} of {name}"
        sizes, deleted = {}, {}
        marks = _Marks(table.io)
        for task in scan.plan_files():
            file = task.file
            if str(getattr(file.file_format, "value", file.file_format)).lower() != "parquet":
                raise TableError(f"{version} has {file.file_path}, which is not Parquet. Next: rewrite it, {_FRAME}")
            path = complete("table", file.file_path)
            sizes[path] = file.file_size_in_bytes
            if task.delete_files:
                deleted[path] = marks.positions(file.file_path, task.delete_files)
        schema = _iceberg_schema(table, scan.projection(), version)
    return TableFiles(
        url=url,
        sizes=_in_place(version, url, dict(sorted(sizes.items()))),
        version=version,
        schema=schema,
        deleted=deleted,
    )


class _Marks:
    """The rows that Iceberg's delete files mark. Each delete file is read once."""

    def __init__(self, io: Any) -> None:
        self._io = io
        self._read: dict[str, Mapping[str, pa.ChunkedArray]] = {}

    def positions(self, file: str, delete_files: Iterable[Any]) -> np.ndarray:
        """Return the positions of a file's deleted rows, of shape (deleted rows,)."""
        from pyiceberg.io.pyarrow import _read_deletes  # not public; it also reads Iceberg 3's deletion vectors

        positions = [np.zeros(0, np.int64)]
        for each in delete_files:
            if each.file_path not in self._read:
                self._read[each.file_path] = _read_deletes(self._io, each)
            if file in self._read[each.file_path]:
                positions.append(self._read[each.file_path][file].to_numpy())
        return np.concatenate(positions)


def _iceberg_schema(table: Any, schema: Any, version: str) -> TableSchema:
    mapping = table.name_mapping()
    names = dict(_names_of(mapping.root)) if mapping is not None else {}
    inside = {
        spec.source_id for part in table.specs().values() for spec in part.fields if str(spec.transform) == "identity"
    }

    def marks(arrow: pa.Field) -> dict[bytes, bytes]:
        number = int(arrow.metadata[ID])
        declared = schema.find_field(number)
        result = {ID: arrow.metadata[ID], **(names_mark(names.get(number, ())) if mapping is not None else {})}
        return result if declared.optional and declared.initial_default is None else {**result, REQUIRED: b""}

    fields, defaults = [], {}
    for declared, arrow in zip(schema.fields, schema.as_arrow(), strict=True):
        column = table_field(arrow, marks)
        fields.append(column)
        # No default for a partition's source: files without it, as Hive writes them, have the partition's value.
        if (declared.optional or declared.initial_default is not None) and declared.field_id not in inside:
            with contextlib.suppress(pa.ArrowException, TypeError):  # a default that Arrow cannot express
                defaults[declared.name] = pa.scalar(declared.initial_default, column.type)
    return TableSchema(pa.schema(fields), defaults, version)


def _names_of(mapping: Iterable[Any]) -> Iterator[tuple[int, list[str]]]:
    """Yield field IDs, each with the names of the field in files without IDs."""
    for each in mapping:
        if each.field_id is not None:
            yield each.field_id, each.names
        yield from _names_of(each.fields)


@contextlib.contextmanager
def _listing(what: str, package: str) -> Iterator[None]:
    """Turn any error into a DataError that names the table."""
    try:
        yield
    except DataError:
        raise
    except ImportError as error:
        raise TableError(
            f"the package {package}, which lists the files of {what}, cannot be imported ({error}). Next: "
            f"pip install {package}, where the run is started, {_FRAME}"
        ) from error
    except Exception as error:  # the packages raise any exception
        raise TableError(
            f"cannot list the files of {what}: {type(error).__name__}: {error}. Next: check whether {package} reads "
            f"the table in this program, with the credentials of its environment, {_FRAME}"
        ) from error


# -- directories


def _of_directory(store: Store, path: str) -> TableFiles:
    inner = store.inner_path(path).rstrip("/")
    with explaining("list", path):
        found = store.filesystem.find(inner, detail=True)
    sizes = {name[len(inner) :]: int(info["size"]) for name, info in sorted(found.items())}
    counted = committed(store, path, sizes).items()
    files = {path + rest: size for rest, size in counted if not any(map(_hidden, rest.split("/")))}
    if not files:
        if not store.exists(path):
            several = ". Next: pass a list of paths, as glob.glob returns it" if set(path) & set("*?[") else ""
            raise DataError(f"there is no {path}: expected a Parquet file or a directory of such files{several}")
        others = f" (found {listed(name.strip('/') for name in sizes)})" if sizes else ""
        raise DataError(f"no Parquet files in {path}{others}: expected at least one, not starting with '_' or '.'")
    return TableFiles(url=path, sizes=files, partitions=_of_names(path, list(files)))


def _hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)  # _a=1 is a partition


def _of_names(path: str, files: Sequence[str]) -> pa.Table | None:
    """Return the columns in names of directories such as "day=2", as Spark's ``partitionBy`` writes them."""
    rows = [
        {unquote(name): value for name, sign, value in (part.partition("=") for part in directories) if sign}
        for directories in (file[len(path) :].split("/")[:-1] for file in files)
    ]
    for file, row in zip(files, rows, strict=True):
        if list(row) != list(rows[0]):
            raise DataError(
                f"the directories of {file} name {listed(row)}, those of {files[0]} {listed(rows[0])}: expected the "
                "same columns in the same order for all files. Next: pass the path of one of them"
            )
    if not rows[0]:
        return None
    values = {name: [None if row[name] == _NULL else unquote(row[name]) for row in rows] for name in rows[0]}
    return pa.table({name: _typed(pa.array(texts, pa.string())) for name, texts in values.items()})


def _typed(texts: pa.Array) -> pa.Array:
    """Return texts as the first type, in Spark's order, that all of them can be read as."""
    present = [text for text in texts.to_pylist() if text is not None]
    kinds: tuple[pa.DataType, ...] = (pa.date32(),) if present else ()
    values = texts
    if present and all(map(_WHOLE.fullmatch, present)):
        values = pa.array([None if text is None else str(int(text)) for text in texts.to_pylist()])
        # Arrow casts some texts of more than 38 digits to other numbers
        short = all(abs(int(text)) < 10**38 for text in present)
        kinds = (pa.int32(), pa.int64(), pa.decimal128(38, 0)) if short else ()
    elif present and all(map(_NUMBER.fullmatch, present)):
        kinds = (pa.float64(),)
    for kind in kinds:
        with contextlib.suppress(pa.ArrowInvalid):
            return values.cast(kind)
    return texts
