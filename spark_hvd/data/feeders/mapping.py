"""``Mapped``: rows to which a function is applied on their way to a rank; and how the function is applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from spark_hvd.data.readers.dataset import listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import single

if TYPE_CHECKING:
    from spark_hvd.data.feeders.sockets import FeedAddress

ROWS_AT_ONCE = 32
"""Default number of rows per call: for images, the results are a few megabytes."""


class Mapped:
    """Rows to which a function is applied on their way to the ranks; a value for ``data=``.

    With ``spark_hvd.run(..., feeders=6)``, the function runs in six additional Spark tasks, a few hundred rows ahead of
    the ranks. Without feeders, as in ``run_local``, it runs in threads of the rank. The function does not change which
    rows a rank gets, nor their order.

    Args:
        rows: Any other value for ``data=``.
        fn: Function of a ``pyarrow.RecordBatch`` of some rows. Returns as many rows, in their order: a dict of numpy
            arrays or tensors (rows, ...) or lists by the names of columns, a record batch or table of Arrow, or a
            pandas DataFrame. It should return the same for the same rows, because after a loss it is called again for
            some of them.
        columns: Names of the columns that ``fn`` gets; None for all.
        rows_at_once: Maximum number of rows per call. There are fewer at the end of a rank's epoch.
        random: Call ``fn(batch, generator)`` with a ``numpy.random.Generator`` for its random numbers. The generator
            depends on the loader's seed, the epoch, the rank and the number of previous rows.

    Raises:
        DataError: An argument has the wrong type or value.
    """

    __module__ = "spark_hvd.data"

    def __init__(
        self,
        rows: Any,
        fn: Callable[..., Any],
        *,
        columns: Sequence[str] | None = None,
        rows_at_once: int = ROWS_AT_ONCE,
        random: bool = False,
    ) -> None:
        if isinstance(rows, Mapped):
            raise DataError("Mapped over Mapped: expected one function. Next: pass one that calls both")
        if not callable(fn):
            raise DataError(f"fn={fn!r}: expected a function of a pyarrow.RecordBatch")
        if isinstance(columns, str):
            raise DataError(f"columns={columns!r}: expected a list of names, [{columns!r}]")
        names = None if columns is None else tuple(columns)
        if names == ():
            raise DataError("columns=[]: expected at least one name, or None for all columns")
        if not isinstance(rows_at_once, int) or isinstance(rows_at_once, bool) or rows_at_once < 1:
            raise DataError(f"rows_at_once={rows_at_once!r}: expected a whole number of rows, at least 1")
        self.rows, self.fn, self.columns = rows, fn, names
        self.rows_at_once, self.random = rows_at_once, random


@dataclass(frozen=True)
class RowMap:
    """A :class:`Mapped` in the form that ranks and feeders get. ``code`` is the pickled function."""

    code: bytes = field(repr=False)
    columns: tuple[str, ...] | None
    rows_at_once: int
    random: bool


@dataclass(frozen=True)
class MappedSpec:
    """A data set with a function for its rows, in the form that a rank gets.

    Attributes:
        inner: The pickled data set of the rows.
        row_map: The function.
        feed: The feeders that run the function; None if the rank runs it.
    """

    inner: bytes
    row_map: RowMap
    feed: FeedAddress | None


def apply(
    fn: Callable[..., Any], rows: pa.RecordBatch, draws: Sequence[int] | None, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Apply a function to rows.

    Args:
        fn: The function of a :class:`Mapped`.
        rows: The argument of the function.
        draws: The seed of its random generator; None if it takes none.
        columns: The columns of the result to return; None for all.

    Raises:
        DataError: The function returned another number of rows, or something that cannot become a table.
        Exception: Whatever the function raises.
    """
    table = _table_of(fn(rows) if draws is None else fn(rows, np.random.default_rng(draws)))
    if table.num_rows != rows.num_rows:
        raise DataError(
            f"the function of Mapped returned {table.num_rows} rows for {rows.num_rows}: expected as many, because "
            "ranks share the rows before. Next: filter the DataFrame, or mark rows in a column for the function of run"
        )
    if columns is not None:
        if missing := [name for name in columns if name not in table.column_names]:
            raise DataError(
                f"the function of Mapped returned no column {listed(missing)} but {listed(table.column_names)}: "
                "expected the same columns as for the first row"
            )
        table = table.select(list(columns))
    return single(table.replace_schema_metadata(None))


def _table_of(result: Any) -> pa.Table:
    if isinstance(result, pa.RecordBatch):
        return pa.Table.from_batches([result])
    if isinstance(result, pa.Table):
        return result
    if isinstance(result, Mapping) and result:
        return pa.table({name: _column(name, values) for name, values in result.items()})
    if type(result).__module__.startswith("pandas.") and hasattr(result, "columns"):
        return pa.Table.from_pandas(result, preserve_index=False)
    raise DataError(
        f"the function of Mapped returned a {type(result).__qualname__}: expected a dict of columns, a pyarrow "
        "RecordBatch or Table, or a pandas DataFrame"
    )


def _column(name: Any, values: Any) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, pa.Array | pa.ChunkedArray) and isinstance(name, str):
        return values
    try:
        if not isinstance(name, str):
            raise TypeError("names are of type str")
        return _array(values) if hasattr(values, "__array__") else pa.array(values)
    except (TypeError, ValueError, RuntimeError, OverflowError, pa.ArrowException) as error:
        raise DataError(
            f"the function of Mapped returned a {type(values).__qualname__} as {name!r}, which Arrow cannot convert to "
            f"a column: {error}. Expected a numpy array or a tensor (rows, ...) on the CPU without gradients, or a list"
        ) from error


def _array(values: Any) -> pa.Array:
    array = np.asarray(values)
    mask = np.ma.getmaskarray(values).reshape(-1) if isinstance(values, np.ma.MaskedArray) else None
    column = pa.array(np.ascontiguousarray(array).reshape(-1), mask=mask)
    for length in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, length)
    return column


def to_bytes(rows: pa.RecordBatch) -> pa.Buffer:
    """Return rows in Arrow's stream format."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return sink.getvalue()


def from_bytes(data: Any) -> pa.RecordBatch:
    """Undo :func:`to_bytes` without a copy: the rows use the memory of ``data``."""
    with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
        return stream.read_next_batch()
