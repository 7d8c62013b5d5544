"""The face for Keras 3: ``import spark_hvd.keras as hvd``.

May import every other room of spark_hvd. Doors: itself, callbacks, elastic.
"""

from __future__ import annotations

from spark_hvd.collectives.compression import Compression
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
from spark_hvd.keras.backend import broadcast_variables, require_backend
from spark_hvd.transport.communicator import ReduceOp

require_backend()  # before anything of ours asks Keras for more

from spark_hvd.keras import callbacks, elastic  # noqa: E402
from spark_hvd.keras.batch_norm import SyncBatchNormalization  # noqa: E402
from spark_hvd.keras.loading import load_model  # noqa: E402
from spark_hvd.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer  # noqa: E402
from spark_hvd.keras.values import allgather, allreduce, broadcast, reducescatter  # noqa: E402

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
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
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "progress",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
