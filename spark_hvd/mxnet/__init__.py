"""The face for MXNet 1.9, a library retired in 2023: ``import spark_hvd.mxnet as hvd``.

May import every other room of spark_hvd but the faces for keras and tensorflow. Doors: itself.
"""

from __future__ import annotations

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.objects import allgather_object, broadcast_object
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.context.init import init, start_timeline, stop_timeline
from spark_hvd.context.leave import shutdown
from spark_hvd.context.register import add_process_set, remove_process_set
from spark_hvd.context.standing import is_initialized
from spark_hvd.context.who import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
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
from spark_hvd.mxnet.collectives import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    reducescatter,
)
from spark_hvd.mxnet.optimizer import DistributedOptimizer
from spark_hvd.mxnet.sync import broadcast_parameters
from spark_hvd.mxnet.trainer import DistributedTrainer
from spark_hvd.transport.communicator import ReduceOp

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
    "DistributedTrainer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
