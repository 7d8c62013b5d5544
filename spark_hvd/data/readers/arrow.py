"""The reader of plain Parquet: threads read row groups ahead of the consumer, who gets slices of what they read."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import pyarrow as pa

from spark_hvd.data.readers.files import Parts, RowGroups, where
from spark_hvd.data.readers.forms import BatchT, Form, RowsT, Window
from spark_hvd.data.readers.reader import Reader, ReaderSpec
from spark_hvd.data.readers.sharding import Interval, overlaps
from spark_hvd.data.readers.values import columns_read
from spark_hvd.data.readers.windows import WINDOW_BYTES, Piece, even_rows, row_groups_of, runs_of, wanted_of, windows_of

CHUNK = 16384
"""Rows that are decoded at once of a row group that is too large for a window."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ArrowReader(Reader[BatchT], Generic[RowsT, BatchT]):
    """Reads parts of the line of rows that a data set makes in an epoch.

    Shuffled, two windows are in memory, one that is read and one that is consumed; in the order of the files,
    ``workers`` + 2 row groups. A row group is read whole unless it is larger than a window, then in parts.
    ``transformation_fn`` and ``decoders`` get as many rows as are read at once, and are called by several threads.

    With ``cache`` the rank keeps what it has read, the windows at the ends of its share whole. So it does where one
    window holds the whole data set: each rank needs all of it then, and reads it once.

    Raises:
        DataError: a column is not in the data set.
    """

    def __init__(self, spec: ReaderSpec, form: Form[RowsT, BatchT]) -> None:
        self._spec, self._form = spec, form
        self._files = RowGroups(spec.store, spec.dataset, tuple(column.name for column in columns_read(spec)))
        self._keeps = spec.cache
        self._kept: dict[Piece, RowsT] = {}
        self._row_bytes = form.row_bytes(None, "")
        self._pools: weakref.WeakSet[ThreadPoolExecutor] = weakref.WeakSet()
        self._closed = False

    def batches(self, epoch: int, share: Sequence[Interval], sizes: Sequence[int]) -> Generator[BatchT, None, None]:
        """See base class."""
        spec = self._spec
        if self._closed:
            raise RuntimeError("the reader is closed: open another")
        if not sizes:
            return
        drawn = 0 if spec.cache else epoch
        groups = row_groups_of(
            [group.rows for group in spec.dataset.row_groups], shuffle=spec.shuffle, seed=spec.seed, epoch=drawn
        )
        pieces = [
            Piece(groups[at].group, start, stop) for at, start, stop in overlaps([each.rows for each in groups], share)
        ]
        rows = spec.window_rows or self._window_rows(pieces[0])
        pool = ThreadPoolExecutor(max(1, spec.workers), "spark_hvd-reader")
        self._pools.add(pool)
        try:
            if spec.shuffle:
                windows = list(windows_of(groups, rows))
                self._keeps = spec.cache or len(windows) == 1
                parts = self._shuffled(pool, windows, share, rows, epoch)
            else:
                parts = self._plain(pool, [*itertools.chain.from_iterable(windows_of(pieces, rows))], rows)
            yield from self._form.cut(parts, sizes)
        except (CancelledError, RuntimeError) as error:  # a pool that is shut down raises either
            if not self._closed:
                raise
            raise RuntimeError("the reader was closed while its batches were read") from error
        finally:
            pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """See base class."""
        self._closed = True
        for pool in list(self._pools):
            pool.shutdown(cancel_futures=True)
        self._files.close()
        self._kept.clear()

    def _plain(self, pool: ThreadPoolExecutor, pieces: Sequence[Piece], rows: int) -> Iterator[RowsT]:
        load = self._loader(pieces, rows)

        def start(piece: Piece) -> Callable[[], RowsT]:
            return pool.submit(load, piece).result

        for rows_read in ahead(start, pieces, self._spec.workers):
            # What is kept must not change with what the consumer does to its batches.
            yield self._form.kept(rows_read) if self._spec.cache else rows_read
            del rows_read

    def _shuffled(
        self,
        pool: ThreadPoolExecutor,
        windows: Sequence[list[Piece]],
        share: Sequence[Interval],
        rows: int,
        epoch: int,
    ) -> Iterator[RowsT]:
        wanted = list(wanted_of(windows, share))
        load = self._loader([piece for at, _ in wanted for piece in windows[at]], rows)

        def start(one: tuple[int, list[Interval]]) -> Callable[[], RowsT]:
            at, places = one
            window = self._form.window(windows[at], (self._spec.seed, epoch, at), places)
            filling = [pool.submit(_fill, window, i, piece, load) for i, piece in enumerate(windows[at])]
            return lambda: _filled(window, filling)

        return ahead(start, wanted, 1)

    def _loader(self, pieces: Sequence[Piece], rows: int) -> Callable[[Piece], RowsT]:
        """What loads these pieces, in this order, from memory or files; ``rows`` are those of a window."""
        groups, files, chunk = self._spec.dataset.row_groups, self._files, min(rows, CHUNK)
        parts: dict[Piece, Parts] = {}
        for run in runs_of(pieces):
            group = groups[run[0].group]
            if group.rows > rows:  # too large to be read whole
                parts |= dict.fromkeys(run, Parts(files, group, run[0].start, run[-1].stop, chunk))

        def load(piece: Piece) -> RowsT:
            kept = self._kept.get(piece)
            if piece in parts:
                table = parts[piece].read(piece.start, piece.stop, wanted=kept is None)
            elif kept is None:
                table = files.read(groups[piece.group], piece.start, piece.stop)
            return self._converted(table, piece) if kept is None else kept

        return load

    def _converted(self, table: pa.Table, piece: Piece) -> RowsT:
        rows = self._form.of(table, where(self._spec.dataset.row_groups[piece.group]))
        if self._keeps:
            self._kept[piece] = rows
        return rows

    def _window_rows(self, piece: Piece) -> int:
        """Rows that fit in a window's memory."""
        if self._row_bytes is None:  # the first rows of the share are read twice for it, once in the reader's life
            group = self._spec.dataset.row_groups[piece.group]
            first = pa.Table.from_batches([next(self._files.stream(group, 1))])
            self._row_bytes = self._form.row_bytes(first, where(group))
        most = max(1, WINDOW_BYTES // max(1, self._row_bytes or 1))
        return even_rows(self._spec.dataset.rows, most)


def _fill(window: Window[RowsT], number: int, piece: Piece, load: Callable[[Piece], RowsT]) -> None:
    window.put(number, load(piece))


def _filled(window: Window[RowsT], filling: list[Future[None]]) -> RowsT:
    for each in filling:
        each.result()
    return window.take()


def ahead(start: Callable[[_Item], Callable[[], _Result]], plan: Iterable[_Item], number: int) -> Iterator[_Result]:
    """The results of ``plan`` in order; while one is used, the next ``number`` are under way."""
    plan = iter(plan)
    waiting = deque(start(item) for item in itertools.islice(plan, number))
    while True:
        waiting.extend(start(item) for item in itertools.islice(plan, 1))
        if not waiting:
            return
        yield waiting.popleft()()
