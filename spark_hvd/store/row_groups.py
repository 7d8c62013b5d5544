"""Writes a Parquet file with enough row groups to share among ranks, without knowing its number of rows in advance.

Each row group holds a fixed share of the rows before it. So a file of any size has enough row groups, and a large file
does not have too many.
"""

from __future__ import annotations

from contextlib import ExitStack

import pyarrow as pa
import pyarrow.parquet as pq

from spark_hvd.store import Store

_GROUP_BYTES = 16 << 20
_GROUP_ROWS = 1000  # at least: in smaller row groups, the overhead outweighs the data


class RowGroupWriter:
    """Writes a Parquet file row group by row group. The file is created for the first row.

    It has at least ``groups`` row groups, if there are enough rows. It gets its name when ``stack`` is closed.
    """

    def __init__(self, store: Store, path: str, groups: int, stack: ExitStack) -> None:
        self._store, self._path, self._stack = store, path, stack
        self._min_groups = groups
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._waiting_rows = self._waiting_bytes = self._written = 0
        self._groups: list[int] = []

    def add(self, table: pa.Table) -> None:
        """Write rows, now or later. All tables must have the same schema.

        Raises:
            StoreError: The rows cannot be written.
        """
        if table.num_rows:
            self._waiting.append(table)
            self._waiting_rows += table.num_rows
            self._waiting_bytes += table.nbytes
            while self._waiting_rows >= 2 * (rows := self._next_rows()):  # the rest fills a row group at the end
                self._write(rows)

    def finish(self) -> list[int]:
        """Write the rest, and return the number of rows in each row group. Without rows, there is no file."""
        while self._waiting_rows:
            rows = self._next_rows()
            self._write(self._waiting_rows if self._waiting_rows < 1.5 * rows else rows)
        if self._writer is not None:
            self._writer.close()
        return self._groups

    def _next_rows(self) -> int:
        share = max(_GROUP_ROWS, self._written // self._min_groups)
        return max(1, min(share, _GROUP_BYTES * self._waiting_rows // max(1, self._waiting_bytes)))

    def _write(self, rows: int) -> None:
        table = pa.concat_tables(self._waiting)
        if self._writer is None:
            sink = self._stack.enter_context(self._store.writing(self._path))
            # No dictionaries, because features rarely repeat, and plain pages decode faster.
            self._writer = pq.ParquetWriter(
                sink, table.schema, compression="snappy", use_dictionary=False, write_statistics=False
            )
        self._writer.write_table(table.slice(0, rows), row_group_size=rows)
        rest = table.slice(rows)
        self._waiting = [rest] if rest.num_rows else []
        self._waiting_rows, self._waiting_bytes = rest.num_rows, rest.nbytes
        self._written += rows
        self._groups.append(rows)
