"""What tests of readers share: the readers, Parquet files, and their metadata from the footers."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_hvd.data.readers.dataset import Column, DatasetMeta, RowGroup
from spark_hvd.data.readers.reader import Batch, Reader, ReaderSpec
from spark_hvd.data.readers.sharding import Position, Sharding
from spark_hvd.estimators.training.rows import open_reader
from spark_hvd.store import Store


def columns_of(schema: pa.Schema) -> tuple[Column, ...]:
    """Scalars with their dtypes, lists with an unknown shape, binary as "object"."""
    columns = []
    for field in schema:
        kind, shape = field.type, ()
        while pa.types.is_nested(kind) and not pa.types.is_struct(kind):
            kind, shape = kind.value_type, None
        if pa.types.is_struct(kind):
            columns.append(Column(field.name, "float32", None, "vector", "sparse"))
        elif pa.types.is_binary(kind):
            columns.append(Column(field.name, "object", None, "binary"))
        elif pa.types.is_decimal(kind):
            columns.append(Column(field.name, "float64", shape))
        else:
            columns.append(Column(field.name, np.dtype(kind.to_pandas_dtype()).name, shape))
    return tuple(columns)


def write(
    store: Store, table: pa.Table, files: int = 1, group_rows: int = 10, columns: Sequence[Column] = ()
) -> DatasetMeta:
    """Write ``table`` into ``files`` files of about equal size, in row groups of ``group_rows``."""
    groups = []
    cuts = [table.num_rows * i // files for i in range(files + 1)]
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        url = store.join("data", f"part-{number:05d}.parquet")
        with store.writing(url) as file:
            pq.write_table(table.slice(start, stop - start), file, row_group_size=group_rows)
        with store.open(url) as file:
            footer = pq.ParquetFile(file).metadata
        groups += [RowGroup(url, i, footer.row_group(i).num_rows) for i in range(footer.num_row_groups)]
    return DatasetMeta(store.join("data"), tuple(columns) or columns_of(table.schema), tuple(groups))


def numbered(rows: int) -> pa.Table:
    """A table whose column "row" numbers its rows; "half" is its half as a float, "other" its negative."""
    row = np.arange(rows)
    return pa.table({"row": row, "half": (row / 2).astype(np.float32), "other": (-row).astype(np.float32)})


def local(folder: Path) -> Store:
    return Store.create(folder)


KINDS = [
    "arrow",
    *([pytest.param("petastorm", marks=pytest.mark.slow)] if importlib.util.find_spec("petastorm") else []),
]
every = pytest.mark.parametrize("kind", KINDS)
arrow = pytest.mark.parametrize("kind", ["arrow"])
"""For features that the other readers lack or implement differently."""


class Share:
    """A reader with one rank's share: its epochs."""

    def __init__(self, reader: Reader[Batch], sharding: Sharding, rank: int, size: int) -> None:
        self.reader, self.sharding = reader, sharding
        self._mine = Position(), rank, size

    def batches(self, epoch: int) -> Generator[Batch, None, None]:
        return self.reader.batches(epoch, self.sharding.share(*self._mine), self.sharding.batches(*self._mine))

    def close(self) -> None:
        self.reader.close()


def shared(
    reader: Reader[Batch],
    meta: DatasetMeta,
    batch_size: int,
    *,
    rank: int = 0,
    size: int = 1,
    drop_last: bool = False,
    shuffle: bool = False,
) -> Share:
    return Share(reader, meta.sharding(batch_size, drop_last, shuffle=shuffle), rank, size)


def opened(kind: str | None, meta: DatasetMeta, store: Store, batch_size: int = 7, **spec: Any) -> Share:
    """A reader of all columns, unless ``columns`` are passed, with the share of rank 0 of 1, unless another is."""
    columns = spec.pop("columns", tuple(column.name for column in meta.columns))
    share = {name: spec.pop(name) for name in ("rank", "size", "drop_last") if name in spec}
    reader = open_reader(ReaderSpec(dataset=meta, columns=columns, store=store, kind=kind, **spec))
    return shared(reader, meta, batch_size, shuffle=spec.get("shuffle", False), **share)


def read(reader: Share, epoch: int = 0) -> list[Batch]:
    return list(reader.batches(epoch))


def rows(batches: list[Batch], name: str = "row") -> list[Any]:
    return [value for batch in batches for value in batch[name].tolist()]


@contextlib.contextmanager
def no_thread_stays() -> Iterator[None]:
    """Check that threads which the block starts end within seconds."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
