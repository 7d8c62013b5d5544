"""Sorts the values of ``data=`` by the way in which each reaches the tasks of a run."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeGuard

from spark_hvd.runner.outcome.payload import UnpicklableError, explain
from spark_hvd.runner.spark.session import tells_case_apart
from spark_hvd.world.pickles import dumps

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from spark_hvd.data.feeders.mapping import Mapped, RowMap
    from spark_hvd.data.readers.errors import TableError
    from spark_hvd.data.series.windows import Windows
    from spark_hvd.data.tables import SparkRead
    from spark_hvd.runner.spark.input import Split

_log = logging.getLogger(__name__)

KINDS = (
    "a Spark DataFrame; a pandas DataFrame, a data set of Hugging Face or Arrow, or a table that Arrow can import, "
    "such as one of Polars or DuckDB; Windows over one of these; a table of deltalake or pyiceberg; the path of "
    "Parquet files or of such a table; a list of paths of Parquet files; or one of these as Mapped"
)
_TABLES = {"deltalake": "DeltaTable", "pyiceberg.table": "Table"}
_INSTEAD = {
    ("datasets", "DatasetDict"): "it directly as data=, or its data sets by name",
    ("datasets", "IterableDataset"): "the paths of its Parquet files, or a Dataset",
    ("duckdb", "DuckDBPyConnection"): "connection.sql(query)",
    ("polars", "LazyFrame"): "frame.collect()",
}
_PIECE_ROWS = 65_536
_MOST_CODE = 64 << 20
"""Maximum size of a function in bytes. It passes through Java's heap, and reaches ranks as text of twice the size."""


@dataclass(frozen=True)
class RunData:
    """The data sets of a run by name, sorted by the way they reach the tasks.

    Attributes:
        frames: Spark DataFrames, whose rows are the input of the run's stage.
        tables: Tables in this program's memory.
        sources: Pickled sources, which the ranks read themselves.
        refused: Tables that only Spark may be able to read.
        maps: The functions of mapped data sets.
    """

    frames: Mapping[str, DataFrame | Split | Windows] = field(default_factory=dict)
    tables: Mapping[str, pa.Table | Windows] = field(default_factory=dict)
    sources: Mapping[str, bytes] = field(default_factory=dict)
    refused: Mapping[str, _Refused] = field(default_factory=dict)
    maps: Mapping[str, RowMap] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.frames or self.tables or self.sources or self.refused)

    def without_spark(self, function: str) -> RunData:
        """Check that no data set needs Spark, and return them.

        Raises:
            ValueError: One is a Spark DataFrame.
            DataError: A table cannot be read without Spark.
        """
        for refused in self.refused.values():
            raise refused.error
        if self.frames:
            raise ValueError(
                f"data[{next(iter(self.frames))!r}] is a Spark DataFrame, but {function} runs without Spark: pass "
                "df.toArrow() or the path of its files, or use spark_hvd.run"
            )
        return self

    @contextmanager
    def on_disk(self) -> Iterator[Mapping[str, str]]:
        """Write the rows of the tables to temporary folders, and yield these by name.

        Raises:
            DataError: The disk is full.
        """
        if not self.tables:
            yield {}
            return
        from spark_hvd.data.spool import spool_table
        from spark_hvd.scratch import Scratch

        with Scratch("rows") as parent:
            folders = {name: os.path.join(parent, str(at)) for at, name in enumerate(self.tables)}
            for name, folder in folders.items():
                spool_table(folder, _rows_of(self.tables[name]))
            yield folders

    def read_by(self, session: SparkSession) -> RunData:
        """Replace the refused tables by frames that Spark reads.

        Raises:
            DataError: Spark cannot read one.
        """
        read = {name: each.frame(name, session) for name, each in self.refused.items()}
        return replace(self, frames={**self.frames, **read}, refused={})

    def in_spark(self, session: SparkSession) -> RunData:
        """Replace all tables by Spark DataFrames, for tasks that may run on any host."""
        made = {name: _frame_of(session, name, table) for name, table in self.tables.items()}
        return replace(self, frames={**self.frames, **made}, tables={})


@dataclass(frozen=True)
class _Refused:
    """A table that ranks cannot read in place: the reason, and how Spark can read it."""

    error: TableError
    read: SparkRead | None

    def frame(self, name: str, session: SparkSession) -> DataFrame:
        if self.read is None:
            raise self.error
        try:
            frame = session.read.format(self.read.format).options(**self.read.options).load(self.read.path)
            columns = frame.columns  # over Connect, Spark's errors are raised here
        except Exception as error:  # PySpark's classes of errors differ between its versions and Connect
            first = str(error).strip().partition("\n")[0]
            raise type(self.error)(f"{self.error}. Spark cannot read it in this session: {first}") from error
        _check_names(name, columns, exact=tells_case_apart(session))
        why = str(self.error).partition(" Next: ")[0]
        _log.warning("data[%r] is read by Spark, which sends its rows to the ranks: %s", name, why)
        return frame


