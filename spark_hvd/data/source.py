"""Where the rows of a data set are, as ranks are told: plain data that pickles."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from spark_hvd.data.parquet import dataset_of
from spark_hvd.data.readers.arrow import ArrowReader
from spark_hvd.data.readers.dataset import DatasetMeta, listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.files import arrow_filesystem
from spark_hvd.data.readers.forms import BatchT, Form
from spark_hvd.data.readers.reader import Reader, ReaderSpec
from spark_hvd.data.readers.sharding import Sharding
from spark_hvd.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a loader asks of a source.

    Attributes:
        columns: Names, in the order of the batch.
        shuffle: Another order in each epoch.
        seed: Of that order.
        window_rows: Rows that are shuffled together; None for those in 64 MiB, of a DataFrame in 16 MiB.
        workers: Threads that read ahead.
    """

    columns: tuple[str, ...]
    shuffle: bool = False
    seed: int = 0
    window_rows: int | None = None
    workers: int = 2


class DataSource(Protocol):
    """See the module's description. All ranks of a run have the same, or each its part of the same rows."""

    @property
    def schema(self) -> pa.Schema:
        """The columns as they are in batches."""
        ...

    @property
    def rows(self) -> int:
        """Number of rows, those of all ranks together."""
        ...

    @property
    def layout(self) -> int:
        """A number that differs where the order of rows does, for the same seed and epoch."""
        ...

    def sharding(self, batch_size: int, drop_last: bool, asked: Asked) -> Sharding:
        """How the rows of an epoch are shared."""
        ...

    def open(self, asked: Asked, form: Form[Any, BatchT]) -> Reader[BatchT]:
        """A reader of the rows that this rank can be given, which gives them in a form."""
        ...


@dataclass(frozen=True)
class ParquetSource(DataSource):
    """Parquet files that all ranks reach, read in place.

    Attributes:
        dataset: What is known of them.
        store: Opens them.
    """

    dataset: DatasetMeta
    store: Store

    @property
    def schema(self) -> pa.Schema:
        """See base class. That of the first file."""
        first = self.store.inner_path(self.dataset.row_groups[0].file)
        found = pq.read_schema(first, filesystem=arrow_filesystem(self.store))
        return pa.schema([found.field(column.name) for column in self.dataset.columns])

    @property
    def rows(self) -> int:
        """See base class."""
        return self.dataset.rows

    @property
    def layout(self) -> int:
        """See base class."""
        return zlib.crc32(repr([group.rows for group in self.dataset.row_groups]).encode())

    def sharding(self, batch_size: int, drop_last: bool, asked: Asked) -> Sharding:
        """See base class."""
        return Sharding(self.rows, batch_size, drop_last)

    def open(self, asked: Asked, form: Form[Any, BatchT]) -> Reader[BatchT]:
        """See base class."""
        spec = ReaderSpec(
            dataset=self.dataset,
            columns=asked.columns,
            store=self.store,
            shuffle=asked.shuffle,
            seed=asked.seed,
            window_rows=asked.window_rows,
            workers=asked.workers,
        )
        return ArrowReader(spec, form)


def parquet_source(url: str) -> ParquetSource:
    """The Parquet files that a path or URL names: a file, or a directory of files with one schema.

    Raises:
        DataError: there are none, they differ, have no rows, or are parts of what is more than files.
        StoreError: they cannot be reached.
    """
    store = Store.create(url)
    spark = None
    if store.exists(store.join("_delta_log")):
        spark = "a Delta table", f"spark.read.format('delta').load({url!r})"
    elif store.exists(store.join("metadata", "version-hint.text")):
        spark = "an Iceberg table", f"spark.read.format('iceberg').load({url!r})"
    if spark is not None:
        raise DataError(
            f"{url} is {spark[0]}, some of whose files are no part of it any more. Next: give the DataFrame, {spark[1]}"
        )
    dataset = dataset_of(store, store.url)
    folders = {part for group in dataset.row_groups for part in group.file[len(store.url) :].split("/")[:-1]}
    if partitions := sorted({folder.partition("=")[0] for folder in folders if "=" in folder}):
        raise DataError(
            f"{url} has columns in the names of its directories, {listed(partitions)}, which are not in the files. "
            f"Next: give the DataFrame, spark.read.parquet({url!r})"
        )
    return ParquetSource(dataset, store)
