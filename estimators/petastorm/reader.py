"""The reader of Petastorm data sets: its workers decode pieces of row groups, which it returns in the requested order.

Petastorm assigns whole row groups to shards and yields them as they become ready. Here, a rank requests the pieces of
its share, a few at a time, and restores their order: the same seed gives the same batches with any pool. The price is
that a slow row group delays those behind it, of which at most ``workers + 2`` wait in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import torch

from spark_hvd.data.readers.batches import Blocks, Layout, RowShapes, cut
from spark_hvd.data.readers.blocks import RowWindow
from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.files import where
from spark_hvd.data.readers.reader import Batch, Reader, ReaderSpec
from spark_hvd.data.readers.sharding import Share, Turns, overlaps
from spark_hvd.data.readers.values import columns_yielded
from spark_hvd.data.readers.windows import WINDOW_BYTES, EpochLine, Piece
from spark_hvd.estimators.petastorm.bridge import install
from spark_hvd.estimators.petastorm.parquet import ParquetDataset
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError


def load_unischema(store: Store, url: str) -> Any:
    """Load the Unischema of the data set at ``url``.

    It is a pickle, which Petastorm restricts to its own classes and those of numpy, pyspark and the standard library.
    Only read data sets from people you trust.

    Raises:
        DataError: The data set has no Unischema, or it cannot be read.
        EstimatorError: Petastorm is missing or not supported.
    """
    install()
    from petastorm.etl.dataset_metadata import get_schema

    try:
        return get_schema(ParquetDataset(store.inner_path(url), filesystem=store.filesystem))
    except Exception as error:  # errors of Petastorm, of pickle, or of the file system
        raise DataError(f"cannot read the Unischema of {url}: {type(error).__name__}: {error}") from error


def columns_of_unischema(schema: Any) -> tuple[Column, ...]:
    """Return the tensor columns of a schema; float64 and decimals become float32, as in all data that others wrote.

    Strings, dates and the like get the dtype "object".
    """
    return tuple(Column(field.name, _dtype(field.numpy_dtype), _shape(field.shape)) for field in schema.fields.values())


def decoders_of_unischema(schema: Any) -> dict[str, Callable[[bytes], Any]]:
    """Return field name -> decoder of its codec, for fields that are stored as bytes."""
    from petastorm.codecs import ScalarCodec

    return {
        field.name: partial(field.codec.decode, field)
        for field in schema.fields.values()
        if field.codec is not None and not isinstance(field.codec, ScalarCodec)
    }


def decoded_spec(spec: ReaderSpec) -> ReaderSpec:
    """Return ``spec`` with the columns and decoders of the data set's Unischema, or unchanged if it has none.

    Raises:
        DataError: The Unischema cannot be read, or lacks a column of ``spec``.
    """
    if not spec.dataset.unischema:
        return spec
    schema = load_unischema(spec.store, spec.dataset.url)
    dataset = replace(spec.dataset, columns=columns_of_unischema(schema))
    wanted = set(spec.columns)
    decoders = {name: decode for name, decode in decoders_of_unischema(schema).items() if name in wanted}
    return replace(spec, dataset=dataset, decoders={**decoders, **spec.decoders})


def _dtype(numpy_dtype: Any) -> str:
    dtype = np.dtype("float32" if numpy_dtype in (Decimal, np.float64) else numpy_dtype)
    return dtype.name if dtype.kind in "biuf" else "object"


def _shape(shape: tuple[int | None, ...]) -> tuple[int, ...] | None:
    known = tuple(size for size in shape if size is not None)
    return known if len(known) == len(shape) else None


POOLS = ("thread", "process", "dummy")
_Result = list[tuple[np.ndarray[Any, Any], torch.dtype]] | Exception


class PetastormReader(Reader[Batch]):
    """Reads a rank's shard of a data set, pass by pass.

    Data sets with a Unischema are decoded by its codecs, which also determine the dtype and shape of a column; plain
    Parquet is read as by the Arrow reader. ``transformation_fn`` and ``decoders`` run in Petastorm's workers: threads
    of this process, separate processes (``pool="process"``, kept between passes), or the caller ("dummy", which reads
    nothing ahead). With the same spec, all pools and the Arrow reader yield the same batches.

    Memory holds a window of ``window_rows`` rows, ``workers + 2`` row groups read ahead, and batches not yet used. With
    ``cache``, the rank keeps the shard of the first pass and shuffles it.

    Raises:
        DataError: A column is not in the data set, or its Unischema cannot be read.
        EstimatorError: Petastorm is missing or not supported.
        StoreError: processes would have to read a store that only this process sees.
        ValueError: The pool is unknown, or has no workers.
    """

    def __init__(self, spec: ReaderSpec) -> None:
        if spec.pool not in POOLS:
            raise ValueError(f"pool={spec.pool!r}: expected one of {', '.join(map(repr, POOLS))}")
        if spec.workers < 1:
            raise ValueError(f"workers={spec.workers}: expected at least 1")
        if spec.pool == "process" and not spec.store.is_shared:
            raise StoreError(f"{spec.store.url} is seen by this process alone: use pool='thread' or a store on disk")
        install()
        self._spec = spec = decoded_spec(spec)
        self._layout = Layout(columns_yielded(spec), spec.stack)
        self._kept: dict[Piece, Blocks] = {}
        self._idle: Any = None
        self._busy: list[Any] = []
        self._shapes = RowShapes(self._layout)
        self._lock = threading.Lock()  # held while waiting for results, as sockets must not be closed meanwhile
        self._closed = False

    def batches(self, epoch: int, share: Share, sizes: Sequence[int]) -> Generator[Batch, None, None]:
        spec = self._spec
        if self._closed:
            raise RuntimeError("the reader is closed: open another")
        if not sizes:
            return
        groups = [group.rows for group in spec.dataset.row_groups]
        if not spec.shuffle and not isinstance(share, Turns):
            pieces = [Piece(group, start, stop) for group, start, stop in overlaps(groups, share)]
            with closing(self._loaded(pieces)) as loaded:
                yield from cut(loaded, self._layout, sizes)
                for _ in loaded:  # read what drop_last leaves; a pool can be kept only if nothing is in flight
                    pass
            return
        line = EpochLine(
            groups,
            spec.dataset.lanes(spec.shuffle),
            spec.window_rows or self._window_rows(),
            shuffle=spec.shuffle,
            seed=spec.seed,
            epoch=epoch,
            drawn=0 if spec.cache else epoch,
        )
        yield from cut(self._gathered(line, share), self._layout, sizes)

    def close(self) -> None:
        self._closed = True
        for pool in self._busy:
            pool.interrupt()
        with self._lock:
            for pool in [*self._busy, *([self._idle] if self._idle else [])]:
                _stop(pool)
            self._idle = None
            self._busy.clear()
        self._kept.clear()

    def _window_rows(self) -> int:
        """Return how many rows fit into a window's memory. This reads the first row group, which is read again."""
        if self._shapes.row_bytes is None:
            for _ in self._read([Piece(0, 0, self._spec.dataset.row_groups[0].rows)]):
                pass
        return max(1, WINDOW_BYTES // max(1, self._shapes.row_bytes or 1))

    def _gathered(self, line: EpochLine, share: Share) -> Iterator[Blocks]:
        """Yield rows in the share's order, round by round; a piece that continues in the next window is read once."""
        runs = list(line.runs(share))
        run_of = {each: number for number, run in enumerate(runs) for each in run}
        used = (run_of[number, piece] for number, one in enumerate(line.rounds(share)) for piece in one.pieces)
        order = list(dict.fromkeys(used))
        whole = [Piece(runs[at][0][1].group, runs[at][0][1].start, runs[at][-1][1].stop) for at in order]
        held: dict[int, Blocks] = {}
        with closing(self._loaded(whole)) as loaded:
            for number, one in enumerate(line.rounds(share)):
                filling = RowWindow(one)
                for at, piece in enumerate(one.pieces):
                    run = run_of[number, piece]
                    blocks = held[run] if run in held else held.setdefault(run, next(loaded))
                    first = piece.start - runs[run][0][1].start
                    filling.put(at, [block[first : first + piece.rows] for block in blocks])
                    if (number, piece) == runs[run][-1]:
                        del held[run]
                    del blocks
                yield filling.take()
            next(loaded, None)

    def _loaded(self, pieces: Sequence[Piece]) -> Generator[Blocks, None, None]:
        """Yield the rows of each piece, in order, from memory or from the pool."""
        kept = {piece: self._kept[piece] for piece in pieces if piece in self._kept}  # another pass may add some
        with closing(self._read([piece for piece in pieces if piece not in kept])) as read:
            for piece in pieces:
                if self._closed:
                    raise RuntimeError("the reader was closed while its batches were read")
                blocks = kept[piece] if piece in kept else next(read)
                if self._spec.cache:
                    self._kept[piece] = blocks
                    if not self._spec.shuffle:  # cached rows must not change with a batch
                        blocks = [block.clone() for block in blocks]
                yield blocks
                del blocks
            next(read, None)  # let it end by itself instead of closing it, so that its pool is kept

    def _read(self, pieces: Sequence[Piece]) -> Generator[Blocks, None, None]:
        """Yield the rows of each piece, in order, and request some pieces ahead."""
        if not pieces:
            return
        pool = self._take_pool()
        ahead = 1 if self._spec.pool == "dummy" else self._spec.workers + 2
        asked, whole = 0, False
        early: dict[int, _Result] = {}
        try:
            for wanted in range(len(pieces)):
                while asked < min(wanted + ahead, len(pieces)):
                    pool.ventilate(number=asked, piece=pieces[asked])
                    asked += 1
                while wanted not in early:
                    number, result = self._result(pool)
                    early[number] = result
                arrays = early.pop(wanted)
                if isinstance(arrays, Exception):  # raised in order, so that it is always the same error
                    raise arrays
                blocks = [torch.from_numpy(array).view(dtype) for array, dtype in arrays]
                del arrays
                self._shapes.check(blocks, where(self._spec.dataset.row_groups[pieces[wanted].group]))
                yield blocks
                del blocks
            whole = True
        finally:
            self._give_back(pool, whole)

    def _take_pool(self) -> Any:
        from spark_hvd.estimators.petastorm.workers import start_pool

        pool, self._idle = self._idle or start_pool(self._spec), None
        self._busy.append(pool)
        return pool

    def _give_back(self, pool: Any, whole: bool) -> None:
        if pool not in self._busy:  # closed meanwhile
            return
        self._busy.remove(pool)
        if whole and self._spec.pool == "process" and self._idle is None:
            self._idle = pool  # processes take seconds to start
        else:
            _stop(pool)

    def _result(self, pool: Any) -> tuple[int, _Result]:
        with self._lock:
            try:
                if self._closed:
                    raise RuntimeError("closed")
                result: tuple[int, _Result] = pool.get_results()
            except RuntimeError as error:
                if self._closed:
                    raise RuntimeError("the reader was closed while its batches were read") from None
                raise error
        return result


def _stop(pool: Any) -> None:
    pool.stop()
    pool.join()
