"""Parquet that is already there becomes a data set: footers are read, not data, by many threads at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from spark_hvd.data.readers.dataset import Column, DatasetMeta, RowGroup, listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.files import arrow_filesystem
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError, explaining

UNISCHEMA = b"dataset-toolkit.unischema.v1"
_METADATA = "_common_metadata"
_THREADS = 16


@dataclass(frozen=True, slots=True)
class _Footer:
    file: str
    schema: pa.Schema
    rows: tuple[int, ...]
    bytes: int


def dataset_of(store: Store, path: str, columns: Sequence[str] | None = None) -> DatasetMeta:
    """What is known of Parquet files that somebody else wrote, from their footers.

    Args:
        store: Opens the files; ``path`` may lie anywhere in its file system.
        path: A file or a directory, complete. Directories below it are searched too. Files and directories whose
            names start with "_" or "." are left out.
        columns: Names of the columns wanted; None for all.

    Returns:
        The data set. Shapes of lists are None unless their type fixes them; double counts as float32; what no tensor
        is made of (text, bytes, times) has the dtype "object".

    Raises:
        DataError: no Parquet files, a file that is none, files of different schemas, no rows, a column that is
            missing or only in the names of directories.
        StoreError: the store cannot be read.
    """
    path = path.rstrip("/")
    files = _find(store, path)
    with ThreadPoolExecutor(_THREADS) as pool:
        footers = list(pool.map(lambda file: _footer(store, file, files[file]), files))
    first = footers[0]
    for footer in footers[1:]:
        if _types(footer) != _types(first):
            raise DataError(_difference(first, footer))
    fields = tuple(_column(field) for field in first.schema)
    groups = tuple(RowGroup(f.file, i, rows) for f in footers for i, rows in enumerate(f.rows) if rows)
    if not groups:
        raise DataError(f"{path} has no rows: {len(files)} Parquet file(s), all empty")
    meta = DatasetMeta(path, fields, groups, sum(footer.bytes for footer in footers), _has_unischema(store, path))
    if columns is None:
        return meta
    partitions = {part.split("=")[0] for file in files for part in file[len(path) :].split("/") if "=" in part}
    for name in columns:
        if name in partitions and name not in first.schema.names:
            raise DataError(
                f"column {name!r} is in the names of directories below {path} and not in the files, where it is not "
                "read from: write the data again without partitionBy, or leave the column out"
            )
    return replace(meta, columns=tuple(meta.column(name) for name in dict.fromkeys(columns)))


def _find(store: Store, path: str) -> dict[str, int]:
    """Paths and sizes of the Parquet files, sorted by path."""
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
    return files


def _hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)  # _a=1 is a partition


def _footer(store: Store, file: str, size: int) -> _Footer:
    parquet = _open(store, file)
    metadata = parquet.metadata
    rows = tuple(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
    return _Footer(file, parquet.schema_arrow, rows, size)


def _open(store: Store, file: str) -> pq.ParquetFile:
    """A file of which the footer has been read; nothing else can be read of it any more."""
    try:
        with (
            explaining("read the footer of", file),
            arrow_filesystem(store).open_input_file(store.inner_path(file)) as source,
        ):
            return pq.ParquetFile(source)
    except StoreError as error:
        cause = error.__cause__
        if isinstance(cause, pa.ArrowInvalid) or "thrift" in str(cause):
            raise DataError(
                f"{file} is not a Parquet file or is damaged: {cause}. Write it again or remove it"
            ) from error
        raise


def _types(footer: _Footer) -> list[tuple[str, pa.DataType]]:
    return [(field.name, field.type) for field in footer.schema]


def _difference(first: _Footer, other: _Footer) -> str:
    one, two = (dict(_types(footer)) for footer in (first, other))
    changed = [name for name in {**one, **two} if one.get(name) != two.get(name)]
    name = changed[0] if changed else first.schema.names[0]
    here, there = (str(types.get(name, "missing")) for types in (one, two))
    what = (
        f"column {name!r} is {here} in the one and {there} in the other"
        if changed
        else "their columns are in another order"
    )
    return f"{first.file} and {other.file} have different schemas: {what}. Write them with one schema"


def _column(field: pa.Field) -> Column:
    kind, shape, known = field.type, [], True
    if pa.types.is_struct(kind) and {"size", "indices", "values"} <= {member.name for member in kind}:
        number = kind.field("values").type.value_type  # a vector as Spark ML or we write it
        return Column(field.name, _dtype(number), None, encoding="sparse")
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        known = known and pa.types.is_fixed_size_list(kind)
        shape.append(kind.list_size if pa.types.is_fixed_size_list(kind) else 0)
        kind = kind.value_type
    dtype = _dtype(kind)
    return Column(field.name, dtype, tuple(shape) if known and dtype != "object" else None)


def _dtype(kind: pa.DataType) -> str:
    if pa.types.is_float64(kind) or pa.types.is_decimal(kind):
        return "float32"
    if pa.types.is_floating(kind):
        return "float16" if pa.types.is_float16(kind) else "float32"
    return str(kind) if pa.types.is_integer(kind) or pa.types.is_boolean(kind) else "object"


def _has_unischema(store: Store, path: str) -> bool:
    file = f"{path}/{_METADATA}"
    if not store.exists(file):
        return False
    return UNISCHEMA in (_open(store, file).schema_arrow.metadata or {})
