"""The communicator of a world of one: it sends nothing, and its results follow the general rules for size 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spark_hvd.transport.communicator import Communicator, Handle, ReduceOp
from spark_hvd.transport.dtypes import check_op
from spark_hvd.transport.handles import FinishedHandle
from spark_hvd.transport.shapes import require_dense, require_root, require_rows


class LocalCommunicator(Communicator):
    """A communicator of one rank: every collective has ended as soon as it is called."""

    rank, size, fact_device = 0, 1, torch.device("cpu")

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> Handle[torch.Tensor]:
        require_dense(tensor)
        check_op(tensor.dtype, op)
        return FinishedHandle(tensor)

    def allgather(self, tensor: torch.Tensor, rows: Sequence[int]) -> Handle[torch.Tensor]:
        require_dense(tensor)
        return FinishedHandle(_copy(tensor.reshape(1) if tensor.dim() == 0 else tensor))

    def broadcast(self, tensor: torch.Tensor, root_rank: int) -> Handle[torch.Tensor]:
        require_dense(tensor)
        require_root(root_rank, 1)
        return FinishedHandle(tensor)

    def reducescatter(self, tensor: torch.Tensor, op: ReduceOp) -> Handle[torch.Tensor]:
        require_dense(tensor)
        require_rows(tensor)
        check_op(tensor.dtype, op)
        return FinishedHandle(_copy(tensor))

    def alltoall(self, tensor: torch.Tensor, splits: Sequence[int], received: Sequence[int]) -> Handle[torch.Tensor]:
        require_dense(tensor)
        return FinishedHandle(_copy(tensor))

    def barrier(self) -> Handle[None]:
        return FinishedHandle(None)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
