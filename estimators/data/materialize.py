"""Writes a DataFrame to the store as Parquet, in one Spark job; each task writes a file per split and reports on it.

Nothing is shuffled, and the DataFrame is computed only once, also if it is split. Each attempt of a task writes files
under new names, and only reported files count. The data exist once the manifest is written.
"""

from __future__ import annotations

import logging
import posixpath
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import BooleanType, IntegralType

from spark_hvd.data.readers.dataset import Column, DatasetMeta, RowGroup
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.measure import ColumnFindings, Uses
from spark_hvd.estimators.data import reuse
from spark_hvd.estimators.data.columns import check_columns, expression_of
from spark_hvd.estimators.data.reuse import delete_unused
from spark_hvd.estimators.data.writing import PURPOSES, TRAIN, VALIDATION, WriteReport, WriteTask
from spark_hvd.estimators.errors import EstimatorError
from spark_hvd.runner.spark.names import job_named
from spark_hvd.runner.spark.series import quoted
from spark_hvd.runner.spark.session import choose_python, tells_case_apart
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_log = logging.getLogger(__name__)
Datasets = tuple[DatasetMeta, DatasetMeta | None]
"""The training data, and the validation data if there are any."""


def materialize(
    df: DataFrame,
    columns: Sequence[Column],
    store: Store,
    *,
    num_proc: int,
    validation: float | str | None = None,
    seed: int = 0,
    partitions_per_process: int = 10,
    uses: Uses | None = None,
    who: str = "materialize",
) -> Datasets:
    """Write ``columns`` of ``df`` as Parquet, or find them already written.

    Args:
        df: The rows. They are computed once, or not at all if they have been written before.
        columns: What :func:`spark_hvd.estimators.data.columns.columns_of` returned.
        store: The store for the files. All hosts must be able to reach it.
        num_proc: Number of ranks that will read the data.
        validation: Share of the rows for validation, above 0 and below 1, drawn row by row; or the name of a boolean
            or integer column that is true or above 0 in the rows for validation; or None for no validation.
        seed: Seed of that draw. The same partitions with the same rows and seed are split in the same way.
        partitions_per_process: Minimum number of row groups for each rank, if there are enough rows.
        uses: What the columns are used for.
        who: Name of the caller, which the Spark UI shows.

    Returns:
        The training data and the validation data, or None for the latter if ``validation`` is None. The shapes of
        vectors and arrays are those found in the values.

    Raises:
        ValueError: ``validation`` is not between 0 and 1.
        DataError: There are nulls, lists of different lengths, or no rows; the validation column has the wrong type;
            or the weights cannot be used.
        StoreError: The store cannot be written.
    """
    if not store.is_shared:
        raise StoreError(
            f"cannot write data to {store.url}: Spark tasks do not see it. Use a path that all hosts share"
        )
    check_validation(df, validation)
    groups = num_proc * partitions_per_process
    key = reuse.key_of(reuse.fingerprint(df), (tuple(columns), validation, seed, groups, uses))
    delete_unused(store)
    with reuse.using(store, key):
        manifest = reuse.read_manifest(store, key)
        if manifest is None:
            manifest = _write(df, columns, store, key, validation, seed, groups, uses or Uses(), who)
            reuse.write_manifest(store, key, manifest)
        else:
            _log.info("reusing the data in %s", store.data_path(key))
    train, held_out = (manifest[split] and DatasetMeta.from_json(manifest[split]) for split in (TRAIN, VALIDATION))
    return train, held_out


def check_validation(df: DataFrame, validation: float | str | None) -> None:
    """Check that ``validation`` is a share of the rows, or a column that marks them, as in :func:`materialize`.

    Raises:
        ValueError: The share is not between 0 and 1.
        DataError: The column is missing, or has the wrong type.
    """
    if isinstance(validation, str):
        check_columns(df.schema, [validation], "validation", exact=tells_case_apart(df.sparkSession))
        kind = df.schema[validation].dataType
        if not isinstance(kind, (BooleanType, IntegralType)):
            raise DataError(
                f"validation={validation!r} is a column of type {kind.simpleString()}: expected boolean or integer, "
                "true or above 0 in the rows for validation"
            )
    elif validation is not None and not 0 < validation < 1:
        raise ValueError(
            f"validation={validation!r}: expected a share of the rows above 0 and below 1, the name of a column, "
            "or None for no validation"
        )


