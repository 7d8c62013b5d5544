"""The face for TensorFlow: ``import spark_hvd.tensorflow as hvd``.

May import every other room of spark_hvd but keras. Doors: itself, elastic, keras.
"""

from __future__ import annotations

import importlib
from typing import Any

from spark_hvd.collectives.objects import allgather_object, broadcast_object
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.context.init import init, start_timeline, stop_timeline
from spark_hvd.context.leave import shutdown
from spark_hvd.context.progress import progress
from spark_hvd.context.register import add_process_set, remove_process_set
from spark_hvd.context.standing import is_initialized
from spark_hvd.context.who import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    generation,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    size,
)
from spark_hvd.tensorflow import elastic
from spark_hvd.tensorflow.collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from spark_hvd.tensorflow.compression import TensorFlowCompression as Compression
from spark_hvd.tensorflow.optimizer import DistributedOptimizer
from spark_hvd.tensorflow.standing import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
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
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.world.errors import CollectiveError

prepare_threads()

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM

HorovodInternalError = CollectiveError
"""Horovod's name for it."""


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":  # of the face above this one, which imports Keras
        return importlib.import_module("spark_hvd.keras").SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "CollectiveError",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "generation",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "progress",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
