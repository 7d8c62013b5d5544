"""The form in which rows are kept in memory, between the file and the batch.

Rows are tensors if a model takes them unchanged (``TensorForm``), and Arrow tables if they may hold any type
(:class:`TableForm`). Readers depend on this contract only.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.windows import Round

RowsT = TypeVar("RowsT")
BatchT = TypeVar("BatchT")
BatchT_co = TypeVar("BatchT_co", covariant=True)


class Window(Protocol[RowsT]):
    """Collects the rows of pieces from several threads, and returns them in their drawn order."""

    def put(self, number: int, rows: RowsT) -> None:
        """Add the rows of piece ``number``."""

    def take(self) -> RowsT:
        """Return the wanted rows in their order, and empty the window. Call this after all pieces were put in."""


class Form(Protocol[RowsT, BatchT_co]):
    """See the module's description."""

    def of(self, table: pa.Table, where: str) -> RowsT:
        """Return the rows of a table, which ``where`` names in errors. Any thread may call this.

        Raises:
            DataError: Values do not fit, or differ in kind from those before.
        """

    def part(self, rows: RowsT, start: int, stop: int) -> RowsT:
        """Return rows ``start`` to ``stop`` (exclusive) of ``rows``, without a copy."""

    def row_bytes(self, table: pa.Table | None, where: str) -> int | None:
        """Return the bytes of a row; None if only a ``table`` of some rows can show them."""

    def window(self, round_: Round) -> Window[RowsT]:
        """Return memory for the rows that a rank takes in a round."""

    def cut(self, parts: Iterator[RowsT], sizes: Sequence[int]) -> Iterator[BatchT_co]:
        """Cut parts of any length into batches of ``sizes`` rows."""

    def kept(self, rows: RowsT) -> RowsT:
        """Return rows that do not change when batches that were cut out of ``rows`` are changed."""


class TablesForm(Form[pa.Table, BatchT]):
    """Keeps rows of any types in Arrow, with the schema of the first row group. A subclass cuts batches."""

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None
        self._lock = threading.Lock()

    def of(self, table: pa.Table, where: str) -> pa.Table:
        table = table.replace_schema_metadata(None)
        with self._lock:
            self._schema = self._schema or table.schema
        if table.schema.equals(self._schema):
            return table
        try:
            return table.cast(self._schema)
        except (pa.ArrowException, ValueError) as error:
            raise DataError(f"{where} has other columns than the first row group: {error}") from error

    def part(self, rows: pa.Table, start: int, stop: int) -> pa.Table:
        return rows.slice(start, stop - start)

    def row_bytes(self, table: pa.Table | None, where: str) -> int | None:
        return None if table is None else -(-table.nbytes // max(1, table.num_rows))

    def window(self, round_: Round) -> TableWindow:
        return TableWindow(round_)

    def kept(self, rows: pa.Table) -> pa.Table:
        return rows  # Arrow's arrays never change


class TableForm(TablesForm[pa.RecordBatch]):
    """Cuts record batches."""

    def cut(self, parts: Iterator[pa.Table], sizes: Sequence[int]) -> Iterator[pa.RecordBatch]:
        for pieces in pieces_of(parts, sizes):
            tables = [table.slice(start, stop - start) for table, start, stop in pieces]
            yield single(tables[0] if len(tables) == 1 else pa.concat_tables(tables))


class TableWindow(Window[pa.Table]):
    """The window of a :class:`TableForm`. It keeps complete pieces, and selects rows from them at the end."""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._pieces: list[pa.Table] = [None] * len(round_.pieces)

    def put(self, number: int, rows: pa.Table) -> None:
        self._pieces[number] = rows

    def take(self) -> pa.Table:
        pieces, self._pieces = self._pieces, []
        places = self._round.places()
        order = np.empty(self._round.rows, np.int64)
        kept: Any = slice(None) if len(order) == len(places) else places >= 0
        order[places[kept]] = np.flatnonzero(kept) if len(order) < len(places) else np.arange(len(places))
        # Taking rows from one chunk is faster: with several, Arrow looks up the chunk of each row.
        return pa.concat_tables(pieces).combine_chunks().take(order)


def pieces_of(parts: Iterator[RowsT], sizes: Sequence[int]) -> Iterator[list[tuple[RowsT, int, int]]]:
    """Yield, for each batch of ``sizes`` rows, its pieces: (part, first row, row after the last)."""
    part: Any = ()
    at = 0
    for size in sizes:
        pieces: list[tuple[RowsT, int, int]] = []
        while size:
            while at == len(part):
                part = None  # free its memory before the next part is read
                part, at = next(parts), 0
            stop = min(len(part), at + size)
            pieces.append((part, at, stop))
            size, at = size - (stop - at), stop
        yield pieces
        del pieces


def matrix_of(batch: pa.RecordBatch) -> np.ndarray[Any, Any] | None:
    """Return columns of one type as a matrix (rows, columns); None for several types, nulls, or other than numbers."""
    if len(set(batch.schema.types)) == 1:
        with contextlib.suppress(pa.ArrowException):
            matrix: np.ndarray[Any, Any] = batch.to_tensor().to_numpy()
            return matrix
    return None


def single(table: pa.Table) -> pa.RecordBatch:
    """Return a table as one batch, without a copy if each column has a single chunk.

    Raises:
        DataError: A column has more text or bytes than a batch can hold.
    """
    batches = table.to_batches()
    if len(batches) != 1:
        table = table.combine_chunks()  # leaves several chunks if one could not hold all
        batches = table.to_batches()
    if len(batches) > 1:
        name = next(name for name in table.column_names if table.column(name).num_chunks > 1)
        raise DataError(
            f"column {name!r} has {table.column(name).nbytes >> 20:,} MiB in a batch of {table.num_rows:,} rows: "
            "expected at most 2 GiB of text or bytes. Next: use a smaller batch size"
        )
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
