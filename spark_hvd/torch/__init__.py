"""The face for PyTorch: ``import spark_hvd.torch as hvd``.

May import every other room of spark_hvd. Doors: itself, elastic.
"""

from __future__ import annotations

from spark_hvd import checkpoint
from spark_hvd.collectives.compression import Compression, Compressor
from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.objects import allgather_object, broadcast_object
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.context.init import init, start_timeline, stop_timeline
from spark_hvd.context.leave import shutdown
from spark_hvd.context.progress import Progress, progress
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
from spark_hvd.data.handed import get_dataset_shard
from spark_hvd.torch import elastic
from spark_hvd.torch.embedding.look_up import LookUp, look_up, look_up_async
from spark_hvd.torch.embedding.rowwise import RowWiseAdagrad
from spark_hvd.torch.embedding.table import ShardedEmbedding
from spark_hvd.torch.embedding.whole import load_whole_state_dict, whole_state_dict
from spark_hvd.torch.handles import poll, synchronize
from spark_hvd.torch.move import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    join,
)
from spark_hvd.torch.optimizer.distributed import DistributedOptimizer
from spark_hvd.torch.outer.compressors import Int8Compressor, TopKCompressor
from spark_hvd.torch.outer.local_sgd import DiLoCo, LocalSGD, OuterOptimizer
from spark_hvd.torch.preparation import prepare
from spark_hvd.torch.reduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from spark_hvd.torch.sparse import sparse_allreduce_async
from spark_hvd.torch.sync import broadcast_optimizer_state, broadcast_parameters
from spark_hvd.torch.sync_batch_norm import SyncBatchNorm
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.world.config import Config
from spark_hvd.world.errors import (
    CollectiveError,
    DuplicateNameError,
    MismatchError,
    NotInitializedError,
    PlanMismatchError,
    StalledError,
)

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM

HorovodInternalError = CollectiveError
"""Horovod's name for it."""

__all__ = [
    "Adasum",
    "Average",
    "CollectiveError",
    "Compression",
    "Compressor",
    "Config",
    "DiLoCo",
    "DistributedOptimizer",
    "DuplicateNameError",
    "HorovodInternalError",
    "Int8Compressor",
    "LocalSGD",
    "LookUp",
    "Max",
    "Min",
    "MismatchError",
    "NamedHandle",
    "NotInitializedError",
    "OuterOptimizer",
    "PlanMismatchError",
    "ProcessSet",
    "Product",
    "Progress",
    "RowWiseAdagrad",
    "ShardedEmbedding",
    "StalledError",
    "Sum",
    "SyncBatchNorm",
    "TopKCompressor",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "checkpoint",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "generation",
    "get_dataset_shard",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_whole_state_dict",
    "local_rank",
    "local_size",
    "look_up",
    "look_up_async",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "prepare",
    "progress",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "whole_state_dict",
]
