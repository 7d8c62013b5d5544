"""Where the rows of a data set are, as ranks are told: plain data that pickles."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import pyarrow as pa

from spark_hvd.data.parquet import dataset_in, dataset_of
from spark_hvd.data.readers.arrow import ArrowReader
from spark_hvd.data.readers.dataset import DatasetMeta
from spark_hvd.data.readers.files import arrow_filesystem, check_columns, parquet_file, told
from spark_hvd.data.readers.forms import BatchT, Form
from spark_hvd.data.readers.reader import Reader, ReaderSpec
from spark_hvd.data.readers.sharding import Sharding
from spark_hvd.data.schemas.table import plain_schema
from spark_hvd.data.tables import files_of_paths, files_of_table
from spark_hvd.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a loader asks of a source.

    Attributes:
        columns: Names, in the order of the batch.
        shuffle: Another order in each epoch.
        seed: Seed of that order.
        window_rows: Rows that are shuffled together; None for those in 64 MiB, of a DataFrame in 8 MiB.
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

    @property
    def rows(self) -> int:
        """Number of rows, those of all ranks together."""

    @property
    def layout(self) -> int:
        """A number that differs where the order of rows does, for the same seed and epoch."""

    def sharding(self, batch_size: int, drop_last: bool, asked: Asked) -> Sharding:
        """Return how the rows of an epoch are shared."""

    def open(self, asked: Asked, form: Form[Any, BatchT]) -> Reader[BatchT]:
        """Return a reader of the rows of this rank, in a form."""


@dataclass(frozen=True)
class ParquetSource(DataSource):
    """Parquet files that all ranks reach, read in place."""

    dataset: DatasetMeta
    store: Store

    @property
    def schema(self) -> pa.Schema:
        """See base class. That of the first file, with the columns that are in none.

        Raises:
            DataError: The file is gone.
        """
        first = self.dataset.row_groups[0]
        if self.dataset.table is None:
            with told(first, self.dataset.version):
                inner = self.store.inner_path(first.file)
                with parquet_file(inner, filesystem=arrow_filesystem(self.store)) as file:
                    found = file.schema_arrow
            fields = {field.name: field for field in plain_schema(found)}
        else:
            fields = {field.name: field for field in self.dataset.table.plain}
        if self.dataset.partitions is not None:
            fields |= {field.name: field for field in self.dataset.partitions.schema}
        names = [column.name for column in self.dataset.columns]
        check_columns(names, fields, first.file)
        return pa.schema([fields[name] for name in names])

    @property
    def rows(self) -> int:
        return self.dataset.rows

    @property
    def layout(self) -> int:
        return self.dataset.layout

    def sharding(self, batch_size: int, drop_last: bool, asked: Asked) -> Sharding:
        return self.dataset.sharding(batch_size, drop_last, shuffle=asked.shuffle)

    def open(self, asked: Asked, form: Form[Any, BatchT]) -> Reader[BatchT]:
        return ArrowReader(ReaderSpec(dataset=self.dataset, store=self.store, **asdict(asked)), form)


def parquet_source(given: Any) -> ParquetSource:
    """Return the Parquet files of a data set, as they are now.

    Args:
        given: The path or URL of a file, of a directory of files with one schema, of a Delta or an Iceberg table; a
            list of paths of files or directories; or a ``deltalake.DeltaTable``, of the version that it is at, or a
            ``pyiceberg.table.Table``.

    Raises:
        DataError: There are none, they differ, have no rows, or are not what the table means.
        StoreError: They cannot be reached.
    """
    if isinstance(given, str | os.PathLike):
        store = Store.create(given)
        return ParquetSource(dataset_of(store, store.url), store)
    files = files_of_paths(given) if isinstance(given, list | tuple) else files_of_table(given)
    store = Store.create(files.url)
    return ParquetSource(dataset_in(store, files), store)
