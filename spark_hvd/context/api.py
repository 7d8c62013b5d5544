"""What the API of every framework has besides :mod:`basics`: the world, process sets, objects, reductions."""

from spark_hvd.collectives.objects import allgather_object, broadcast_object
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.context.global_state import is_initialized
from spark_hvd.context.init import init, start_timeline, stop_timeline
from spark_hvd.context.leave import shutdown
from spark_hvd.context.progress import progress
from spark_hvd.context.register import add_process_set, remove_process_set
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
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather_object",
    "broadcast_object",
    "global_process_set",
    "init",
    "is_initialized",
    "progress",
    "remove_process_set",
    "shutdown",
    "start_timeline",
    "stop_timeline",
]
