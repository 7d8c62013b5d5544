"""Rows of a DataFrame on the local disk: the Spark task writes them once, as Arrow files, and its ranks read them.

A file holds the rows of one chunk, sorted by bucket and id, so that the rows of a bucket are adjacent.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from spark_hvd.data.bucketing import (
    BUCKET,
    BUCKETS,
    ID,
    STRIDE,
    Piece,
    Seed,
    buckets_of,
    mixing,
    order_in_buckets,
    windows_of,
)
from spark_hvd.data.packed import PackedRows, Rows, ordered, pack, taken, unpack
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import single
from spark_hvd.data.readers.sharding import Ints, stretches

CHUNK_ROWS, CHUNK_BYTES = 1 << 18, 64 << 20
"""Maximum rows and bytes of a chunk, which is sorted at once. They bound the memory of a writer."""

PLAIN_BYTES = 4 << 30
"""Files written after this many bytes are compressed. Each bucket is a record batch of its own, to be read alone."""

WINDOW_BYTES = 8 << 20
"""Bytes of the rows that are gathered at once. A reader takes four times that, as it copies rows twice and reads one
window ahead; fragmented memory can add to it."""

_SLICE = 1 << 16
"""Number of rows that are unpacked at once when all rows are read."""

_COUNTS, _SCHEMA, _FAILED = "counts.npy", "schema.arrow", "failed"


class SpoolWriter:
    """Writes the rows of one data set to a new folder."""

    def __init__(
        self, folder: str, schema: pa.Schema, *, plain_bytes: int = PLAIN_BYTES, chunk_rows: int = CHUNK_ROWS
    ) -> None:
        self._folder = Path(folder)
        self._schema = schema
        self._plain_bytes, self._chunk_rows = plain_bytes, chunk_rows
        self._batches: list[pa.RecordBatch] = []
        self._rows = self._bytes = self._written = 0
        self._counts: list[np.ndarray[Any, np.dtype[np.int32]]] = []
        os.makedirs(folder)

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows with the user's columns and the columns :data:`BUCKET` and :data:`ID`.

        Raises:
            DataError: The rows cannot be written to the disk.
        """
        self._batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.get_total_buffer_size()
        if self._rows >= self._chunk_rows or self._bytes >= CHUNK_BYTES:
            self._flush()

    def close(self) -> None:
        """Mark the rows as complete.

        Raises:
            DataError: As :meth:`write`.
        """
        if self._rows:
            self._flush()
        counts = np.array(self._counts, np.int32).reshape(-1, BUCKETS)
        with self._disk():
            with pa.OSFile(str(self._folder / _SCHEMA), "wb") as file:
                file.write(self._schema.serialize())
            with open(self._folder / f"{_COUNTS}.new", "wb") as file:
                np.save(file, counts)
            os.rename(self._folder / f"{_COUNTS}.new", self._folder / _COUNTS)

    def fail(self, error: BaseException) -> None:
        """Delete the rows, and leave the error for the ranks that wait for them, or no folder if the disk is full."""
        try:
            for path in self._folder.iterdir():
                path.unlink()
            (self._folder / f"{_FAILED}.new").write_text(f"{type(error).__name__}: {error}")
            os.rename(self._folder / f"{_FAILED}.new", self._folder / _FAILED)
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._batches).combine_chunks()
        self._batches, self._rows, self._bytes = [], 0, 0
        buckets = table.column(BUCKET).to_numpy().astype(np.int16)
        table = table.drop_columns([BUCKET])
        order = np.argsort(table.column(ID).to_numpy(), kind="stable")  # fast, as ids arrive in ascending runs
        order = order[np.argsort(buckets[order], kind="stable")]  # fast, as 16 bits are sorted by radix
        compressed = self._written >= self._plain_bytes
        batch = single(table)
        batch = batch.take(order) if compressed else ordered(pack(batch, ID), order)
        counts = np.bincount(buckets, minlength=BUCKETS).astype(np.int32)
        path = self._folder / _chunk(len(self._counts))
        options = pa.ipc.IpcWriteOptions(compression="lz4" if compressed else None, use_threads=False)
        with self._disk():
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema, options=options) as writer:
                start = 0
                for rows in counts[counts > 0].tolist() if compressed else [batch.num_rows]:
                    writer.write_batch(batch.slice(start, rows))
                    start += rows
            self._written += path.stat().st_size
        self._schema = table.drop_columns([ID]).schema.with_metadata(self._schema.metadata)
        self._counts.append(counts)

    def _disk(self) -> _Disk:
        return _Disk(self._folder, self._written)


