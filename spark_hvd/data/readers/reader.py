"""The contract of readers: what a rank asks for, and what it gets. Arrow and Petastorm fulfil it alike."""

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
"""Column name -> tensor of shape (rows, *shape of the column); all of one length; text is an array."""

BatchT_co = TypeVar("BatchT_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class ReaderSpec:
    """The request to a reader, the same on all ranks.

    Attributes:
        dataset: The data set.
        columns: Names of the columns to read, those and no more.
        store: Opens the files.
        shuffle: Another order in every epoch: row groups across the whole data set, and rows within windows.
        seed: Seed of the order. The same seed and epoch give the same order, whatever the number of ranks.
        window_rows: Rows that are shuffled together, in the windows of all lanes; None for as many as fit in 64 MiB.
            Bounds the memory.
        cache: Keep what was read in memory; later epochs read no file (``inmemory_cache_all``). Row groups then come in
            the order of the first epoch, so that a rank has the same ones in each.
        kind: "arrow", "petastorm", or None to choose by the data set.
        workers: Threads that read ahead.
        pool: Petastorm's ``reader_pool_type``: "thread", "process" or "dummy". The Arrow reader has threads only.
        decoders: Column name -> function of the bytes of one value, returning an array; for binary columns.
        transformation_fn: Function of a pandas DataFrame of some rows, returning one of as many rows.
        edit_fields: (name, numpy dtype, shape, nullable) of what ``transformation_fn`` adds or changes.
        removed_fields: Names of the columns that ``transformation_fn`` removes.
        stack: Names of columns that a batch has side by side, as one tensor "features" (rows, columns) in place of one
            each, if the reader can: for several scalars of one dtype.
        text: Names of the columns that may be text; a batch has them as arrays of str, (rows,). Text in other columns
            is an error. For the Arrow reader.
        collate: Function of a ``pyarrow.RecordBatch`` of the columns, and of ``training``, that makes a batch, in place
            of decoders and ``transformation_fn``; for the Arrow reader.
        training: Whether the rows are to train on, and not to validate.
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
    """Reads parts of the line of rows that a data set makes in an epoch."""

    def batches(self, epoch: int, share: Share, sizes: Sequence[int]) -> Generator[BatchT_co, None, None]:
        """Yield batches.

        The iterator may be left early; closing it stops the threads.

        Args:
            epoch: Its number, from 0; the order of the line depends on it and on the seed.
            share: Which rows of the line, ascending, or in the order of turns.
            sizes: Rows in each batch, in all at most those of ``share``; all but the last are of one size.

        Raises:
            DataError: nulls, ragged lists, a file that changed or vanished; naming file, column and row group.
        """

    def close(self) -> None:
        """Stop threads and processes, give memory back. Idempotent."""
