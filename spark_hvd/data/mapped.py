"""Applies a function to rows before they form batches, in feeders or in threads of the rank.

The rank reads the rows as usual and sends them through the function, so sharing, order and positions stay the same. The
function must keep the number of rows, so the number of steps stays the same, too.
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
from spark_hvd.context import basics
from spark_hvd.context.global_state import is_initialized
from spark_hvd.data.feeders.mapping import MappedSpec, apply
from spark_hvd.data.feeders.pool import pool_of
from spark_hvd.data.frame import one_ahead
from spark_hvd.data.readers.arrow import ahead
from spark_hvd.data.readers.dataset import listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import BatchT, Form, TableForm
from spark_hvd.data.readers.reader import Reader
from spark_hvd.data.readers.sharding import Position, Sharding, Share
from spark_hvd.data.source import DataSource, ReadOptions

Submit = Callable[[pa.RecordBatch, "Sequence[int] | None"], "Future[pa.RecordBatch]"]


@dataclass(frozen=True)
class MappedSource(DataSource):
    """A source whose rows are the results of a function.

    Attributes:
        name: Name of the data set.
        inner: The source of the rows before the function.
        spec: The function, and where it runs.
        result_schema: The schema of the function's results.
        rank: The rank that sent this source to a process that is not a rank, such as a spawned worker of a DataLoader;
            None in a rank.
    """

    name: str
    inner: DataSource
    spec: MappedSpec
    result_schema: pa.Schema
    rank: int | None = None

    def __reduce__(self) -> tuple[type[MappedSource], tuple[Any, ...]]:
        return MappedSource, (self.name, self.inner, self.spec, self.result_schema, self._rank())

    def _rank(self) -> int:
        """Return the rank that reads these rows. In an elastic run, a process may get another rank."""
        return basics.rank() if self.rank is None or is_initialized() else self.rank

    @property
    def schema(self) -> pa.Schema:
        return self.result_schema

    @property
    def rows(self) -> int:
        return self.inner.rows

    @property
    def layout(self) -> int:
        return self.inner.layout

    def sharding(self, batch_size: int, drop_last: bool, options: ReadOptions) -> Sharding:
        return self.inner.sharding(batch_size, drop_last, self._inside(options))

    def open(self, options: ReadOptions, form: Form[Any, BatchT]) -> Reader[BatchT]:
        inner = self.inner.open(self._inside(options), TableForm())
        return MappedReader(self.name, inner, self.spec, options, form, self._rank)

    def _inside(self, options: ReadOptions) -> ReadOptions:
        return replace(options, columns=self.spec.row_map.columns or tuple(self.inner.schema.names))


class MappedReader(Reader[BatchT]):
    """Reads rows and yields the function's results in order, some requests ahead of the consumer."""

    def __init__(
        self,
        name: str,
        inner: Reader[pa.RecordBatch],
        spec: MappedSpec,
        options: ReadOptions,
        form: Form[Any, BatchT],
        rank: Callable[[], int],
    ) -> None:
        self._name, self._inner, self._spec, self._options, self._form = name, inner, spec, options, form
        self._rank = rank

    def batches(self, epoch: int, share: Share, sizes: Sequence[int]) -> Generator[BatchT, None, None]:
        if not sizes:
            return
        rows, most = sum(sizes), self._spec.row_map.rows_at_once
        source = self._inner.batches(epoch, share, [most] * (rows // most) + [rows % most] * (rows % most > 0))
        with ExitStack() as ends:
            ends.callback(source.close)
            submit, in_flight = opened(self._name, self._spec, self._options, ends)
            thread = ends.enter_context(ThreadPoolExecutor(1, "spark_hvd-reader"))
            requests: deque[Future[pa.RecordBatch]] = deque(maxlen=in_flight + 1)
            closed = threading.Event()

            def cancel() -> None:
                closed.set()
                for request in list(requests):  # a copy: the reader's thread may add to it
                    request.cancel()

            ends.callback(cancel)

            def start(item: tuple[int, pa.RecordBatch]) -> Callable[[], pa.RecordBatch]:
                number, batch = item
                draws = [self._options.seed, epoch, self._rank(), number] if self._spec.row_map.random else None
                request = submit(batch, draws)
                requests.append(request)
                if closed.is_set():
                    request.cancel()
                return request.result

            where = f"the result of the function of data set {self._name!r}"
            results = ahead(start, enumerate(source), in_flight)
            parts = (self._form.of(pa.Table.from_batches([result]), where) for result in results)
            # Cut each batch while the previous one is used, so that the consumer waits for one thread only.
            yield from one_ahead(thread, self._form.cut(parts, sizes))

    def close(self) -> None:
        self._inner.close()


def opened(name: str, spec: MappedSpec, options: ReadOptions, ends: ExitStack) -> tuple[Submit, int]:
    """Return a callable that applies the function to rows, and how many requests to keep in flight."""
    columns = options.columns or None
    if spec.feed is not None:
        pool = pool_of(spec.feed)
        return (lambda rows, draws: pool.submit(name, rows, draws, columns)), pool.in_flight
    fn, threads = pickle.loads(spec.row_map.code), options.workers
    executor = ends.enter_context(ThreadPoolExecutor(threads, "spark_hvd-map"))
    return (lambda rows, draws: executor.submit(apply, fn, rows, draws, columns)), threads


def mapped_source(name: str, inner: DataSource, spec: MappedSpec) -> MappedSource:
    """Return the source of rows that go through a function. Collective.

    Rank 0 applies the function to its first row to learn which columns it makes.

    Raises:
        DataError: The function needs a column that does not exist, there are too few rows, or its result is not valid.
        Exception: What the function raises for the first row.
    """
    names = inner.schema.names
    if missing := [column for column in spec.row_map.columns or () if column not in names]:
        raise DataError(
            f"columns={listed(spec.row_map.columns or ())} of Mapped: data set {name!r} has no {listed(missing)}, but "
            f"has {listed(names)}"
        )
    schema = None
    if basics.rank() == 0:
        options = ReadOptions(columns=(), workers=1)
        source = MappedSource(name, inner, spec, inner.schema)
        sharding = source.sharding(1, False, options)
        if not inner.rows or not sharding.batches(Position(), 0, basics.size()):
            from spark_hvd.data.loader import too_few

            raise DataError(too_few(name, inner.rows, basics.size()))
        with (
            closing(source.open(options, TableForm())) as reader,
            closing(reader.batches(0, sharding.share(Position(), 0, basics.size()), [1])) as batches,
        ):
            schema = next(batches).schema
    return MappedSource(name, inner, spec, broadcast_object(schema, 0, name=f"spark_hvd.made_of.{name}"))