def spool_table(folder: str, table: pa.Table) -> None:
    """Write the rows of a table to a new folder, numbered in their order.

    Raises:
        DataError: As :meth:`SpoolWriter.write`.
    """
    writer = SpoolWriter(folder, table.schema)
    first = 0
    for batch in table.to_batches(max_chunksize=1 << 16):
        ids = np.arange(first, first + batch.num_rows)
        first += batch.num_rows
        buckets = (ids * STRIDE % BUCKETS).astype(np.int32)
        schema = pa.schema([pa.field(BUCKET, pa.int32()), pa.field(ID, pa.int64()), *batch.schema])
        writer.write(pa.RecordBatch.from_arrays([pa.array(buckets), pa.array(ids), *batch.columns], schema=schema))
    writer.close()


@dataclass(frozen=True)
class _Disk:
    """Turns an OSError into a DataError that says what to do about a full disk."""

    folder: Path
    written: int

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            raise DataError(
                f"{self.folder}: the rows of the DataFrame cannot be kept here: {error}; {self.written} bytes were "
                "written. Executors keep the rows of their ranks on local disk during a run. Next: give them more disk "
                "(spark.local.dir), spread the run over more executors, or write the DataFrame to Parquet and pass "
                "its path"
            ) from error


class Spool:
    """Reads what a :class:`SpoolWriter` has written. ``received`` is the folder of rows from other ranks.

    Attributes:
        folder: The folder that the writer has filled.
        schema: The schema of the user's columns.
        counts: Number of rows of each bucket.
        window_rows: Number of rows that fit in :data:`WINDOW_BYTES`.
    """

    def __init__(self, folder: str, received: str | None = None) -> None:
        self._received = received
        self.folder = Path(folder)
        folders = [self.folder] if received is None else [self.folder, Path(received)]
        counts = [np.load(each / _COUNTS) for each in folders]
        self._own = len(counts[0])
        self._counts = np.concatenate(counts)
        self.counts: Ints = self._counts.sum(0, dtype=np.int64)
        self._ends = np.cumsum(self._counts, axis=1, dtype=np.int64)
        self.schema = pa.ipc.read_schema(pa.py_buffer((self.folder / _SCHEMA).read_bytes()))
        self._files = [
            each / _chunk(number) for each, chunks in zip(folders, counts, strict=True) for number in range(len(chunks))
        ]
        row_bytes = sum(file.stat().st_size for file in self._files) // max(1, int(self.counts.sum()))
        self.window_rows = max(1, WINDOW_BYTES // max(1, row_bytes))
        self._mapped = [_mapped(str(file)) for file in self._files]

    def __reduce__(self) -> tuple[Any, ...]:
        return Spool, (str(self.folder), self._received)  # another process maps the files itself

    @property
    def local_buckets(self) -> range:
        """The buckets from the first to the last that has rows here. All rows of these buckets are here."""
        buckets = np.flatnonzero(self.counts)
        return range(int(buckets[0]), int(buckets[-1]) + 1) if len(buckets) else range(0)

    def windows(
        self,
        pieces: Iterable[Piece],
        seed: Seed | None,
        window_rows: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[PackedRows]:
        """Yield the rows of `pieces`, one window at a time, with the rows of all buckets mixed.

        Without a seed, buckets come one after the other, each in the order of the DataFrame. ``pieces`` and ``columns``
        are in the requested order; None stands for all columns. ``window_rows`` defaults to :attr:`window_rows`.
        """
        names = self.schema.names if columns is None else columns
        schema = pa.schema([self.schema.field(name) for name in names])
        for number, window in enumerate(windows_of(pieces, window_rows or self.window_rows)):
            if any(done < rows for _, _, done, rows in window):
                yield self._gather(window, seed, number, schema)

    def tables(self, *args: Any) -> Iterator[pa.Table]:
        """Yield :meth:`windows` as Arrow tables."""
        return (pa.Table.from_batches([window.batch()]) for window in self.windows(*args))

    def rows(self, bucket: int, first: int, rows: int) -> pa.RecordBatch:
        """Return some rows of a bucket in the order of the DataFrame, as :meth:`SpoolWriter.write` takes them."""
        named = pa.schema([pa.field(ID, pa.int64()), *self.schema])
        gathered = self._gather([(bucket, first, 0, rows)], None, 0, named).batch()
        schema = pa.schema([pa.field(BUCKET, pa.int32()), *named])
        buckets = pa.array(np.full(rows, bucket, np.int32))
        return pa.RecordBatch.from_arrays([buckets, *gathered.columns], schema=schema)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the task's own rows, without those from other ranks, some at a time and in any order."""
        schema = pa.schema([self.schema.field(name) for name in columns])
        for number, mapped in enumerate(self._mapped[: self._own]):
            if mapped is not None:
                for start in range(0, mapped.num_rows, _SLICE):
                    yield unpack(mapped.slice(start, _SLICE), None, schema)
                continue
            with pa.memory_map(str(self._files[number])) as file, pa.ipc.open_file(file) as reader:
                for at in range(reader.num_record_batches):
                    yield reader.get_batch(at).select(columns)

    def disk(self) -> _Disk:
        """Return a context for writing more data to :attr:`folder`, which reports a full disk as such."""
        return _Disk(self.folder, 0)

    def _gather(self, pieces: Sequence[Piece], seed: Seed | None, number: int, schema: pa.Schema) -> PackedRows:
        buckets, firsts, _, rows = np.array(pieces, np.int64).T
        whole = self.counts[buckets]
        parts, places = [], []
        for chunk, counts in enumerate(self._counts):
            lengths = counts[buckets].astype(np.int64)
            if lengths.any():
                parts.append(self._part(chunk, buckets, lengths))
                places.append(np.repeat(np.arange(len(buckets), dtype=np.int16), lengths))
        columns = [batch.column(ID).to_numpy() for batch, _ in parts]
        ids = [column if at is None else column[at] for column, (_, at) in zip(columns, parts, strict=True)]
        order = order_in_buckets(np.concatenate(places), np.concatenate(ids), seed)
        if (rows < whole).any():  # another rank takes the others
            order = order[stretches(np.cumsum(whole) - whole + firsts, rows)]
        return taken(parts, order[mixing(pieces, seed, number)], schema)

    def _part(self, number: int, buckets: Ints, lengths: Ints) -> Rows:
        """Return a batch of a file, and the numbers of the rows of ``buckets`` in it; None for all rows, in order."""
        mapped = self._mapped[number]
        if mapped is not None:
            return mapped, stretches(self._ends[number, buckets] - lengths, lengths)
        places = np.cumsum(self._counts[number] > 0) - 1
        options = pa.ipc.IpcReadOptions(use_threads=False)  # threads for small batches would take four times as long
        path = str(self._files[number])
        with pa.memory_map(path) as file, pa.ipc.open_file(file, options=options) as reader:
            batches = [reader.get_batch(places[bucket]) for bucket in buckets[lengths > 0]]
        return single(pa.Table.from_batches(batches)), None


@dataclass(frozen=True)
class SpoolSource:
    """Tells a rank where its Spark task keeps a DataFrame's rows.

    The task writes the rows of all its ranks to ``folder``. ``part`` is this rank's part of the ``parts`` of all ranks.
    """

    folder: str
    part: int
    parts: int

    @property
    def buckets(self) -> range:
        """The buckets whose rows Spark has brought here for this rank."""
        return buckets_of(self.part, self.parts)

    def open(self) -> Spool:
        """Return the rows once the task has all of them.

        Raises:
            DataError: The rows do not arrive.
        """
        folder = Path(self.folder)
        while not (folder / _COUNTS).exists():
            if (folder / _FAILED).exists():
                raise DataError((folder / _FAILED).read_text())
            if not folder.exists():
                raise DataError(
                    f"{folder}: the rows that the Spark task kept here were deleted: the task has ended, or its disk "
                    "takes no file. Next: see the executor's log, and whether its local disk is full"
                )
            time.sleep(0.01)
        return Spool(self.folder)


def _chunk(number: int) -> str:
    return f"{number:06}.arrow"


def _mapped(path: str) -> pa.RecordBatch | None:
    """Return the only batch of a file, mapped into memory; None if the file has a batch for each bucket."""
    with pa.memory_map(path) as file, pa.ipc.open_file(file) as reader:
        return reader.get_batch(0) if reader.num_record_batches == 1 else None
