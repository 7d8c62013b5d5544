"""Writing a Parquet file whose row groups can be shared out, though nobody knows yet how many rows it will have.

Each row group holds a fixed share of what its file holds already, so a file of any size has enough of them, and a large
one not too many.
"""

from __future__ import annotations

from contextlib import ExitStack

import pyarrow as pa
import pyarrow.parquet as pq

from spark_hvd.store import Store

_GROUP_BYTES = 16 << 20
_GROUP_ROWS = 1000  # at least; below that the overhead of a row group outweighs its data


class RowGroupWriter:
    """One Parquet file, made when its first row comes, written row group by row group.

    It has ``groups`` row groups at least, where there are rows enough, and its name once ``stack`` is closed.
    """

    def __init__(self, store: Store, path: str, groups: int, stack: ExitStack) -> None:
        self._store, self._path, self._stack = store, path, stack
        self._least = groups
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._waiting_rows = self._waiting_bytes = self._written = 0
        self._groups: list[int] = []

    def add(self, table: pa.Table) -> None:
        """Write rows, now or later; all tables have one schema.

        Raises:
            StoreError: They cannot be written.
        """
        if table.num_rows:
            self._waiting.append(table)
            self._waiting_rows += table.num_rows
            self._waiting_bytes += table.nbytes
            while self._waiting_rows >= 2 * (rows := self._next_rows()):  # what is left makes a full one at the end
                self._write(rows)

    def finish(self) -> list[int]:
        """Write what is left; return the rows of each row group. No file is made of no rows."""
        while self._waiting_rows:
            rows = self._next_rows()
            self._write(self._waiting_rows if self._waiting_rows < 1.5 * rows else rows)
        if self._writer is not None:
            self._writer.close()
        return self._groups

    def _next_rows(self) -> int:
        share = max(_GROUP_ROWS, self._written // self._least)
        return max(1, min(share, _GROUP_BYTES * self._waiting_rows // max(1, self._waiting_bytes)))

    def _write(self, rows: int) -> None:
        table = pa.concat_tables(self._waiting)
        if self._writer is None:
            sink = self._stack.enter_context(self._store.writing(self._path))
            # no dictionaries: features hardly repeat, and plain pages decode faster
            self._writer = pq.ParquetWriter(
                sink, table.schema, compression="snappy", use_dictionary=False, write_statistics=False
            )
        self._writer.write_table(table.slice(0, rows), row_group_size=rows)
        rest = table.slice(rows)
        self._waiting = [rest] if rest.num_rows else []
        self._waiting_rows, self._waiting_bytes = rest.num_rows, rest.nbytes
        self._written += rows
        self._groups.append(rows)
