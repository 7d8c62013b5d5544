"""Writes the rows of elastic ranks to Parquet before any rank starts, so that later ranks read the same rows.

Ranks of a static run have a DataFrame's rows on the disks of their hosts, and would lose them with a host. For elastic
ranks, one Spark job computes each row once, and writes it to a place where every rank finds it, whenever it starts.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import posixpath
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import psutil

from spark_hvd.runner.launch.data import RunData, check_rows
from spark_hvd.runner.spark import session as on_spark
from spark_hvd.runner.spark.names import job_named
from spark_hvd.scratch import Scratch

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from spark_hvd.store import Store

_log = logging.getLogger(__name__)
_FOLDER, _OWNER = "run_data-", "owner.json"
_GROUPS = 32
"""Minimum number of row groups of a file that has enough rows."""


@contextmanager
def stored(
    sets: RunData, store: str | os.PathLike[str] | Store | None = None, session: SparkSession | None = None
) -> Iterator[Mapping[str, bytes]]:
    """Yield the sources of all data sets for the ranks, and delete the files written for them afterwards.

    Without a store, files go to a temporary folder of this machine. Without a session, the ranks run on this machine.

    Raises:
        ValueError: Rows must be written, but no storage is known that all hosts can reach; or a data set is Windows.
        DataError: A data set has no rows.
        StoreError: Rows cannot be written.
    """
    rows = [*sets.frames, *sets.tables]
    if not rows:
        yield sets.sources
        return
    from spark_hvd.data.parquet import dataset_of  # imports pyarrow, which a run without data does not need
    from spark_hvd.data.series.windows import Windows
    from spark_hvd.data.source import ParquetSource

    for name in rows:
        if isinstance(sets.frames.get(name, sets.tables.get(name)), Windows):
            raise ValueError(
                f"data[{name!r}] is Windows over series, whose rows are on the ranks' disks, but ranks of an elastic "
                "run join and leave. Use run, with max_restarts= against losses"
            )
    with _place(rows[0], store, session) as (place, folder):
        sources = dict(sets.sources)
        for number, name in enumerate(rows):
            path = posixpath.join(folder, str(number))
            if name in sets.frames:
                _write_frame(place, path, name, sets.frames[name])  # type: ignore[arg-type]  # halves are a fit's
            else:
                _write_table(place, path, name, sets.tables[name])
            sources[name] = pickle.dumps(ParquetSource(dataset_of(place, path), place))
        yield sources


@contextmanager
def _place(
    name: str, given: str | os.PathLike[str] | Store | None, session: SparkSession | None
) -> Iterator[tuple[Store, str]]:
    from spark_hvd.store import Store

    if given is None:
        if session is not None and (on_spark.is_connect(session) or not on_spark.is_local(session)):
            raise ValueError(
                f"data[{name!r}] has its rows in Spark or in this program, but ranks of run_elastic join and leave, so "
                'the rows must be written to a place that all hosts reach. Expected data_store="s3://bucket/prefix" '
                "or a path that all hosts share, or the path of the rows' own files in data="
            )
        with Scratch("rows") as path:
            yield Store.create(path), path
        return
    store = given if isinstance(given, Store) else Store.create(given)
    if not store.is_shared:
        raise ValueError(f"data_store={store.url!r}: expected a place that other processes can read, too")
    _sweep(store)
    folder = store.join(f"{_FOLDER}{uuid.uuid4().hex}")
    try:
        store.write_bytes(posixpath.join(folder, _OWNER), json.dumps(_owner()).encode())
        yield store, folder
    finally:
        store.delete(folder)


def _owner() -> dict[str, Any]:
    """Return the identity of this process, by which others can find out whether it is alive."""
    process = psutil.Process()
    return {"where": _where(), "pid": process.pid, "born": process.create_time()}


def _where() -> list[str]:
    """Return the scope in which process IDs are unique: one boot of one machine, one container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return [file.read().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:  # not Linux, or hidden
        return []


def _sweep(store: Store) -> None:
    """Delete the rows of killed programs of this machine; we cannot tell whether programs elsewhere are alive."""
    for path in store.list(store.url):
        if posixpath.basename(path).startswith(_FOLDER) and _is_left(store, path):
            _log.warning("deleting %s, the rows of a run whose program was killed", path)
            store.delete(path)


def _is_left(store: Store, folder: str) -> bool:
    from spark_hvd.store.errors import StoreError

    try:
        owner = json.loads(store.read_bytes(posixpath.join(folder, _OWNER)))
        if not owner["where"] or owner["where"] != _where():
            return False
        return bool(abs(psutil.Process(owner["pid"]).create_time() - owner["born"]) > 1.0)
    except psutil.NoSuchProcess:
        return True
    except (StoreError, psutil.Error, ValueError, KeyError, TypeError, OSError):  # not written yet, or not readable
        return False


def _write_table(store: Store, path: str, name: str, table: pa.Table) -> None:
    from spark_hvd.store.row_groups import RowGroupWriter

    check_rows(name, table.num_rows)
    with ExitStack() as stack:
        writer = RowGroupWriter(store, posixpath.join(path, "part-00000.parquet"), _GROUPS, stack)
        writer.add(table)
        writer.finish()


def _write_frame(store: Store, path: str, name: str, frame: DataFrame) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    from spark_hvd.runner.spark.input import with_lists
    from spark_hvd.runner.spark.series import quoted

    listed = with_lists(frame)
    # mapInArrow takes a name with dots for a field of a struct.
    selected = listed.select([F.col(quoted(column)).alias(f"c{at}") for at, column in enumerate(listed.columns)])
    on_spark.choose_python(frame.sparkSession)
    job = selected.mapInArrow(_writer(store, path, listed.columns), "file string, rows long")
    with job_named(job, f"spark_hvd: data[{name!r}] is written to {path}"):
        written = job.collect()
    check_rows(name, sum(row["rows"] for row in written))
    kept = {row["file"] for row in written}
    for file in store.list(path, unfinished=True):  # delete files of task attempts that were repeated or killed
        if file not in kept:
            store.delete(file)


def _writer(
    store: Store, path: str, columns: list[str]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyspark import TaskContext

        from spark_hvd.store.row_groups import RowGroupWriter

        context = TaskContext.get()
        assert context is not None
        file = posixpath.join(path, f"part-{context.partitionId():05d}-{context.taskAttemptId()}.parquet")
        with ExitStack() as stack:
            writer = RowGroupWriter(store, file, _GROUPS, stack)
            for batch in batches:
                writer.add(pa.Table.from_batches([batch]).rename_columns(columns))
            rows = sum(writer.finish())
        if rows:
            yield pa.RecordBatch.from_pydict({"file": [file], "rows": [rows]})

    return write
