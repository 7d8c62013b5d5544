"""Reads a DataFrame's rows in a rank as PySpark's private loader does: a list of columns for each batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from spark_hvd.context import basics
from spark_hvd.data.column_form import ColumnForm
from spark_hvd.data.columns import torch_batch
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.feed import Feed
from spark_hvd.data.readers.sharding import Position
from spark_hvd.data.registry import source_of
from spark_hvd.data.shard import source_here
from spark_hvd.data.source import DataSource, ReadOptions
from spark_hvd.world.words import count

_opened: list[tuple[DataSource, int, int]] = []


def open_partition(name: str) -> None:
    """Find this rank's rows. All ranks must call this, in a world."""
    _opened[:] = [(source_here(name, source_of(name)), basics.rank(), basics.size())]


def get_spark_partition_data_loader(
    num_samples: int, batch_size: int, num_workers: int = 1, prefetch_factor: int = 2
) -> DataLoader[list[Any]]:
    """Load this rank's rows of the DataFrame, in a function that :meth:`TorchDistributor.train_on_dataframe` runs.

    Args:
        num_samples: Rows per epoch, from the first; if the rank has fewer, they are repeated.
        batch_size: Rows per batch.
        num_workers: Threads that read ahead; at least one.
        prefetch_factor: Has no effect. The threads read ahead as far as the memory for a window allows.

    Returns:
        Batches as lists of the columns: numbers as tensors (rows,) of dtype float64 or int64, arrays and vectors of one
        length as tensors (rows, length) of their own dtype, other values as lists.

    Raises:
        DataError: It is not called in such a function, or there are fewer rows than ranks.
    """
    if not _opened:
        raise DataError(
            "get_spark_partition_data_loader: this rank has no rows. Expected it in a function that "
            "TorchDistributor.train_on_dataframe runs"
        )
    rows = _PartitionRows(*_opened[0], num_samples, batch_size, max(1, num_workers))
    return DataLoader(rows, batch_size=None)


get_spark_partition_data_loader.__module__ = "spark_hvd.compat"


class _PartitionRows(IterableDataset[list[Any]]):
    """See :func:`get_spark_partition_data_loader`."""

    def __init__(
        self, source: DataSource, rank: int, size: int, num_samples: int, batch_size: int, workers: int
    ) -> None:
        self._source, self._rank, self._size = source, rank, size
        self._samples, self._batch_size = num_samples, batch_size
        self._options = ReadOptions(columns=tuple(source.schema.names), workers=workers)
        self._sharding = source.sharding(batch_size, False, self._options)
        if not self._sharding.batches(Position(), rank, size):
            has = f"{count(source.rows, 'row')} for {count(size, 'rank')}"
            raise DataError(f"the DataFrame has {has}: expected at least one for each")

    def __iter__(self) -> Iterator[list[Any]]:
        reader = self._source.open(self._options, ColumnForm(torch_batch, None, torch.cat))
        try:
            feed = Feed(reader, self._sharding, self._rank, self._size, Position())
            columns = (list(batch.values()) for batch in feed)
            for batch in _in_batches(columns, self._samples, self._batch_size):
                yield [_as_collated(values) for values in batch]
        finally:
            reader.close()


def _in_batches(columns: Iterator[list[Any]], rows: int, size: int) -> Iterator[list[Any]]:
    """Regroup batches into ones of ``size`` rows, with ``rows`` rows in total."""
    held: list[list[Any]] = []
    held_rows = 0
    while rows:
        wanted = min(size, rows)
        while held_rows < wanted:
            held.append(next(columns))
            held_rows += len(held[-1][0])
        joined = [_joined(parts) for parts in zip(*held, strict=True)]
        yield [values[:wanted] for values in joined]
        held, held_rows, rows = [[values[wanted:] for values in joined]], held_rows - wanted, rows - wanted


def _joined(parts: tuple[Any, ...]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else [value for part in parts for value in part]


def _as_collated(values: Any) -> Any:
    """Convert to the dtypes of PySpark's loader, which torch makes of Python's numbers."""
    if not isinstance(values, torch.Tensor) or values.dim() > 1:
        return values
    return values.double() if values.is_floating_point() else values.long()
