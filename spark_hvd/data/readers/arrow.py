"""The reader of plain Parquet. Threads read row groups ahead of the consumer, which gets slices of them as batches."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import pyarrow as pa

from spark_hvd.data.readers.dataset import listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.files import Parts, RowGroups, where
from spark_hvd.data.readers.forms import BatchT, Form, RowsT, TableForm, TablesForm, Window
from spark_hvd.data.readers.reader import Batch, Reader, ReaderSpec
from spark_hvd.data.readers.sharding import Share, Turns, overlaps
from spark_hvd.data.readers.values import columns_read
from spark_hvd.data.readers.windows import WINDOW_BYTES, EpochLine, Piece, Round, runs_of, windows_of

CHUNK = 16384
"""Number of rows that are decoded at once if a row group is too large for a window."""

_Source = Callable[[Piece, bool], RowsT | None]
"""Returns the rows of a piece, or None if they are not wanted. It must be called once for each of its pieces."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ArrowReader(Reader[BatchT], Generic[RowsT, BatchT]):
    """Reads a rank's share of the rows of an epoch.

    If rows are shuffled or taken from lanes, two windows of each lane are in memory: one that is being read, and one
    that is being consumed. If rows come in the order of the files, ``workers`` + 2 row groups are in memory. A row
    group with more rows than a window may have is read in parts. Any other is read and converted once, and kept while
    it continues in the next window. Several threads call ``transformation_fn`` and ``decoders`` with the rows that they
    read at once.

    With ``cache``, the rank keeps everything that it has read, including windows of which it only needs a part. It does
    the same if one window of each lane holds the whole data set.

    Raises:
        DataError: A column is not in the data set.
    """

    def __init__(self, spec: ReaderSpec, form: Form[RowsT, BatchT]) -> None:
        self._spec, self._form = spec, form
        self._files = RowGroups(spec.store, spec.dataset, tuple(column.name for column in columns_read(spec)))
        self._keeps = spec.cache
        self._kept: dict[Piece, RowsT] = {}
        self._row_bytes = form.row_bytes(None, "")
        self._pools: weakref.WeakSet[ThreadPoolExecutor] = weakref.WeakSet()
        self._closed = False

    def batches(self, epoch: int, share: Share, sizes: Sequence[int]) -> Generator[BatchT, None, None]:
        spec = self._spec
        if self._closed:
            raise RuntimeError("the reader is closed: open a new one")
        if not sizes:
            return
        groups = [group.rows for group in spec.dataset.row_groups]
        pool = ThreadPoolExecutor(max(1, spec.workers), "spark_hvd-reader")
        self._pools.add(pool)
        try:
            if spec.shuffle or isinstance(share, Turns):
                line = EpochLine(
                    groups,
                    spec.dataset.lanes(spec.shuffle),
                    spec.window_rows or self._window_rows(0),
                    shuffle=spec.shuffle,
                    seed=spec.seed,
                    epoch=epoch,
                    drawn=0 if spec.cache else epoch,
                    chunk=CHUNK,
                )
                self._keeps = spec.cache or line.one_round
                parts = self._gathered(pool, line, share)
            else:
                pieces = [Piece(group, start, stop) for group, start, stop in overlaps(groups, share)]
                rows = spec.window_rows or self._window_rows(pieces[0].group)
                parts = self._plain(pool, [*itertools.chain.from_iterable(windows_of(pieces, rows))], rows)
            yield from self._form.cut(parts, sizes)
        except (CancelledError, RuntimeError) as error:  # a pool that was shut down raises one of these
            if not self._closed:
                raise
            raise RuntimeError("the reader was closed while its batches were read") from error
        finally:
            pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        self._closed = True
        for pool in list(self._pools):
            pool.shutdown(cancel_futures=True)
        self._files.close()
        self._kept.clear()

    def _plain(self, pool: ThreadPoolExecutor, pieces: Sequence[Piece], rows: int) -> Iterator[RowsT]:
        sources = self._sources(runs_of((0, piece) for piece in pieces), rows)

        def start(piece: Piece) -> Callable[[], RowsT]:
            return pool.submit(lambda: self._load([piece], sources.get((0, piece)))[0]).result

        for rows_read in ahead(start, pieces, self._spec.workers):
            # Copy what is kept, because the consumer may change its batches in place.
            yield self._form.kept(rows_read) if self._spec.cache else rows_read
            del rows_read

    def _gathered(self, pool: ThreadPoolExecutor, line: EpochLine, share: Share) -> Iterator[RowsT]:
        """Yield the rows of one round at a time, in the order of the share."""
        sources = self._sources(line.runs(share), line.most)

        def start(numbered: tuple[int, Round]) -> Callable[[], RowsT]:
            number, one = numbered
            window, reads = self._form.window(one), dict[Any, list[int]]()
            for at, piece in enumerate(one.pieces):  # read a row group once, even if two lanes need it
                reads.setdefault(at if (number, piece) in sources else (piece.group,), []).append(at)
            filling = [pool.submit(fill, window, number, one, each) for each in reads.values()]
            return lambda: _filled(window, filling)

        def fill(window: Window[RowsT], number: int, one: Round, at: Sequence[int]) -> None:
            pieces = [one.pieces[each] for each in at]
            for each, rows in zip(at, self._load(pieces, sources.get((number, pieces[0]))), strict=True):
                window.put(each, rows)

        return ahead(start, enumerate(line.rounds(share)), 1)

    def _sources(self, runs: Iterable[list[tuple[int, Piece]]], rows: int) -> dict[tuple[int, Piece], _Source[RowsT]]:
        """Return, by round and piece, the sources of row groups that have more than ``rows`` rows or are cut."""
        sources = dict[tuple[int, Piece], _Source[RowsT]]()
        for run in runs:
            pieces = [piece for _, piece in run]
            if self._spec.dataset.row_groups[pieces[0].group].rows > rows:
                sources |= dict.fromkeys(run, self._streamed(pieces, min(rows, CHUNK)))
            elif len(run) > 1:
                sources |= dict.fromkeys(run, self._whole(pieces))
        return sources

    def _streamed(self, pieces: Sequence[Piece], chunk: int) -> _Source[RowsT]:
        """Return the source of the ``pieces`` of a row group of which ``chunk`` rows are decoded at once."""
        group = self._spec.dataset.row_groups[pieces[0].group]
        parts = Parts(self._files, group, pieces[0].start, pieces[-1].stop, chunk)

        def get(piece: Piece, wanted: bool) -> RowsT | None:
            table = parts.read(piece.start, piece.stop, wanted)
            return None if table is None else self._form.of(table, where(group))

        return get

    def _whole(self, pieces: Sequence[Piece]) -> _Source[RowsT]:
        """Return the source of the ``pieces`` of a row group that is read and converted once, for all of them."""
        group, left, lock = self._spec.dataset.row_groups[pieces[0].group], len(pieces), threading.Lock()
        first, last = min(piece.start for piece in pieces), max(piece.stop for piece in pieces)
        whole: RowsT | None = None

        def get(piece: Piece, wanted: bool) -> RowsT | None:
            nonlocal left, whole
            with lock:
                if whole is None and wanted:
                    whole = self._form.of(self._files.read(group, first, last), where(group))
                rows, left = whole, left - 1
                if not left:
                    whole = None
            if rows is None or not wanted:
                return None
            return self._form.part(rows, piece.start - first, piece.stop - first)

        return get

    def _load(self, pieces: Sequence[Piece], source: _Source[RowsT] | None) -> list[RowsT]:
        """Return the rows of pieces of one row group, from memory or from their source, by default :meth:`_whole`."""
        source, loaded = source or self._whole(pieces), list[Any]()
        for piece in pieces:
            kept = self._kept.get(piece)
            rows = source(piece, kept is None)
            if rows is not None and self._keeps:
                self._kept[piece] = rows
            loaded.append(rows if kept is None else kept)
        return loaded

    def _window_rows(self, number: int) -> int:
        """Return how many rows fit in a window's memory. If their size is unknown, row group ``number`` shows it."""
        if self._row_bytes is None:  # read the first rows of the row group for this, once per reader
            group = self._spec.dataset.row_groups[number]
            first = pa.Table.from_batches([next(self._files.stream(group, 1))])
            self._row_bytes = self._form.row_bytes(first, where(group))
        return max(1, WINDOW_BYTES // max(1, self._row_bytes or 1))


def _filled(window: Window[RowsT], filling: list[Future[None]]) -> RowsT:
    for each in filling:
        each.result()
    return window.take()


def ahead(start: Callable[[_Item], Callable[[], _Result]], plan: Iterable[_Item], number: int) -> Iterator[_Result]:
    """Yield the results of ``plan`` in order. While one is in use, the next ``number`` are being computed."""
    plan = iter(plan)
    waiting = deque(start(item) for item in itertools.islice(plan, number))
    while True:
        waiting.extend(start(item) for item in itertools.islice(plan, 1))
        if not waiting:
            return
        yield waiting.popleft()()


class CollatedForm(TablesForm[Batch]):
    """Keeps rows in Arrow until ``collate`` makes a batch of tensors, in threads ahead of the consumer.

    The number of batches that are made ahead is ``workers``.
    """

    def __init__(self, collate: Callable[[pa.RecordBatch], Batch], workers: int) -> None:
        super().__init__()
        self._collate, self._workers = collate, workers

    def cut(self, parts: Iterator[pa.Table], sizes: Sequence[int]) -> Iterator[Batch]:
        pool = ThreadPoolExecutor(self._workers, "spark_hvd-collate")
        try:
            batches = TableForm().cut(parts, sizes)
            yield from ahead(lambda batch: pool.submit(self._collated, batch).result, batches, self._workers)
        finally:
            pool.shutdown(cancel_futures=True)

    def _collated(self, rows: pa.RecordBatch) -> Batch:
        try:
            return self._collate(rows)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"cannot make tensors from {len(rows)} rows of {listed(rows.schema.names)}: "
                f"{type(error).__name__}: {error}"
            ) from error
