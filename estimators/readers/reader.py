"""The contract of readers: what a rank asks for, and what it gets. Arrow and Petastorm fulfil it alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from spark_hvd.estimators.readers.dataset import DatasetMeta

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from spark_hvd.store import Store

Batch = dict[str, "torch.Tensor"]
"""Column name -> tensor of shape (rows, *shape of the column); all of one length."""


@dataclass(frozen=True, kw_only=True)
class ReaderSpec:
    """What one rank asks of a reader.

    Attributes:
        dataset: The data set.
        columns: Names of the columns to read, those and no more.
        store: Opens the files.
        batch_size: Rows in a batch.
        rank: This rank.
        size: Number of ranks. Each gets ``rows // size`` rows of every pass, the first ``rows % size`` one more.
        shuffle: Another order in every pass: row groups across the whole data set, and rows within a window.
        seed: Of the order. Same seed, size and pass: same batches, to the bit.
        window_rows: Rows that are shuffled together; None for as many as fit in 64 MiB. Bounds the memory.
        drop_last: Leave out the batch at the end of a pass that is not full.
        cache: Keep what was read in memory; later passes read no file (``inmemory_cache_all``), so that a rank has the
            same rows in every pass.
        kind: "arrow", "petastorm", or None to choose by the data set.
        workers: Threads that read ahead.
        pool: Petastorm's ``reader_pool_type``: "thread", "process" or "dummy". The Arrow reader has threads only.
        decoders: Column name -> function of the bytes of one value, returning an array; for binary columns.
        transformation_fn: Function of a pandas DataFrame of some rows, returning one of as many rows.
        edit_fields: (name, numpy dtype, shape, nullable) of what ``transformation_fn`` adds or changes.
        removed_fields: Names of the columns that ``transformation_fn`` removes.
    """

    dataset: DatasetMeta
    columns: tuple[str, ...]
    store: Store
    batch_size: int
    rank: int = 0
    size: int = 1
    shuffle: bool = False
    seed: int = 0
    window_rows: int | None = None
    drop_last: bool = False
    cache: bool = False
    kind: str | None = None
    workers: int = 2
    pool: str = "thread"
    decoders: Mapping[str, Callable[[bytes], Any]] = field(default_factory=dict)
    transformation_fn: Callable[[pd.DataFrame], pd.DataFrame] | None = None
    edit_fields: tuple[tuple[str, Any, tuple[int, ...], bool], ...] = ()
    removed_fields: tuple[str, ...] = ()


class Reader(Protocol):
    """Reads a rank's shard of a data set, pass by pass."""

    def batches(self, number: int) -> Iterator[Batch]:
        """Yield the batches of pass ``number`` (from 0).

        There are exactly ``steps_of(dataset.rows, size, batch_size, drop_last)`` of them. Over all ranks every row
        comes once in a pass, but for those that ``drop_last`` leaves out. All batches have ``batch_size`` rows but the
        last, which holds what is left: on ranks that got a row more it may have ``batch_size + 1``. The iterator may
        be left early; closing it stops the threads.

        Raises:
            DataError: nulls, ragged lists, a file that changed or vanished; naming file, column and row group.
        """
        ...

    def close(self) -> None:
        """Stop threads and processes, give memory back. Idempotent."""
        ...
