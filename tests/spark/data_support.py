"""What a test's rank has of a data set."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pyarrow as pa

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def table_of(name: str, seed: tuple[int, int] | None = None) -> Any:
    """Return all rows of this rank, in an epoch's order."""
    from spark_hvd.data.bucketing import order_of
    from spark_hvd.data.registry import source_of

    source = source_of(name)
    rows = source.open()
    pieces = [
        (bucket, 0, 0, int(rows.counts[bucket])) for bucket in order_of(seed).tolist() if bucket in source.buckets
    ]
    return pa.concat_tables([rows.schema.empty_table(), *rows.tables(pieces, seed)])