def run_data_of(data: Mapping[str, Any] | None) -> RunData:
    """Sort the values of ``data=`` by the way they reach the tasks.

    Raises:
        TypeError, ValueError: A name or a value is not supported; nothing was started.
        DataError: Files cannot be read, or a table has no rows.
    """
    if data is None:
        return RunData()
    if not isinstance(data, Mapping):
        raise TypeError(f'data={type(data).__name__}: expected data sets by name, such as {{"train": df}}')
    frames: dict[str, DataFrame | Split | Windows] = {}
    tables: dict[str, pa.Table | Windows] = {}
    sources: dict[str, bytes] = {}
    refused: dict[str, _Refused] = {}
    maps: dict[str, RowMap] = {}
    for name, value in data.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f'data[{name!r}]: expected a name, such as "train"')
        if _is_mapped(value):
            maps[name], value = _row_map(name, value), value.rows
        if isinstance(value, str | os.PathLike) or _are_paths(value) or _is_table(value):
            from spark_hvd.data.readers.errors import TableError

            # It imports pyarrow, which a run without data does not need.
            from spark_hvd.data.source import parquet_source
            from spark_hvd.data.tables import spark_read_of

            try:
                sources[name] = pickle.dumps(parquet_source(value))
            except TableError as error:
                refused[name] = _Refused(error, spark_read_of(value))
        elif _is_frame(value):
            frames[name] = value
            _check_names(name, value.columns, exact=tells_case_apart(value.sparkSession))
        elif _is_windows(value):
            (frames if _is_frame(value.rows) else tables)[name] = _checked(name, value)
        elif (split := sys.modules.get("spark_hvd.runner.spark.input")) is not None and isinstance(value, split.Split):
            frames[name] = value
        elif (table := _table_of(name, value)) is not None:
            tables[name] = table
            _check_names(name, table.column_names)
            check_rows(name, table.num_rows)
        elif instead := _INSTEAD.get((type(value).__module__.partition(".")[0].lstrip("_"), type(value).__name__)):
            raise TypeError(f"data[{name!r}] is a {type(value).__name__}: pass {instead}")
        elif type(value).__module__.startswith("pyspark.pandas."):
            kind = type(value).__name__
            raise TypeError(
                f"data[{name!r}] is a {kind} of pandas on Spark: pass "
                f"{'frame.to_spark()' if kind == 'DataFrame' else 'series.to_frame().to_spark()'}"
            )
        else:
            raise TypeError(f"data[{name!r}] is of type {type(value).__qualname__}: expected {KINDS}")
    return RunData(frames, tables, sources, refused, maps)


def check_rows(data: str, rows: int) -> None:
    """Refuse a data set without rows.

    Raises:
        DataError: It has none.
    """
    if not rows:
        from spark_hvd.data.readers.errors import DataError

        raise DataError(
            f"data[{data!r}] has no rows: expected at least one for each rank. Check the filters and joins before it"
        )


def _check_names(data: str, columns: list[str], exact: bool = True) -> None:
    if not columns:
        raise ValueError(f"data[{data!r}] has no columns: select those that fn needs")
    from spark_hvd.data.bucketing import OURS  # imports numpy, which a run without data does not need

    if ours := [name for name in columns if name.lower() in OURS]:
        raise ValueError(f"data[{data!r}] has a column {ours[0]!r}, a name for internal use: rename it")
    if twice := sorted(name for name, count in Counter(columns).items() if count > 1):
        raise ValueError(f"data[{data!r}] has more than one column {twice[0]!r}: rename them, or select one")
    first: dict[str, str] = {}
    for name in columns:
        if not exact and first.setdefault(name.casefold(), name) != name:
            raise ValueError(
                f"data[{data!r}] has more than one column {name!r} for Spark, which does not distinguish it from "
                f"{first[name.casefold()]!r}: rename one of them, or set spark.sql.caseSensitive to true"
            )


def _is_mapped(value: Any) -> TypeGuard[Mapped]:
    mapping = sys.modules.get("spark_hvd.data.feeders.mapping")
    return mapping is not None and isinstance(value, mapping.Mapped)


def _row_map(name: str, value: Mapped) -> RowMap:
    from spark_hvd.data.feeders.mapping import RowMap

    try:
        code = dumps(value.fn)
    except Exception as error:
        raise UnpicklableError(
            f"cannot send the function of data[{name!r}]: {explain([('fn', value.fn)], error)}\n"
            "Create it inside the function instead, or pass what it is made from (a path, a configuration)."
        ) from error
    if len(code) > _MOST_CODE:
        raise ValueError(
            f"the function of data[{name!r}] has {len(code) >> 20} MiB with the objects it refers to: expected at most "
            f"{_MOST_CODE >> 20}. Let it load large objects (weights, a vocabulary) from a path that executors can "
            "reach, in its first call"
        )
    return RowMap(code, value.columns, value.rows_at_once, value.random)


