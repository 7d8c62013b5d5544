"""The API for TensorFlow: ``import spark_hvd.tensorflow as hvd``.

May import every other room of spark_hvd but jax and keras. Doors: itself, elastic, keras.
"""

from __future__ import annotations

import importlib
from typing import Any

from spark_hvd.context import api, basics
from spark_hvd.context.api import *  # noqa: F403 - all of them, by their __all__
from spark_hvd.context.basics import *  # noqa: F403
from spark_hvd.tensorflow import collectives, elastic
from spark_hvd.tensorflow.collectives import *  # noqa: F403
from spark_hvd.tensorflow.compression import TensorFlowCompression as Compression
from spark_hvd.tensorflow.optimizer import DistributedOptimizer
from spark_hvd.tensorflow.rank_ops import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
from spark_hvd.tensorflow.sync import (
    BroadcastGlobalVariablesHook,
    broadcast_,
    broadcast_global_variables,
    broadcast_object_fn,
    broadcast_variables,
)
from spark_hvd.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from spark_hvd.tensorflow.threads import prepare_threads
from spark_hvd.torch.move import barrier, join
from spark_hvd.world.errors import CollectiveError

prepare_threads()

HorovodInternalError = CollectiveError
"""Horovod's name for CollectiveError."""


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":  # it belongs to spark_hvd.keras, which imports Keras
        return importlib.import_module("spark_hvd.keras").SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BroadcastGlobalVariablesHook",
    "CollectiveError",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",  # noqa: F405 - see __getattr__
    "barrier",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]
__all__ += api.__all__
__all__ += basics.__all__
__all__ += collectives.__all__
