"""In the rank: a DataFrame's rows as PySpark's private loader gives them, a list of columns for each batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from spark_hvd.context import who
from spark_hvd.data.column_form import ColumnForm
from spark_hvd.data.columns import torch_batch
from spark_hvd.data.handed import source_of
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.feed import Feed
from spark_hvd.data.readers.sharding import Position
from spark_hvd.data.shard import source_here
from spark_hvd.data.source import Asked, DataSource
from spark_hvd.world.words import count

_opened: list[tuple[DataSource, int, int]] = []


def open_partition(name: str) -> None:
    """Learn where this rank's rows are. To be called by all ranks, in a world."""
    _opened[:] = [(source_here(name, source_of(name)), who.rank(), who.size())]


def get_spark_partition_data_loader(
    num_samples: int, batch_size: int, num_workers: int = 1, prefetch_factor: int = 2
) -> DataLoader[list[Any]]:
    """This rank's rows of the DataFrame, in a function that :meth:`TorchDistributor.train_on_dataframe` runs.

    Args:
        num_samples: Rows in an epoch: the first ones; if there are fewer, they are repeated.
        batch_size: Rows in a batch.
        num_workers: Threads that read ahead, at least one.
        prefetch_factor: Has no effect; the threads read ahead as far as memory for a window allows.

    Returns:
        Batches as lists of the columns: numbers as tensors (rows,) of dtype float64 or int64, arrays and vectors of one
        length as tensors (rows, length) of their own dtype, other values as lists.

    Raises:
        DataError: not in such a function, or fewer rows than ranks.
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
        self._asked = Asked(columns=tuple(source.schema.names), workers=workers)
        self._sharding = source.sharding(batch_size, False, self._asked)
        if not self._sharding.batches(Position(), rank, size):
            has = f"{count(source.rows, 'row')} for {count(size, 'rank')}"
            raise DataError(f"the DataFrame has {has}: expected one for each at least")

    def __iter__(self) -> Iterator[list[Any]]:
        reader = self._source.open(self._asked, ColumnForm(torch_batch, None, torch.cat))
        try:
            feed = Feed(reader, self._sharding, self._rank, self._size, Position())
            columns = (list(batch.values()) for batch in feed)
            for batch in _in_batches(columns, self._samples, self._batch_size):
                yield [_as_collated(values) for values in batch]
        finally:
            reader.close()


def _in_batches(columns: Iterator[list[Any]], rows: int, size: int) -> Iterator[list[Any]]:
    """Cut batches of ``size`` rows out of others, ``rows`` in all."""
    held: list[list[Any]] = []
    there = 0
    while rows:
        want = min(size, rows)
        while there < want:
            held.append(next(columns))
            there += len(held[-1][0])
        together = [_joined(parts) for parts in zip(*held, strict=True)]
        yield [values[:want] for values in together]
        held, there, rows = [[values[want:] for values in together]], there - want, rows - want


def _joined(parts: tuple[Any, ...]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else [value for part in parts for value in part]


def _as_collated(values: Any) -> Any:
    """The dtype that torch makes of Python's numbers, as PySpark's loader hands them over."""
    if not isinstance(values, torch.Tensor) or values.dim() > 1:
        return values
    return values.double() if values.is_floating_point() else values.long()
