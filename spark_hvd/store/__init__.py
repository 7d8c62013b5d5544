"""The store for data, checkpoints and logs of a fit. One class, based on fsspec, serves every kind of file system.

May import scratch. Doors: Store, row_groups, stream_log.
"""

from spark_hvd.store.errors import CheckpointError, StoreError
from spark_hvd.store.files import Store

__all__ = ["CheckpointError", "Store", "StoreError"]
