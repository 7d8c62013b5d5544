"""Sources of a data set's rows, which ranks receive as plain data that pickles."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import pyarrow as pa

from spark_hvd.data.parquet import dataset_in, dataset_of
from spark_hvd.data.readers.arrow import ArrowReader
from spark_hvd.data.readers.dataset import DatasetMeta
from spark_hvd.data.readers.files import arrow_filesystem, check_columns, parquet_file, reading
from spark_hvd.data.readers.forms import BatchT, Form
from spark_hvd.data.readers.reader import Reader, ReaderSpec
from spark_hvd.data.readers.sharding import Sharding
from spark_hvd.data.schemas.table import plain_schema
from spark_hvd.data.tables import files_of_paths, files_of_table
from spark_hvd.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a loader reads of a source, and how.

    Attributes:
        columns: Names of the columns, in the order of the batch.
        shuffle: Whether to use another order in each epoch.
        seed: Seed of that order.
        window_rows: Number of rows to shuffle together; None for as many as fit in 64 MiB, or 8 MiB for a DataFrame.
        workers: Number of threads that read ahead.
    """

    columns: tuple[str, ...]
    shuffle: bool = False
    seed: int = 0
    window_rows: int | None = None
    workers: int = 2


class DataSource(Protocol):
    """Gives access to the rows of a data set. Each rank's source has all rows, or that rank's part of them."""

    @property
    def schema(self) -> pa.Schema:
        """The columns as they are in batches."""

    @property
    def rows(self) -> int:
        """Number of rows, those of all ranks together."""

    @property
    def layout(self) -> int:
        """A number that differs if the order of the rows does, for the same seed and epoch."""

    def sharding(self, batch_size: int, drop_last: bool, options: ReadOptions) -> Sharding:
        """Return how the rows of an epoch are shared."""

    def open(self, options: ReadOptions, form: Form[Any, BatchT]) -> Reader[BatchT]:
        """Return a reader of the rows of this rank, in a form."""


@dataclass(frozen=True)
class ParquetSource(DataSource):
    """Parquet files that all ranks can reach and read in place."""

    dataset: DatasetMeta
    store: Store

    @property
    def schema(self) -> pa.Schema:
        """See base class. The schema of the first file, with the columns that are in no file.

        Raises:
            DataError: The first file was deleted.
        """
        first = self.dataset.row_groups[0]
        if self.dataset.table is None:
            with reading(first, self.dataset.version):
                inner = self.store.inner_path(first.file)
                with parquet_file(inner, filesystem=arrow_filesystem(self.store)) as file:
                    schema = file.schema_arrow
            fields = {field.name: field for field in plain_schema(schema)}
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

    def sharding(self, batch_size: int, drop_last: bool, options: ReadOptions) -> Sharding:
        return self.dataset.sharding(batch_size, drop_last, shuffle=options.shuffle)

    def open(self, options: ReadOptions, form: Form[Any, BatchT]) -> Reader[BatchT]:
        return ArrowReader(ReaderSpec(dataset=self.dataset, store=self.store, **asdict(options)), form)


def parquet_source(given: Any) -> ParquetSource:
    """Return the source of the Parquet files that a value for ``data=`` names, as they are now.

    Args:
        given: The path or URL of a file, of a directory of files with one schema, of a Delta or an Iceberg table; a
            list of paths of files or directories; or a ``deltalake.DeltaTable``, of the version that it is at, or a
            ``pyiceberg.table.Table``.

    Raises:
        DataError: There are no files or no rows, or files differ from each other or contradict their table.
        StoreError: The files cannot be reached.
    """
    if isinstance(given, str | os.PathLike):
        store = Store.create(given)
        return ParquetSource(dataset_of(store, store.url), store)
    files = files_of_paths(given) if isinstance(given, list | tuple) else files_of_table(given)
    store = Store.create(files.url)
    return ParquetSource(dataset_in(store, files), store)
