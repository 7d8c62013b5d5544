"""The contract of readers: what a rank requests, and what it gets. The Arrow and Petastorm readers implement it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from spark_hvd.data.readers.dataset import DatasetMeta
from spark_hvd.data.readers.sharding import Share

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import torch

    from spark_hvd.store import Store

Batch = dict[str, "torch.Tensor"]
"""Column name -> tensor of shape (rows, *shape of the column), or an array of str (rows,) for text."""

BatchT_co = TypeVar("BatchT_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class ReaderSpec:
    """The request to a reader, the same on all ranks.

    Attributes:
        dataset: The data set.
        columns: Names of the columns to read.
        store: The store that opens the files.
        shuffle: Shuffle in each epoch: row groups across the whole data set, and rows within windows.
        seed: Seed of the order. The same seed and epoch give the same order, for any number of ranks.
        window_rows: Number of rows that are shuffled together, in the windows of all lanes, which limits the memory;
            None for as many as fit in 64 MiB.
        cache: Keep all rows in memory, so that later epochs read no files (``inmemory_cache_all``). Row groups then
            come in the order of the first epoch, so that a rank has the same ones in each epoch.
        kind: "arrow", "petastorm", or None to choose by the data set.
        workers: Number of threads that read ahead.
        pool: Petastorm's ``reader_pool_type``: "thread", "process" or "dummy". The Arrow reader has threads only.
        decoders: Binary column -> function from the bytes of one value to an array.
        transformation_fn: Function from a pandas DataFrame of some rows to one with the same number of rows.
        edit_fields: (name, numpy dtype, shape, nullable) of each column that ``transformation_fn`` adds or changes.
        removed_fields: Names of the columns that ``transformation_fn`` removes.
        stack: Names of columns that a batch has as one tensor "features" (rows, columns) instead of one tensor each, if
            they are several scalars of one dtype.
        text: Names of the columns that may be text, which a batch has as arrays of str (rows,). Text in other columns
            raises an error. Arrow reader only.
        collate: Function from a ``pyarrow.RecordBatch`` of the columns and ``training`` to a batch, instead of decoders
            and ``transformation_fn``. Arrow reader only.
        training: Whether the rows are for training rather than validation.
    """

    dataset: DatasetMeta
    columns: tuple[str, ...]
    store: Store
    shuffle: bool = False
    seed: int = 0
    window_rows: int | None = None
    cache: bool = False
    kind: str | None = None
    workers: int = 2
    pool: str = "thread"
    decoders: Mapping[str, Callable[[bytes], Any]] = field(default_factory=dict)
    transformation_fn: Callable[[pd.DataFrame], pd.DataFrame] | None = None
    edit_fields: tuple[tuple[str, Any, tuple[int, ...], bool], ...] = ()
    removed_fields: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    collate: Callable[[pa.RecordBatch, bool], Batch] | None = None
    training: bool = True


class Reader(Protocol[BatchT_co]):
    """Reads a rank's share of the rows of each epoch."""

    def batches(self, epoch: int, share: Share, sizes: Sequence[int]) -> Generator[BatchT_co, None, None]:
        """Yield batches. The iterator may be closed early, which stops the threads.

        Args:
            epoch: Number of the epoch, from 0. It and the seed determine the order of the line.
            share: The rows of the line, in ascending order or in the order of turns.
            sizes: Number of rows in each batch; equal for all but the last, and in total at most those of ``share``.

        Raises:
            DataError: There are nulls or ragged lists, or a file changed or was deleted. The message names the column,
                the file and the row group.
        """

    def close(self) -> None:
        """Stop threads and processes, and free memory. Idempotent."""
