"""Placeholder by the lead until the real face lands: overwrite me."""
from spark_hvd.communicator import ReduceOp
from spark_hvd.context import current, init, is_initialized, shutdown
Sum, Average = ReduceOp.SUM, ReduceOp.AVERAGE
def __getattr__(n):
    if n in ("rank","size","local_rank","local_size","cross_rank","cross_size"):
        return lambda: getattr(current().world.me,n)
    raise AttributeError(n)
def allreduce(t,op=Average):
    return current().communicator.allreduce(t.clone(),op).wait()
