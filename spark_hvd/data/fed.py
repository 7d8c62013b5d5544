"""Rows that go through a function before they are in batches: in feeders, or in threads of the rank.

The rank reads rows as ever, so that sharing, order and positions stay as they are, and has them come back changed. A
function keeps the number of rows, so steps do not change either.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from spark_hvd.collectives.objects import broadcast_object
from spark_hvd.context import who
from spark_hvd.context.standing import is_initialized
from spark_hvd.data.feeders.mapping import Fed, apply
from spark_hvd.data.feeders.pool import pool_of
from spark_hvd.data.frame import one_ahead
from spark_hvd.data.readers.arrow import ahead
from spark_hvd.data.readers.dataset import listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import BatchT, Form, TableForm
from spark_hvd.data.readers.reader import Reader
from spark_hvd.data.readers.sharding import Position, Sharding, Share
from spark_hvd.data.source import Asked, DataSource

Submit = Callable[[pa.RecordBatch, "Sequence[int] | None"], "Future[pa.RecordBatch]"]


@dataclass(frozen=True)
class FedSource(DataSource):
    """See the module's description.

    Attributes:
        name: Name of the data set.
        inner: Where the rows are.
        told: What is done with them.
        made: The columns that come of it.
        rank: The rank that sent this to a process that is no rank, such as a spawned worker of a DataLoader.
    """

    name: str
    inner: DataSource
    told: Fed
    made: pa.Schema
    rank: int | None = None

    def __reduce__(self) -> tuple[type[FedSource], tuple[Any, ...]]:
        return FedSource, (self.name, self.inner, self.told, self.made, self._rank())

    def _rank(self) -> int:
        """Whose rows these are, which changes where ranks of an elastic run do."""
        return who.rank() if self.rank is None or is_initialized() else self.rank

    @property
    def schema(self) -> pa.Schema:
        return self.made

    @property
    def rows(self) -> int:
        return self.inner.rows

    @property
    def layout(self) -> int:
        return self.inner.layout

    def sharding(self, batch_size: int, drop_last: bool, asked: Asked) -> Sharding:
        return self.inner.sharding(batch_size, drop_last, self._inside(asked))

    def open(self, asked: Asked, form: Form[Any, BatchT]) -> Reader[BatchT]:
        inner = self.inner.open(self._inside(asked), TableForm())
        return FedReader(self.name, inner, self.told, asked, form, self._rank)

    def _inside(self, asked: Asked) -> Asked:
        return replace(asked, columns=self.told.row_map.columns or tuple(self.inner.schema.names))


class FedReader(Reader[BatchT]):
    """Reads rows, and gives them as the function has made them: some requests ahead of the consumer, in order."""

    def __init__(
        self,
        name: str,
        inner: Reader[pa.RecordBatch],
        told: Fed,
        asked: Asked,
        form: Form[Any, BatchT],
        rank: Callable[[], int],
    ) -> None:
        self._name, self._inner, self._told, self._asked, self._form = name, inner, told, asked, form
        self._rank = rank

    def batches(self, epoch: int, share: Share, sizes: Sequence[int]) -> Generator[BatchT, None, None]:
        if not sizes:
            return
        rows, most = sum(sizes), self._told.row_map.rows_at_once
        given = self._inner.batches(epoch, share, [most] * (rows // most) + [rows % most] * (rows % most > 0))
        with ExitStack() as ends:
            ends.callback(given.close)
            submit, number = opened(self._name, self._told, self._asked, ends)
            thread = ends.enter_context(ThreadPoolExecutor(1, "spark_hvd-reader"))
            under_way: deque[Future[pa.RecordBatch]] = deque(maxlen=number + 1)
            left = threading.Event()

            def leave() -> None:
                left.set()
                for each in list(under_way):  # the reader's thread may add to it
                    each.cancel()

            ends.callback(leave)

            def start(item: tuple[int, pa.RecordBatch]) -> Callable[[], pa.RecordBatch]:
                at, batch = item
                draws = [self._asked.seed, epoch, self._rank(), at] if self._told.row_map.random else None
                request = submit(batch, draws)
                under_way.append(request)
                if left.is_set():
                    request.cancel()
                return request.result

            where = f"what the function of data set {self._name!r} has made"
            made = (
                self._form.of(pa.Table.from_batches([each]), where) for each in ahead(start, enumerate(given), number)
            )
            # A batch is cut while the one before is used, so that who takes it waits for one thread once.
            yield from one_ahead(thread, self._form.cut(made, sizes))

    def close(self) -> None:
        self._inner.close()


def opened(name: str, told: Fed, asked: Asked, ends: ExitStack) -> tuple[Submit, int]:
    """Return how rows are sent through the function, and how many requests to keep ahead of the consumer."""
    columns = asked.columns or None
    if told.feed is not None:
        pool = pool_of(told.feed)
        return (lambda rows, draws: pool.submit(name, rows, draws, columns)), pool.in_flight
    fn, threads = pickle.loads(told.row_map.code), asked.workers
    here = ends.enter_context(ThreadPoolExecutor(threads, "spark_hvd-map"))
    return (lambda rows, draws: here.submit(apply, fn, rows, draws, columns)), threads


def fed_source(name: str, inner: DataSource, told: Fed) -> FedSource:
    """Return the source of rows that go through a function. Collective.

    Which columns the function makes is seen from the first row, by rank 0.

    Raises:
        DataError: The function wants a column that is not there, there are no rows, or it is wrong with the first one.
        Exception: what the function raises for it.
    """
    names = inner.schema.names
    if missing := [each for each in told.row_map.columns or () if each not in names]:
        raise DataError(
            f"columns={listed(told.row_map.columns or ())} of Mapped: data set {name!r} has no {listed(missing)} but "
            f"{listed(names)}"
        )
    schema = None
    if who.rank() == 0:
        asked = Asked(columns=(), workers=1)
        source = FedSource(name, inner, told, inner.schema)
        sharding = source.sharding(1, False, asked)
        if not inner.rows or not sharding.batches(Position(), 0, who.size()):
            from spark_hvd.data.loader import too_few

            raise DataError(too_few(name, inner.rows, who.size()))
        with (
            closing(source.open(asked, TableForm())) as reader,
            closing(reader.batches(0, sharding.share(Position(), 0, who.size()), [1])) as batches,
        ):
            schema = next(batches).schema
    return FedSource(name, inner, told, broadcast_object(schema, 0, name=f"spark_hvd.made_of.{name}"))
