"""Make a data set from existing Parquet files. Many threads read the footers; no rows are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spark_hvd.data.readers.dataset import Column, DatasetMeta, RowGroup
from spark_hvd.data.readers.errors import DataError, TableError
from spark_hvd.data.readers.files import arrow_filesystem, gone, parquet_file
from spark_hvd.data.readers.measure import ColumnFindings, Uses
from spark_hvd.data.schemas.table import Deleted, TableSchema, plain_schema
from spark_hvd.data.tables import TableFiles, files_of
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
    """Number of rows of each row group, without deleted ones."""
    deleted: Mapping[int, Deleted]
    """The deleted rows of the row groups that have some."""
    extremes: Mapping[str, tuple[float, float] | None]
    """The lowest and the highest number of the requested columns; None if the file does not hold them."""


def dataset_of(store: Store, path: str, columns: Sequence[str] | None = None, uses: Uses | None = None) -> DatasetMeta:
    """Describe Parquet files that another program wrote, by their footers.

    Args:
        store: The store that opens the files. ``path`` may be anywhere in its file system.
        path: The complete path of a file, a directory, or a Delta or Iceberg table. Directories below a directory are
            searched too, and columns in their names ("day=2") are columns of the data set. Files and directories whose
            names start with "_" or "." are omitted.
        columns: Names of the requested columns; None for all.
        uses: The purpose of columns, as they are in the files. For labels, the result has the lowest number if all
            footers hold it.

    Returns:
        The data set. Shapes of lists are None unless their type fixes them; double counts as float32; what cannot
        become a tensor (text, bytes, times) has the dtype "object".

    Raises:
        DataError: There are no Parquet files, no rows, or not all requested columns; a file is not Parquet; files have
            different schemas, or contradict their table; or all weights of rows are 0.
        StoreError: The store cannot be read.
    """
    return dataset_in(store, files_of(store, path.rstrip("/")), columns, uses)


def dataset_in(
    store: Store, table: TableFiles, columns: Sequence[str] | None = None, uses: Uses | None = None
) -> DatasetMeta:
    """Do what :func:`dataset_of` does, for files that are already listed.

    Raises:
        DataError, StoreError: As :func:`dataset_of`.
    """
    asked = () if uses is None else (*uses.labels, *([uses.weights] if uses.weights else ()))
    with ThreadPoolExecutor(_THREADS) as pool:
        footers = list(pool.map(lambda file: _footer(store, file, table, asked), table.sizes))
    deleted = {(f.file, i): each for f in footers for i, each in f.deleted.items()}
    groups = tuple(RowGroup(f.file, i, rows) for f in footers for i, rows in enumerate(f.rows) if rows)
    if not groups:
        raise DataError(f"{table.version or table.url} has no rows: {len(footers)} Parquet file(s), all empty")
    partitions = table.partitions
    if partitions is not None:
        partitions = partitions.take([number for number, footer in enumerate(footers) if any(footer.rows)])
    outside = [] if partitions is None else list(partitions.schema)
    names = {field.name for field in outside}
    fields = [field for field in _fields(table, footers, columns) if field.name not in names]
    meta = DatasetMeta(
        url=table.url,
        columns=tuple(map(_column, [*fields, *outside])),
        row_groups=groups,
        bytes=sum(table.sizes.values()),
        unischema=not table.version and _has_unischema(store, table.url),
        version=table.version,
        partitions=partitions,
        table=table.schema,
        deleted=deleted,
    )
    if uses is not None and uses.weights and (weights := _extremes(footers, uses.weights)) is not None:
        ColumnFindings(weights={"this fit": max(map(abs, weights))}).check(uses.weights)
    known = {name: found[0] for name in asked if (found := _extremes(footers, name)) is not None}
    meta = replace(meta, columns=tuple(replace(each, lowest=known.get(each.name)) for each in meta.columns))
    return meta if columns is None else replace(meta, columns=tuple(map(meta.column, dict.fromkeys(columns))))


def _extremes(footers: Sequence[_Footer], name: str) -> tuple[float, float] | None:
    """Return the lowest and the highest number of a column in all files; None if a file does not say."""
    extremes = [footer.extremes.get(name) for footer in footers if any(footer.rows)]
    known = [each for each in extremes if each is not None]
    if not known or len(known) < len(extremes):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def _footer(store: Store, file: str, table: TableFiles, asked: Sequence[str]) -> _Footer:
    try:
        parquet = _open(store, file)
    except StoreError as error:
        if table.version and isinstance(error.__cause__, FileNotFoundError):
            raise gone(file, table.version) from error
        raise
    metadata, schema = parquet.metadata, plain_schema(parquet.schema_arrow)
    if twice := sorted(name for name, count in Counter(schema.names).items() if count > 1):
        raise DataError(f"{file} has more than one column {twice[0]!r}: write it again with a name for each")
    rows = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    deleted = _deleted_in(rows, table.deleted.get(file))
    rows = [number - (deleted[index][1] if index in deleted else 0) for index, number in enumerate(rows)]
    names = {name: name for name in asked}
    if table.schema is not None:
        mine = {name: _found(table.schema, name, schema, file) for name in asked if name in table.schema.fields.names}
        names |= {name: found.name for name, found in mine.items() if found is not None}
    extremes = {name: _extremes_in(metadata, there) for name, there in names.items()}
    return _Footer(file, schema, tuple(rows), {index: each for index, (each, _) in deleted.items()}, extremes)


def _deleted_in(rows: Sequence[int], positions: np.ndarray | None) -> dict[int, tuple[Deleted, int]]:
    """Return the deleted rows of each row group, and their number; ``positions`` are those in the file."""
    if positions is None:
        return {}
    found, first = {}, 0
    for index, number in enumerate(rows):
        inside = positions[(positions >= first) & (positions < first + number)] - first
        if len(inside):
            found[index] = Deleted.of(inside, number), len(np.unique(inside))
        first += number
    return found


def _extremes_in(metadata: pq.FileMetaData, name: str) -> tuple[float, float] | None:
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    if paths.count(name) != 1:  # lists have other paths
        return None
    groups = [metadata.row_group(index).column(paths.index(name)) for index in range(metadata.num_row_groups)]
    found = [group.statistics for group in groups]
    ends = [end for each in found if each is not None and each.has_min_max for end in (each.min, each.max)]
    if not ends or len(ends) < 2 * len(found) or not all(isinstance(end, int | float | Decimal) for end in ends):
        return None  # excludes text, which float() would turn into numbers
    return float(min(ends)), float(max(ends))


def _open(store: Store, file: str) -> pq.ParquetFile:
    """Return a file whose footer has been read; nothing else can be read from it any more."""
    try:
        with (
            explaining("read the footer of", file),
            arrow_filesystem(store).open_input_file(store.inner_path(file)) as source,
        ):
            return parquet_file(source)
    except StoreError as error:
        cause = error.__cause__
        if isinstance(cause, pa.ArrowInvalid) or "thrift" in str(cause):
            raise DataError(
                f"{file} is not a Parquet file or is damaged: {cause}. Write it again or remove it"
            ) from error
        raise


def _fields(table: TableFiles, footers: Sequence[_Footer], wanted: Sequence[str] | None) -> list[pa.Field]:
    """Return the columns of a table, which every file must have, or those that all files have in common."""
    first = footers[0]
    if table.schema is not None:
        distinct = {footer.schema.serialize().to_pybytes(): footer for footer in footers}.values()
        for name in table.schema.fields.names:
            if wanted is None or name in wanted:
                for footer in distinct:
                    _found(table.schema, name, footer.schema, footer.file)
        return list(table.schema.plain)
    for footer in footers[1:]:
        if _types(footer) != _types(first):
            raise DataError(_difference(first, footer))
    return list(first.schema)


def _found(table: TableSchema, name: str, there: pa.Schema, file: str) -> pa.Field | None:
    """Do :meth:`TableSchema.find`; the error says that Spark may be able to read the table."""
    try:
        return table.find(name, there, file)
    except ValueError as error:
        raise TableError(str(error)) from error


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
