"""The face for PyTorch: ``import spark_hvd.torch as hvd``."""

from __future__ import annotations

from spark_hvd.basics import cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size
from spark_hvd.communicator import ReduceOp
from spark_hvd.compression import Compression, Compressor
from spark_hvd.context import init, is_initialized, shutdown
from spark_hvd.errors import CollectiveError, MismatchError, NotInitializedError, PlanMismatchError
from spark_hvd.movement import allgather, alltoall, barrier, broadcast, broadcast_, grouped_allgather
from spark_hvd.objects import allgather_object, broadcast_object
from spark_hvd.ops import (
    allreduce,
    allreduce_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    reducescatter,
)
from spark_hvd.optimizer import DistributedOptimizer
from spark_hvd.sync import broadcast_optimizer_state, broadcast_parameters

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

HorovodInternalError = CollectiveError
"""Horovod's name for it."""

__all__ = [
    "Average",
    "CollectiveError",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PlanMismatchError",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
]