def _is_windows(value: Any) -> TypeGuard[Windows]:
    series = sys.modules.get("spark_hvd.data.series.windows")
    return series is not None and isinstance(value, series.Windows)


def _is_frame(value: Any) -> bool:
    return type(value).__module__.startswith("pyspark.sql.") and type(value).__name__ == "DataFrame"


def _checked(name: str, windows: Windows) -> Windows:
    """Check the rows of Windows; a pandas DataFrame becomes an Arrow table."""
    if _is_frame(windows.rows):
        return windows  # series_of() checks the types later, still before any rank starts
    from spark_hvd.data.series.pieces import checked

    table = _table_of(name, windows.rows)
    if table is None:
        raise TypeError(
            f"data[{name!r}] is Windows over {type(windows.rows).__qualname__}: expected a Spark or pandas DataFrame, "
            "or a table that Arrow can import. For files give spark.read.parquet(path)"
        )
    checked(table.schema, windows.spec)
    return windows.over(table)


def _rows_of(value: pa.Table | Windows) -> pa.Table:
    if not _is_windows(value):
        return value
    from spark_hvd.data.series.pieces import pieces_of_table

    return pieces_of_table(value.rows, value.spec)


def _is_table(value: Any) -> bool:
    """Tell, without importing anything, whether a value is a table whose files ranks can read."""
    return any(isinstance(value, getattr(sys.modules.get(name), kind, ())) for name, kind in _TABLES.items())


def _are_paths(value: Any) -> bool:
    some = value if isinstance(value, list | tuple) else ()
    return len(some) > 0 and all(isinstance(each, str | os.PathLike) for each in some)


def _table_of(name: str, value: Any) -> pa.Table | None:
    """Return the rows of an object in memory, in types that Spark and the readers know; None for other objects."""
    pandas = sys.modules.get("pandas")
    is_pandas = pandas is not None and isinstance(value, pandas.DataFrame)
    hugging_face: Any = getattr(sys.modules.get("datasets"), "Dataset", ())  # the user may have a module of that name
    if isinstance(value, hugging_face):
        value = value.with_format("arrow")[:]
    files: Any = sys.modules.get("pyarrow.dataset")
    if files is not None and isinstance(value, files.Dataset):
        value = value.to_table()
    if isinstance(value, type) or not (is_pandas or hasattr(value, "__arrow_c_stream__")):
        return None
    import pyarrow as pa

    from spark_hvd.data.readers.errors import DataError
    from spark_hvd.data.schemas.table import plain_type

    try:
        table = pa.Table.from_pandas(value, preserve_index=False) if is_pandas else pa.table(value)
    except (TypeError, ValueError, OverflowError, pa.ArrowException) as error:
        raise TypeError(
            f"data[{name!r}] is of type {type(value).__qualname__}, which Arrow cannot convert to a table: {error}"
        ) from error
    # In pieces, because the text of a large table may exceed the capacity of a string array.
    table = pa.Table.from_batches(table.to_batches(max_chunksize=_PIECE_ROWS), table.schema)
    for at, each in enumerate(table.schema):
        kind = plain_type(each.type)
        if kind == each.type:
            continue
        try:
            table = table.set_column(at, each.with_type(kind), _decoded(table.column(at)).cast(kind))
        except pa.ArrowException as error:
            raise DataError(
                f"data[{name!r}]: column {each.name!r} of {each.type} cannot be converted to {kind}: {error}. Next: "
                "convert it in the table, or leave it out"
            ) from error
    return table.replace_schema_metadata(None)


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Decode a dictionary-encoded or run-end encoded column; return others unchanged.

    Arrow cannot decode dictionaries of view types, so these are cast first. It cannot cast run-end encoded columns.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from spark_hvd.data.schemas.table import plain_type

    if pa.types.is_run_end_encoded(column.type):
        return pa.chunked_array([pc.run_end_decode(chunk) for chunk in column.chunks], column.type.value_type)
    if not pa.types.is_dictionary(column.type):
        return column
    kind = plain_type(column.type.value_type)
    values = [
        pa.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(kind)).dictionary_decode()
        for chunk in column.chunks
    ]
    return pa.chunked_array(values, kind)


def _frame_of(session: SparkSession, name: str, table: pa.Table | Windows) -> DataFrame | Windows:
    from spark_hvd.runner.spark.tables import frame_of  # imports pyarrow, which a run without data does not need

    return table.over(frame_of(session, name, table.rows)) if _is_windows(table) else frame_of(session, name, table)
