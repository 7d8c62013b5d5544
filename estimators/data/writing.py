"""Writing one partition of a DataFrame: Arrow batches in, at most two Parquet files and one report out.

Runs in Spark's Python workers, so it imports neither pyspark nor torch. Rows are checked here, where they pass by once:
nulls are counted, the shapes of lists and vectors measured. An error that is the user's goes into the report and not
up through Spark, which would retry it and bury its text.

How large a row group gets cannot follow from the number of rows, which nobody knows yet. Each holds a fixed share of
what its file holds already, so a file of any size has enough of them to share out, and a large one not too many.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators.errors import EstimatorError
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError

TRAIN, VALIDATION = "train", "validation"

_GROUP_BYTES = 16 << 20
_GROUP_ROWS = 1000  # at least; below that the overhead of a row group outweighs its data


@dataclass(frozen=True, slots=True)
class WriteTask:
    """What every task is told.

    Attributes:
        store: Takes the files.
        directories: By split ("train", "validation"), where its files go.
        columns: To write, as the DataFrame hands them out.
        validation: Share of the rows that go to "validation"; None where a column tells or none do.
        marked_by: Name of the column that tells, "" where none does. It comes as a boolean after ``columns``.
        seed: Of the split.
        groups: Row groups that a file shall have at least, where it has rows enough.
    """

    store: Store
    directories: dict[str, str]
    columns: tuple[Column, ...]
    validation: float | None
    marked_by: str
    seed: int
    groups: int


@dataclass(slots=True)
class WriteReport:
    """What a task did. Turns into JSON and back.

    Attributes:
        rows: That it read.
        nulls: Column name -> rows where it is null.
        inner_nulls: Column name -> nulls inside its lists.
        shapes: Column name -> shape of its values; binary columns have none.
        files: One dict a file: split, name, bytes, and groups: the rows of each row group.
        error: Text of the error that ended it, "" if none did.
        kind: Name of the error's class.
    """

    rows: int = 0
    nulls: dict[str, int] = field(default_factory=dict)
    inner_nulls: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    files: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    kind: str = ""

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> WriteReport:
        """The inverse of :meth:`to_bytes`."""
        report = cls(**json.loads(data))
        report.shapes = {name: tuple(shape) for name, shape in report.shapes.items()}
        return report


def write_partition(
    task: WriteTask, batches: Iterable[pa.RecordBatch], partition: int, attempt: int
) -> Iterator[pa.RecordBatch]:
    """Write the rows of one partition, then yield one report; nothing for a partition without rows.

    Args:
        task: What to write, and where to.
        batches: The rows.
        partition: Number of the partition, from which the split is drawn.
        attempt: Unique among all task attempts, those that Spark retries or runs twice included: makes file names.
    """
    report = WriteReport()
    try:
        with ExitStack() as stack:
            name = f"part-{partition:05d}-{attempt}.parquet"
            files = {split: _File(task, f"{path}/{name}", stack) for split, path in task.directories.items()}
            random = np.random.default_rng((task.seed, partition))
            for batch in batches:
                if batch.num_rows:
                    _write_batch(task, batch, files, random, report)
            groups = {split: file.finish() for split, file in files.items()}
        report.files = [
            {
                "split": split,
                "name": name,
                "bytes": task.store.size(f"{task.directories[split]}/{name}"),
                "groups": rows,
            }
            for split, rows in groups.items()
            if rows
        ]
    except (DataError, EstimatorError, StoreError) as error:
        report.error, report.kind = str(error), type(error).__name__
    if report.rows or report.error:
        yield pa.RecordBatch.from_arrays([pa.array([report.to_bytes()], pa.binary())], ["report"])


def _write_batch(
    task: WriteTask, batch: pa.RecordBatch, files: dict[str, _File], random: np.random.Generator, report: WriteReport
) -> None:
    report.rows += batch.num_rows
    drawn = None if task.validation is None else pa.array(random.random(batch.num_rows) < task.validation)
    if task.marked_by:
        drawn = batch.column(len(task.columns))
        _count(report.nulls, task.marked_by, drawn)
    arrays = [convert(batch.column(number), column, report) for number, column in enumerate(task.columns)]
    if report.nulls or report.inner_nulls:
        return  # nothing more is written, but the count shall be complete
    table = pa.Table.from_arrays(arrays, schema=schema_of(task.columns))
    if drawn is None:
        files[TRAIN].add(table)
    else:
        files[TRAIN].add(table.filter(pc.invert(drawn)))
        files[VALIDATION].add(table.filter(drawn))


class _File:
    """One Parquet file, made when its first row comes, written row group by row group."""

    def __init__(self, task: WriteTask, path: str, stack: ExitStack) -> None:
        self._task, self._path, self._stack = task, path, stack
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._waiting_rows = self._waiting_bytes = self._written = 0
        self._groups: list[int] = []

    def add(self, table: pa.Table) -> None:
        if table.num_rows:
            self._waiting.append(table)
            self._waiting_rows += table.num_rows
            self._waiting_bytes += table.nbytes
            while self._waiting_rows >= 2 * (rows := self._next_rows()):  # what is left makes a full one at the end
                self._write(rows)

    def finish(self) -> list[int]:
        """Write what is left; return the rows of each row group."""
        while self._waiting_rows:
            rows = self._next_rows()
            self._write(self._waiting_rows if self._waiting_rows < 1.5 * rows else rows)
        if self._writer is not None:
            self._writer.close()
        return self._groups

    def _next_rows(self) -> int:
        share = max(_GROUP_ROWS, self._written // self._task.groups)
        return max(1, min(share, _GROUP_BYTES * self._waiting_rows // max(1, self._waiting_bytes)))

    def _write(self, rows: int) -> None:
        if self._writer is None:
            sink = self._stack.enter_context(self._task.store.writing(self._path))
            # no dictionaries: features hardly repeat, and plain pages decode faster
            self._writer = pq.ParquetWriter(
                sink, schema_of(self._task.columns), compression="snappy", use_dictionary=False, write_statistics=False
            )
        table = pa.concat_tables(self._waiting)
        self._writer.write_table(table.slice(0, rows), row_group_size=rows)
        rest = table.slice(rows)
        self._waiting = [rest] if rest.num_rows else []
        self._waiting_rows, self._waiting_bytes = rest.num_rows, rest.nbytes
        self._written += rows
        self._groups.append(rows)


def schema_of(columns: Sequence[Column]) -> pa.Schema:
    """Types in the files: numbers, lists of numbers for whatever shape, and structs for sparse vectors. No nulls."""
    return pa.schema([pa.field(column.name, _type_of(column), nullable=False) for column in columns])


def _type_of(column: Column) -> pa.DataType:
    if column.dtype == "object":
        return pa.binary()
    number = pa.bool_() if column.dtype == "bool" else getattr(pa, column.dtype)()
    if column.encoding == "sparse":
        members = [("size", pa.int32()), ("indices", _list(pa.int32())), ("values", _list(number))]
        return pa.struct([pa.field(name, kind, nullable=False) for name, kind in members])
    return number if column.shape == () else _list(number)


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


def convert(array: pa.Array, column: Column, report: WriteReport) -> pa.Array:
    """One column of a batch as it goes into the file. Counts nulls and notes the shape in ``report``.

    Raises:
        DataError: lists or vectors of different lengths.
    """
    if _count(report.nulls, column.name, array):
        return array
    if column.dtype == "object":
        return array.cast(pa.binary())
    if column.encoding == "sparse":
        return _convert_sparse(array, column, report)
    kind = _type_of(column)
    if column.shape == ():
        report.shapes[column.name] = ()
        return array if array.type == kind else array.cast(kind)
    rows, values = len(array), array
    shape: list[int] = []
    while pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        shape.append(_one_length(pc.list_value_length(values), column.name))
        values = values.flatten()
        if _count(report.inner_nulls, column.name, values):
            return array
    _agree(tuple(shape), column, report)
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * (len(values) // rows))
    return pa.ListArray.from_arrays(offsets, values.cast(kind.value_type), type=kind)


def _convert_sparse(array: pa.Array, column: Column, report: WriteReport) -> pa.Array:
    kind = _type_of(column)
    sizes, indices, values = (array.field(array.type.get_field_index(name)) for name in ("size", "indices", "values"))
    _agree((_one_length(sizes, column.name),), column, report)
    lists = [
        pa.ListArray.from_arrays(
            part.offsets, part.values.cast(kind.field(name).type.value_type), kind.field(name).type
        )
        for part, name in ((indices, "indices"), (values, "values"))
    ]
    return pa.StructArray.from_arrays([sizes.cast(pa.int32()), *lists], fields=list(kind))


def _count(nulls: dict[str, int], name: str, array: pa.Array) -> int:
    if array.null_count:
        nulls[name] = nulls.get(name, 0) + array.null_count
    return int(array.null_count)


def _one_length(lengths: pa.Array, name: str) -> int:
    """The one length of all lists at one depth below the rows."""
    extremes = pc.min_max(lengths)
    low, high = extremes["min"].as_py() or 0, extremes["max"].as_py() or 0
    if low != high:
        raise DataError(ragged(name, (low,), (high,)))
    return int(low)


def _agree(shape: tuple[int, ...], column: Column, report: WriteReport) -> None:
    known = report.shapes.setdefault(column.name, shape)
    if known != shape:
        raise DataError(ragged(column.name, known, shape))


def ragged(name: str, one: tuple[int, ...], other: tuple[int, ...]) -> str:
    """The text of the error for values of two shapes."""
    flat = len(one) == len(other) == 1
    values = f"of length {one[0]} and of {other[0]}" if flat else f"of shape {one} and of {other}"
    return (
        f"column {name!r} has lists or vectors {values}: expected one length for all rows. "
        "Pad or cut them to one length before fit."
    )
