"""Which Parquet files make up a table: those that Delta Lake's log or Iceberg's metadata list, or all of a directory.

Nothing is read of the files themselves. What a table means that its files do not tell by themselves is honoured, as
columns that are in no file are, or refused by name: deletion vectors, delete files, names that differ.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from spark_hvd.data.readers.dataset import listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.store import Store
from spark_hvd.store.errors import explaining
from spark_hvd.store.paths import complete, join, protocol_of

_NULL = "__HIVE_DEFAULT_PARTITION__"
_FRAME = "or give the DataFrame that Spark reads from the table"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFiles:
    """The files of a table at one version.

    Attributes:
        url: Names the table in messages.
        sizes: Bytes of each file by its path, complete, in the order of the paths.
        partitions: Columns that are in no file, a row for each file; None if there are none.
        version: Of the table, as "version 3 of the Delta table /data/x"; "" for a directory, which has no versions.
        columns: Those that each file must have, with Iceberg's field IDs; None for those of the first file.
        optional: Those of the columns that older files may be without, with their types: null there.
    """

    url: str
    sizes: Mapping[str, int]
    partitions: pa.Table | None = None
    version: str = ""
    columns: Mapping[str, int | None] | None = None
    optional: pa.Schema | None = None


def files_of(store: Store, path: str) -> TableFiles:
    """The files of what a path or URL names: a Delta or Iceberg table, a file of Iceberg's metadata, or Parquet.

    Args:
        store: Of the path's file system.
        path: Complete, with no slash at the end.

    Raises:
        DataError: there are no files, a table has what is not read here, or the package that lists it is missing.
        StoreError: the store cannot be read.
    """
    if store.exists(join(path, "_delta_log")):
        return _of_delta(_delta_table(path))
    names = {posixpath.basename(each) for each in store.list(join(path, "metadata"))}
    if path.endswith(".metadata.json") or "version-hint.text" in names:
        return _of_iceberg(_iceberg_table(path))
    if any(name.endswith(".metadata.json") for name in names):
        raise DataError(
            f"{path} is an Iceberg table of a catalog, which alone knows the current version. Next: give the table "
            f"itself, pyiceberg.catalog.load_catalog(...).load_table(...), one of the .metadata.json files, {_FRAME}"
        )
    return _of_directory(store, path)


def files_of_paths(paths: Sequence[str | os.PathLike[str]]) -> TableFiles:
    """The Parquet files of several paths or URLs, each of a file or a directory, in one file system.

    Raises:
        DataError: as :func:`files_of`; or a path is a table's, has columns in the names of directories, or is in
            another file system; or a file is there twice.
    """
    urls = [complete("data", path) for path in paths]
    sizes: dict[str, int] = {}
    for url in urls:
        if protocol_of(url) != protocol_of(urls[0]):
            raise DataError(f"{url} is not in the file system of {urls[0]}: expected one for all paths of a list")
        found = files_of(Store.create(url), url)
        if found.version or found.partitions is not None:
            what = "a table" if found.version else "partitioned by the names of its directories"
            raise DataError(f"{url} is {what}: expected files, or directories of files, in a list. Next: give it alone")
        if twice := sizes.keys() & found.sizes.keys():
            raise DataError(f"{min(twice)} is in the list of paths more than once: expected each file once")
        sizes |= found.sizes
    return TableFiles(url=urls[0] if len(urls) == 1 else f"{urls[0]} and {len(urls) - 1} more", sizes=sizes)


def files_of_table(table: Any) -> TableFiles:
    """The files of a ``deltalake.DeltaTable``, or those of the current snapshot of a ``pyiceberg.table.Table``.

    Raises:
        DataError: as :func:`files_of`.
    """
    return _of_delta(table) if hasattr(table, "get_add_actions") else _of_iceberg(table)


# -- Delta Lake


def _delta_table(url: str) -> Any:
    with _listing(f"the Delta table {url}", "deltalake"):
        from deltalake import DeltaTable

        return DeltaTable(url)


def _of_delta(table: Any) -> TableFiles:
    url = complete("table", table.table_uri)
    version = f"version {table.version()} of the Delta table {url}"
    with _listing(version, "deltalake"):
        metadata = table.metadata()
        mode = metadata.configuration.get("delta.columnMapping.mode", "none")
        if mode != "none":
            raise DataError(
                f"{version} has column mapping (delta.columnMapping.mode={mode!r}): its files have other names for its "
                f"columns. Next: write it to a table without, {_FRAME}"
            )
        if "deletionVectors" in (table.protocol().reader_features or ()):
            marked = pa.RecordBatchReader.from_stream(table.deletion_vectors()).read_all().column("filepath")
            if len(marked):
                raise DataError(
                    f"{version} has deletion vectors: rows of {len(marked)} file(s) are deleted and still in them, as "
                    f"in {marked[0].as_py()}. Next: REORG TABLE delta.`{url}` APPLY (PURGE), {_FRAME}"
                )
        actions = pa.table(table.get_add_actions(flatten=True))
        sizes = actions.column("size_bytes").to_pylist()
        paths = [_below(url, path) for path in actions.column("path").to_pylist()]
        order = sorted(range(len(paths)), key=paths.__getitem__)
        inside = metadata.partition_columns
        values = {name: _in_order(actions.column(f"partition.{name}"), order) for name in inside}
        fields = [field for field in pa.schema(table.schema().to_arrow()) if field.name not in values]
    return TableFiles(
        url=url,
        sizes={paths[at]: sizes[at] for at in order},
        partitions=pa.table(values) if values else None,
        version=version,
        columns={field.name: None for field in fields},
        optional=pa.schema([field for field in fields if field.nullable]),
    )


def _below(url: str, path: str) -> str:
    """A path of the log, where it is escaped as in a URL: relative, or complete in a shallow clone."""
    path = unquote(path)
    return complete("table", path) if "://" in path or path.startswith("/") else join(url, path)


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
        sizes = {}
        for task in scan.plan_files():
            file = task.file
            if task.delete_files:
                raise DataError(
                    f"{version} has delete files: rows of {file.file_path} are deleted and still in it. Next: CALL "
                    f"system.rewrite_data_files(table => ..., options => map('delete-file-threshold', '1')), {_FRAME}"
                )
            if str(getattr(file.file_format, "value", file.file_format)).lower() != "parquet":
                raise DataError(f"{version} has {file.file_path}, which is no Parquet. Next: rewrite it, {_FRAME}")
            sizes[complete("table", file.file_path)] = file.file_size_in_bytes
        schema = scan.projection()
        fields = dict(zip(schema.fields, schema.as_arrow(), strict=True))
    return TableFiles(
        url=url,
        sizes=dict(sorted(sizes.items())),
        version=version,
        columns={field.name: field.field_id for field in fields},
        optional=pa.schema([fields[each] for each in fields if each.optional and each.initial_default is None]),
    )


@contextlib.contextmanager
def _listing(what: str, package: str) -> Iterator[None]:
    """Whatever goes wrong becomes a DataError that names the table."""
    try:
        yield
    except DataError:
        raise
    except ImportError as error:
        raise DataError(
            f"which files make up {what} the package {package} tells, which cannot be imported ({error}). Next: "
            f"pip install {package} where the run is started, {_FRAME}"
        ) from error
    except Exception as error:  # the packages raise what they like
        raise DataError(
            f"cannot list the files of {what}: {type(error).__name__}: {error}. Next: look whether {package} reads the "
            f"table in this program, with the credentials of its environment, {_FRAME}"
        ) from error


# -- directories


def _of_directory(store: Store, path: str) -> TableFiles:
    inner = store.inner_path(path).rstrip("/")
    with explaining("list", path):
        found = store.filesystem.find(inner, detail=True)
    sizes = {name[len(inner) :]: int(info["size"]) for name, info in sorted(found.items())}
    files = {path + rest: size for rest, size in sizes.items() if not any(map(_hidden, rest.split("/")))}
    if not files:
        if not store.exists(path):
            raise DataError(f"there is no {path}: expected a Parquet file or a directory of such files")
        others = f" (found {listed(name.strip('/') for name in sizes)})" if sizes else ""
        raise DataError(f"no Parquet files in {path}{others}: expected at least one, not starting with '_' or '.'")
    return TableFiles(url=path, sizes=files, partitions=_of_names(path, list(files)))


def _hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)  # _a=1 is a partition


def _of_names(path: str, files: Sequence[str]) -> pa.Table | None:
    """The columns in names of directories such as "day=2", as Spark's ``partitionBy`` writes them."""
    rows = [
        {unquote(name): value for name, sign, value in (part.partition("=") for part in directories) if sign}
        for directories in (file[len(path) :].split("/")[:-1] for file in files)
    ]
    for file, row in zip(files, rows, strict=True):
        if list(row) != list(rows[0]):
            raise DataError(
                f"the directories of {file} name {listed(row)}, those of {files[0]} {listed(rows[0])}: expected the "
                "same columns in the same order for all files. Next: give the path of one of them"
            )
    if not rows[0]:
        return None
    values = {name: [None if row[name] == _NULL else unquote(row[name]) for row in rows] for name in rows[0]}
    return pa.table({name: _typed(pa.array(texts, pa.string())) for name, texts in values.items()})


def _typed(texts: pa.Array) -> pa.Array:
    """Text as the first type that all of it can be read as, in Spark's order."""
    if texts.null_count < len(texts):
        for kind in (pa.int32(), pa.int64(), pa.float64(), pa.date32()):
            with contextlib.suppress(pa.ArrowInvalid):
                return texts.cast(kind)
    return texts
