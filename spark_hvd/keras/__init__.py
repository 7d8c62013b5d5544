"""The API for Keras 3: ``import spark_hvd.keras as hvd``.

May import every other room of spark_hvd. Doors: itself, callbacks, elastic.
"""

from __future__ import annotations

from spark_hvd.collectives.compression import Compression
from spark_hvd.context import api, basics
from spark_hvd.context.api import *  # noqa: F403 - all of them, by their __all__
from spark_hvd.context.basics import *  # noqa: F403
from spark_hvd.keras.backend import broadcast_variables, require_backend

require_backend()  # before any of our modules asks Keras for more

from spark_hvd.keras import callbacks, elastic  # noqa: E402
from spark_hvd.keras.batch_norm import SyncBatchNormalization  # noqa: E402
from spark_hvd.keras.optimizer import (  # noqa: E402
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)
from spark_hvd.keras.values import allgather, allreduce, broadcast, reducescatter  # noqa: E402

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += api.__all__
__all__ += basics.__all__
