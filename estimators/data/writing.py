"""Writing one partition of a DataFrame: Arrow batches in, at most two Parquet files and one report out.

Runs in Spark's Python workers, so it imports neither pyspark nor torch. Rows are measured here, where they pass by
once. An error that is the user's goes into the report and not up through Spark, which would retry it and bury its text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.measure import ColumnFindings, Uses
from spark_hvd.estimators.errors import EstimatorError
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError
from spark_hvd.store.row_groups import RowGroupWriter

TRAIN, VALIDATION = "train", "validation"
PURPOSES = {TRAIN: "training", VALIDATION: "validation"}
"""What the rows of a split are for, in messages."""


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
        uses: What columns are for.
    """

    store: Store
    directories: dict[str, str]
    columns: tuple[Column, ...]
    validation: float | None
    marked_by: str
    seed: int
    groups: int
    uses: Uses = field(default_factory=Uses)


@dataclass(slots=True)
class WriteReport:
    """What a task did. Turns into JSON and back.

    A file is a dict: split, name, bytes, and groups, the rows of each row group. ``error`` and ``kind`` are of the
    error that ended it.
    """

    measured: ColumnFindings = field(default_factory=ColumnFindings)
    files: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    kind: str = ""

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> WriteReport:
        """The inverse of :meth:`to_bytes`."""
        told = json.loads(data)
        measured = told["measured"]
        shapes = {name: tuple(shape) for name, shape in measured["shapes"].items()}
        measured |= {"shapes": shapes, "odd_weights": tuple(measured["odd_weights"])}
        return cls(**{**told, "measured": ColumnFindings(**measured)})


def write_partition(
    task: WriteTask, batches: Iterable[pa.RecordBatch], partition: int, attempt: int
) -> Iterator[pa.RecordBatch]:
    """Write the rows of one partition, then yield one report; nothing for a partition without rows.

    The split is drawn from the partition's number; ``attempt`` is unique among all task attempts and names the files.
    """
    report = WriteReport()
    try:
        with ExitStack() as stack:
            name = f"part-{partition:05d}-{attempt}.parquet"
            files = {
                split: RowGroupWriter(task.store, f"{path}/{name}", task.groups, stack)
                for split, path in task.directories.items()
            }
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
    if report.measured.rows or report.error:
        yield pa.RecordBatch.from_arrays([pa.array([report.to_bytes()], pa.binary())], ["report"])


def _write_batch(
    task: WriteTask,
    batch: pa.RecordBatch,
    files: dict[str, RowGroupWriter],
    random: np.random.Generator,
    report: WriteReport,
) -> None:
    measured = report.measured
    measured.rows += batch.num_rows
    drawn = None if task.validation is None else pa.array(random.random(batch.num_rows) < task.validation)
    if task.marked_by:
        drawn = batch.column(len(task.columns))
        measured.count(task.marked_by, drawn)
    for number, column in enumerate(task.columns):
        measured.add(column, batch.column(number), task.uses)
    if measured.has_nulls:
        return  # nothing more is written, but the count shall be complete
    arrays = [convert(batch.column(number), column) for number, column in enumerate(task.columns)]
    table = pa.Table.from_arrays(arrays, schema=schema_of(task.columns, task.uses.nullable))
    parts = (
        {TRAIN: table} if drawn is None else {TRAIN: table.filter(pc.invert(drawn)), VALIDATION: table.filter(drawn)}
    )
    for split, part in parts.items():
        files[split].add(part)
        weights = task.uses.weights
        if weights is not None and not part.column(weights).null_count:
            measured.weigh(PURPOSES[split], part.column(weights))


def schema_of(columns: Sequence[Column], nullable: Sequence[str] = ()) -> pa.Schema:
    """Types in the files: numbers, lists of numbers for whatever shape, and structs for sparse vectors."""
    return pa.schema([pa.field(each.name, _type_of(each), nullable=each.name in nullable) for each in columns])


def _type_of(column: Column) -> pa.DataType:
    if column.dtype == "object":
        return pa.binary() if column.spark_type == "binary" else pa.string()
    number = pa.bool_() if column.dtype == "bool" else getattr(pa, column.dtype)()
    if column.encoding == "sparse":
        members = [("size", pa.int32()), ("indices", _list(pa.int32())), ("values", _list(number))]
        return pa.struct([pa.field(name, kind, nullable=False) for name, kind in members])
    return number if column.shape == () else _list(number)


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


def convert(array: pa.Array, column: Column) -> pa.Array:
    """One column of a batch, which was measured and is not empty, as it goes into the file."""
    if column.dtype == "object":
        return array.cast(_type_of(column))
    kind = _type_of(column)
    if column.encoding == "sparse":
        return _convert_sparse(array, kind)
    if column.shape == ():
        return array if array.type == kind else array.cast(kind)
    rows, values = len(array), array
    while pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        values = values.flatten()
    nulls = array.is_null()
    lengths = np.where(nulls.to_numpy(zero_copy_only=False), 0, len(values) // max(1, rows - array.null_count))
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values.cast(kind.value_type), type=kind, mask=nulls)


def _convert_sparse(array: pa.Array, kind: pa.DataType) -> pa.Array:
    sizes, indices, values = (array.field(array.type.get_field_index(name)) for name in ("size", "indices", "values"))
    lists = [
        pa.ListArray.from_arrays(
            part.offsets, part.values.cast(kind.field(name).type.value_type), kind.field(name).type
        )
        for part, name in ((indices, "indices"), (values, "values"))
    ]
    return pa.StructArray.from_arrays([sizes.cast(pa.int32()), *lists], fields=list(kind))
