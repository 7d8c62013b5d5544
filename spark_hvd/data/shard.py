"""A rank's view of a data set that was passed to ``run``: ``hvd.get_dataset_shard("train")``."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch

from spark_hvd.collectives.objects import allgather_object
from spark_hvd.context import basics
from spark_hvd.data.bucketing import moves_of
from spark_hvd.data.column_form import ColumnForm
from spark_hvd.data.columns import Features, numpy_batch, torch_batch
from spark_hvd.data.feeders.mapping import MappedSpec
from spark_hvd.data.frame import FrameSource, with_moved
from spark_hvd.data.loader import ShardLoader, TorchLoader
from spark_hvd.data.mapped import mapped_source
from spark_hvd.data.readers.dataset import listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import TableForm
from spark_hvd.data.readers.sharding import Position, Sharding
from spark_hvd.data.series.windows import METADATA
from spark_hvd.data.sliding import window_source
from spark_hvd.data.source import DataSource, ReadOptions
from spark_hvd.data.spool import SpoolSource

T = TypeVar("T")


class DatasetShard:
    """This rank's part of a data set. In an epoch, each row goes to one rank, and all ranks make equally many steps.

    Args:
        name: Name of the data set in ``data=``.
        source: Source of its rows.
    """

    __module__ = "spark_hvd.data"

    def __init__(self, name: str, source: DataSource) -> None:
        self.name, self._source = name, source

    def __repr__(self) -> str:
        return f"DatasetShard({self.name!r}, rows={self.rows}, columns={listed(self.schema.names)})"

    @property
    def schema(self) -> pa.Schema:
        """The schema of the columns."""
        return self._source.schema

    @property
    def rows(self) -> int:
        """Number of rows of all ranks together."""
        return self._source.rows

    def steps(self, batch_size: int, drop_last: bool = False) -> int:
        """Return the number of batches in an epoch, which is the same on all ranks.

        Args:
            batch_size: Rows in a batch of one rank.
            drop_last: Leave out the last batch if it is not full.

        Raises:
            DataError: ``batch_size`` is less than 1.
        """
        sharding = self._sharding(batch_size, drop_last, ReadOptions(columns=()))
        return len(sharding.batches(Position(), basics.rank(), basics.size()))

    def torch_batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        columns: Sequence[str] | None = None,
        features: Features | None = None,
        collate_fn: Callable[[pa.RecordBatch], Any] | None = None,
        drop_last: bool = False,
        row_weights: str | None = None,
        window_rows: int | None = None,
        workers: int = 2,
    ) -> TorchLoader[Any]:
        """Return batches for PyTorch: dicts of tensors, or the results of ``collate_fn``.

        The loader is a ``torch.utils.data.IterableDataset`` of whole batches. Iterate over it, or pass it to Lightning
        or to ``DataLoader(loader, batch_size=None)``.

        Args:
            batch_size: Rows in a batch of one rank.
            shuffle: Use another order in each epoch, drawn from ``seed`` and the epoch's number, regardless of the
                number of ranks. Otherwise files of up to 64 MiB are read in their order, larger ones from several
                places at once, each in its order. Up to 4 ranks that read files take the same global batches if ranks
                times ``batch_size`` is the same.
            seed: Seed of the order; the same on all ranks.
            columns: Names of the columns to read; None for all.
            features: Columns of numbers to stack into one tensor (rows, columns): their names, for a tensor called
                "features", or a dict from the names of tensors to those of columns.
            collate_fn: Function from a ``pyarrow.RecordBatch`` of the columns to the batch.
            drop_last: Leave out the last batch if it is not full.
            row_weights: Name of a float32 tensor (rows,) to add to each batch. If each row's loss is multiplied by it,
                the mean over ranks of their means equals the mean over all rows, even if ranks have different numbers
                of rows. If they have the same, all weights are 1.
            window_rows: Rows that are shuffled together; None for those in 64 MiB, or in 8 MiB for a DataFrame.
            workers: Threads that read ahead.

        Raises:
            DataError: A column does not exist, a number is out of range, or ``row_weights`` does not fit.
        """
        options = self._read_options(columns, shuffle, seed, window_rows, workers)
        sharding = self._sharding(batch_size, drop_last, options)
        self._check_row_weights(row_weights, options, features, collate_fn)
        if collate_fn is not None:
            return TorchLoader(self.name, self._source, sharding, options, TableForm, collate_fn)
        form = partial(ColumnForm, torch_batch, features, torch.cat)
        weigh = row_weights and partial(_weigh, row_weights, torch.full)
        return TorchLoader(self.name, self._source, sharding, options, form, row_weights=weigh or None)

    def numpy_batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        columns: Sequence[str] | None = None,
        features: Features | None = None,
        drop_last: bool = False,
        row_weights: str | None = None,
        window_rows: int | None = None,
        workers: int = 2,
    ) -> ShardLoader[dict[str, np.ndarray[Any, Any] | list[Any]]]:
        """Return batches for other frameworks: dicts of numpy arrays. Arguments are those of :meth:`torch_batches`."""
        options = self._read_options(columns, shuffle, seed, window_rows, workers)
        sharding = self._sharding(batch_size, drop_last, options)
        self._check_row_weights(row_weights, options, features)
        form = partial(ColumnForm, numpy_batch, features, np.concatenate)
        weigh = row_weights and partial(_weigh, row_weights, np.full)
        return ShardLoader(self.name, self._source, sharding, options, form, row_weights=weigh or None)

    def arrow_batches(
        self,
        batch_size: int = 1024,
        *,
        shuffle: bool = False,
        seed: int = 0,
        columns: Sequence[str] | None = None,
        drop_last: bool = False,
        window_rows: int | None = None,
        workers: int = 2,
    ) -> ShardLoader[pa.RecordBatch]:
        """Return batches of type ``pyarrow.RecordBatch``. Arguments are those of :meth:`torch_batches`."""
        options = self._read_options(columns, shuffle, seed, window_rows, workers)
        sharding = self._sharding(batch_size, drop_last, options)
        return ShardLoader(self.name, self._source, sharding, options, TableForm)

    def _check_row_weights(
        self,
        name: str | None,
        options: ReadOptions,
        features: Features | None,
        collate_fn: Callable[..., Any] | None = None,
    ) -> None:
        if name is None:
            return
        if collate_fn is not None:
            raise DataError(
                f"row_weights={name!r} and collate_fn are both given, but collate_fn makes the whole batch. Next: omit "
                "one of them"
            )
        taken = [*options.columns, *(["features"] if isinstance(features, list | tuple) else features or ())]
        if not name or name in taken:
            raise DataError(f"row_weights={name!r}: expected a name that nothing else in the batch has")

    def _sharding(self, batch_size: int, drop_last: bool, options: ReadOptions) -> Sharding:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size}: expected at least 1")
        return self._source.sharding(batch_size, drop_last, options)

    def _read_options(
        self, columns: Sequence[str] | None, shuffle: bool, seed: int, window_rows: int | None, workers: int
    ) -> ReadOptions:
        names = self.schema.names
        if isinstance(columns, str):
            raise DataError(f"columns={columns!r}: expected a list of names, [{columns!r}]")
        wanted = tuple(names if columns is None else columns)
        missing = set(wanted).difference(names)
        if missing or not wanted:
            raise DataError(f"columns={list(wanted)!r}: expected columns of data set {self.name!r}: {listed(names)}")
        if len(wanted) > len(set(wanted)):
            raise DataError(f"columns={list(wanted)!r}: expected each name once")
        for argument, value in (("window_rows", window_rows), ("workers", workers)):
            if value is not None and value < 1:
                raise DataError(f"{argument}={value}: expected at least 1")
        return ReadOptions(columns=wanted, shuffle=shuffle, seed=seed, window_rows=window_rows, workers=workers)


def _weigh(
    name: str, full: Callable[[tuple[int], float], Any], batch: dict[str, Any], rows: int, weight: float
) -> None:
    weights = full((rows,), weight)
    batch[name] = weights.astype(np.float32) if isinstance(weights, np.ndarray) else weights.float()


def source_here(name: str, source: DataSource | SpoolSource | MappedSpec) -> DataSource:
    """Return the part of a data set that this rank reads. Collective.

    Raises:
        DataError: The rows of a DataFrame do not arrive, its series do not fit the windows, or its function fails.
    """
    if isinstance(source, MappedSpec):
        return mapped_source(name, source_here(name, pickle.loads(source.inner)), source)
    if not isinstance(source, SpoolSource):
        return source
    spool = source.open()
    if windows := (spool.schema.metadata or {}).get(METADATA):
        return window_source(name, spool, source.buckets, source.part, json.loads(windows))
    counts = np.zeros_like(spool.counts)
    mine = slice(source.buckets.start, source.buckets.stop)
    all_ranks = allgather_object(
        (mine, spool.counts[mine], source.part, spool.local_buckets, spool.window_rows),
        name=f"spark_hvd.rows_of.{name}",
    )
    for buckets, rows_of_buckets, *_ in all_ranks:
        counts[buckets] = rows_of_buckets
    _, _, parts, held, rows = zip(*all_ranks, strict=True)
    window_rows = min(rows)
    spool = with_moved(name, spool, moves_of(counts, counts, parts, held, window_rows), source.part)
    return FrameSource(spool, counts, parts, source.part, window_rows)
