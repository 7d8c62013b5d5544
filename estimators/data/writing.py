"""Writes one partition of a DataFrame: Arrow batches in, at most two Parquet files and one report out.

This runs in Spark's Python workers, so it imports neither pyspark nor torch. Rows are measured while they are written,
to read them only once. Errors that the user must correct go into the report. Spark would retry the task if they were
raised, and bury their text.
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
"""The purpose of each split, as messages call it."""


@dataclass(frozen=True, slots=True)
class WriteTask:
    """Tells a task what to write and how. It is the same for all tasks.

    Attributes:
        store: The store that holds the files.
        directories: The directory of each split ("train", "validation").
        columns: The columns to write, in the order in which the DataFrame has them.
        validation: Share of the rows to draw for "validation"; None if a column marks these rows, or if there are none.
        marked_by: Name of the column that marks the rows for validation, a boolean after ``columns``; "" if none does.
        seed: Seed of the draw.
        groups: Minimum number of row groups in a file that has enough rows.
        uses: What the columns are used for.
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
    """A task's report, which travels as JSON."""

    measured: ColumnFindings = field(default_factory=ColumnFindings)
    files: list[dict[str, Any]] = field(default_factory=list)
    """For each file a dict: split, name, bytes, and groups (the number of rows of each row group)."""
    error: str = ""
    """The text of the error that ended the task."""
    kind: str = ""
    """The name of that error's class."""

    def to_bytes(self) -> bytes:
        """Return the report as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> WriteReport:
        """Undo :meth:`to_bytes`."""
        fields = json.loads(data)
        measured = fields["measured"]  # JSON has turned its tuples into lists
        shapes = {name: tuple(shape) for name, shape in measured["shapes"].items()}
        measured |= {"shapes": shapes, "odd_weights": tuple(measured["odd_weights"])}
        return cls(**{**fields, "measured": ColumnFindings(**measured)})


def write_partition(
    task: WriteTask, batches: Iterable[pa.RecordBatch], partition: int, attempt: int
) -> Iterator[pa.RecordBatch]:
    """Write the rows of one partition, then yield a batch with the report; yield nothing if there are no rows.

    The draw depends on the seed and the partition's number, so a repeated task draws the same rows. ``attempt``, which
    is unique among all task attempts, keeps a repeated task from overwriting files.
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
        return  # the fit will fail, so write nothing more, but count all nulls for the message
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
    """Return the types in the files: numbers, flat lists of numbers for any shape, and structs for sparse vectors."""
    return pa.schema([pa.field(each.name, _type_of(each), nullable=each.name in nullable) for each in columns])


def _type_of(column: Column) -> pa.DataType:
    if column.dtype == "object":
        return pa.binary() if column.spark_type == "binary" else pa.string()
    number = pa.bool_() if column.dtype == "bool" else getattr(pa, column.dtype)()
    if column.encoding == "sparse":
        members = [("size", pa.int32()), ("indices", _list(pa.int32())), ("values", _list(number))]
        return pa.struct([pa.field(name, type_, nullable=False) for name, type_ in members])
    return number if column.shape == () else _list(number)


def _list(element: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", element, nullable=False))


def convert(array: pa.Array, column: Column) -> pa.Array:
    """Return a column of a batch with its type in the file. The batch must be measured and not empty."""
    type_ = _type_of(column)
    if column.dtype == "object":
        return array.cast(type_)
    if column.encoding == "sparse":
        return _convert_sparse(array, type_)
    if column.shape == ():
        return array if array.type == type_ else array.cast(type_)
    # Nested lists become one flat list per row. Measuring has shown that all rows but nulls are equally long.
    rows, values = len(array), array
    while pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        values = values.flatten()
    nulls = array.is_null()
    lengths = np.where(nulls.to_numpy(zero_copy_only=False), 0, len(values) // max(1, rows - array.null_count))
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values.cast(type_.value_type), type=type_, mask=nulls)


def _convert_sparse(array: pa.Array, struct: pa.DataType) -> pa.Array:
    sizes, indices, values = (array.field(array.type.get_field_index(name)) for name in ("size", "indices", "values"))
    lists = [
        pa.ListArray.from_arrays(
            part.offsets, part.values.cast(struct.field(name).type.value_type), struct.field(name).type
        )
        for part, name in ((indices, "indices"), (values, "values"))
    ]
    return pa.StructArray.from_arrays([sizes.cast(pa.int32()), *lists], fields=list(struct))
