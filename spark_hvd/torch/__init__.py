"""The API for PyTorch: ``import spark_hvd.torch as hvd``.

May import every other room of spark_hvd. Doors: itself, elastic.
"""

from __future__ import annotations

from spark_hvd import checkpoint
from spark_hvd.collectives.compression import Compression, Compressor
from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.context import api, basics
from spark_hvd.context.api import *  # noqa: F403 - all of them, by their __all__
from spark_hvd.context.basics import *  # noqa: F403
from spark_hvd.context.progress import Progress
from spark_hvd.data.registry import get_dataset_shard
from spark_hvd.torch import elastic, move, reduce
from spark_hvd.torch.embedding.look_up import LookUp, look_up, look_up_async
from spark_hvd.torch.embedding.rowwise import RowWiseAdagrad
from spark_hvd.torch.embedding.table import ShardedEmbedding
from spark_hvd.torch.embedding.whole import load_whole_state_dict, whole_state_dict
from spark_hvd.torch.handles import poll, synchronize
from spark_hvd.torch.move import *  # noqa: F403
from spark_hvd.torch.optimizer.distributed import DistributedOptimizer
from spark_hvd.torch.outer.compressors import Int4Compressor, Int8Compressor, TopKCompressor
from spark_hvd.torch.outer.local_sgd import DiLoCo, LocalSGD, OuterOptimizer
from spark_hvd.torch.preparation import prepare
from spark_hvd.torch.reduce import *  # noqa: F403
from spark_hvd.torch.reduce import sparse_allreduce_async
from spark_hvd.torch.sync import broadcast_optimizer_state, broadcast_parameters
from spark_hvd.torch.sync_batch_norm import SyncBatchNorm
from spark_hvd.world.config import Config
from spark_hvd.world.errors import (
    CollectiveError,
    DuplicateNameError,
    MismatchError,
    NotInitializedError,
    PlanMismatchError,
    StalledError,
)

HorovodInternalError = CollectiveError
"""Horovod's name for CollectiveError."""

__all__ = [
    "CollectiveError",
    "Compression",
    "Compressor",
    "Config",
    "DiLoCo",
    "DistributedOptimizer",
    "DuplicateNameError",
    "HorovodInternalError",
    "Int4Compressor",
    "Int8Compressor",
    "LocalSGD",
    "LookUp",
    "MismatchError",
    "NamedHandle",
    "NotInitializedError",
    "OuterOptimizer",
    "PlanMismatchError",
    "Progress",
    "RowWiseAdagrad",
    "ShardedEmbedding",
    "StalledError",
    "SyncBatchNorm",
    "TopKCompressor",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "checkpoint",
    "elastic",
    "get_dataset_shard",
    "load_whole_state_dict",
    "look_up",
    "look_up_async",
    "poll",
    "prepare",
    "sparse_allreduce_async",
    "synchronize",
    "whole_state_dict",
]
__all__ += api.__all__
__all__ += basics.__all__
__all__ += reduce.__all__
__all__ += move.__all__
