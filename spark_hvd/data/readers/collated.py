"""Batches that a function makes of rows of any types: a tokenizer of text, a decoder of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from spark_hvd.data.readers.arrow import ahead
from spark_hvd.data.readers.dataset import listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import TableForm, TablesForm
from spark_hvd.data.readers.reader import Batch


class CollatedForm(TablesForm[Batch]):
    """Rows stay in Arrow until ``collate`` makes tensors of a batch; threads do so ahead of who takes the batches.

    Args:
        collate: Gets a ``pyarrow.RecordBatch``, and returns the batch. Called by several threads.
        workers: Threads; so many batches are made ahead.
    """

    def __init__(self, collate: Callable[[pa.RecordBatch], Batch], workers: int) -> None:
        super().__init__()
        self._collate, self._workers = collate, workers

    def cut(self, parts: Iterator[pa.Table], sizes: Sequence[int]) -> Iterator[Batch]:
        """See base class."""
        pool = ThreadPoolExecutor(self._workers, "spark_hvd-collate")
        try:
            batches = TableForm().cut(parts, sizes)
            yield from ahead(lambda batch: pool.submit(self._made, batch).result, batches, self._workers)
        finally:
            pool.shutdown(cancel_futures=True)

    def _made(self, rows: pa.RecordBatch) -> Batch:
        try:
            return self._collate(rows)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"no tensors can be made of {len(rows)} rows of {listed(rows.schema.names)}: "
                f"{type(error).__name__}: {error}"
            ) from error
