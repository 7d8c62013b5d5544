"""The store: where data, checkpoints and logs of a fit lie. One class over fsspec, for every kind of file system.

May import scratch. Doors: Store, row_groups.
"""

from spark_hvd.store.errors import CheckpointError, StoreError
from spark_hvd.store.files import Store

__all__ = ["CheckpointError", "Store", "StoreError"]