def _write(
    df: DataFrame,
    columns: Sequence[Column],
    store: Store,
    key: str,
    validation: float | str | None,
    seed: int,
    groups: int,
    uses: Uses,
    who: str,
) -> dict[str, Any]:
    """Run the job and return the manifest. On an error, delete everything that the job wrote."""
    directories = reuse.directories_of(store, key)
    if validation is None:
        del directories[VALIDATION]
    share, marked_by = (None, validation) if isinstance(validation, str) else (validation, "")
    task = WriteTask(store, directories, tuple(columns), share, marked_by, seed, groups, uses)
    sources = [expression_of(column) for column in columns]
    if marked_by:
        sources.append(F.col(quoted(marked_by)).cast("bigint") > 0)
    # mapInArrow takes a dot in a name for a field of a struct, so rename the columns; tasks go by position
    selected = df.select([source.alias(f"c{number}") for number, source in enumerate(sources)])
    choose_python(df.sparkSession)
    try:
        job = selected.mapInArrow(_writer(task), "report binary")
        with job_named(job, f"spark_hvd: {who} writes its data to {posixpath.dirname(directories[TRAIN])}"):
            rows = job.collect()
        reports = [WriteReport.from_bytes(bytes(row["report"])) for row in rows]
        manifest = _manifest(reports, task, _checked(reports, task))
    except BaseException:
        for directory in directories.values():
            _delete_quietly(store, posixpath.dirname(directory))
        raise
    for directory in directories.values():  # delete files of attempts that Spark repeated, gave up or killed
        for path in store.list(directory, unfinished=True):
            if path not in manifest["sizes"]:
                _delete_quietly(store, path)
    return manifest


def _writer(task: WriteTask) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        from spark_hvd.estimators.data.writing import write_partition

        context = TaskContext.get()
        assert context is not None
        yield from write_partition(task, batches, context.partitionId(), context.taskAttemptId())

    return write


def _checked(reports: Sequence[WriteReport], task: WriteTask) -> ColumnFindings:
    """Merge what the tasks measured. Raise the error of a task, or a DataError if the rows cannot be used."""
    for report in reports:
        if report.error:
            raise {"DataError": DataError, "StoreError": StoreError}.get(report.kind, EstimatorError)(report.error)
    measured = ColumnFindings.together(report.measured for report in reports)
    measured.check(task.uses.weights)
    rows = measured.rows
    if not rows:
        raise DataError("the DataFrame has no rows: expected at least one. Check filters and joins that lead to it")
    written: Counter[str] = Counter()
    for report in reports:
        for file in report.files:
            written[file["split"]] += sum(file["groups"])
    for split, purpose in PURPOSES.items():
        if split in task.directories and not written[split]:
            value = repr(task.marked_by or task.validation)
            remedy = (
                "Check that column: it must be true or above 0 in the rows for validation, and in those only"
                if task.marked_by
                else "Use another share, more rows or another seed"
            )
            raise DataError(f"no rows for {purpose}: validation={value} leaves none of {rows}. {remedy}")
    return measured


def _manifest(reports: Sequence[WriteReport], task: WriteTask, measured: ColumnFindings) -> dict[str, Any]:
    columns = measured.of(task.columns)
    manifest: dict[str, Any] = {"sizes": {}, TRAIN: None, VALIDATION: None}
    files = sorted((file for report in reports for file in report.files), key=lambda file: str(file["name"]))
    for split, directory in task.directories.items():
        groups: list[RowGroup] = []
        sizes: dict[str, int] = {}
        for file in files:
            if file["split"] == split:
                path = f"{directory}/{file['name']}"
                groups += [RowGroup(path, index, rows) for index, rows in enumerate(file["groups"])]
                sizes[path] = file["bytes"]
        meta = DatasetMeta(directory, columns, tuple(groups), sum(sizes.values()))
        _log.info(
            "%s: wrote %d rows (%.1f MiB) to %s: %d files, %d row groups",
            split,
            meta.rows,
            meta.bytes / 2**20,
            directory,
            len(sizes),
            len(groups),
        )
        manifest["sizes"].update(sizes)
        manifest[split] = meta.to_json()
    return manifest


def _delete_quietly(store: Store, path: str) -> None:
    try:
        store.delete(path)
    except StoreError as error:
        _log.warning("%s; the file is no longer needed", error)
