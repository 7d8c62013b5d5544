"""Rows kept in memory: what no Arrow batch can hold is an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import TableForm, single


def test_a_column_that_needs_two_chunks_is_an_error() -> None:
    # What pyarrow returns for more than 2 GiB, in small: two chunks, whatever is combined.
    batch = pa.record_batch({"text": ["a", "b"]})
    content = pa.chunked_array([["a", "b"], ["c", "d"]])
    table: Any = SimpleNamespace(num_rows=4, column_names=["text"], column=lambda name: content)
    table.to_batches, table.combine_chunks = lambda: [batch, batch], lambda: table
    with pytest.raises(DataError, match=r"column 'text' has 0 MiB in a batch of 4 rows.*smaller batch size"):
        single(table)


@pytest.mark.night
def test_a_batch_of_more_than_two_gibibytes_is_an_error() -> None:
    value = pa.array([b"x" * (1 << 20)])
    table = pa.table({"number": range(2100), "content": pa.chunked_array([value] * 2100)})
    with pytest.raises(DataError, match=r"column 'content' has 2,100 MiB in a batch of 2,100 rows"):
        next(TableForm().cut(iter([table]), [2100]))
