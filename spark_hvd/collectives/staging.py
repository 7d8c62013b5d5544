"""Memory that all ranks of a process set can see, where they are on one host: large all-reduces go through it.

Every rank copies its elements into a buffer of its own, sums its share of all ranks' buffers, and copies the result
out: three passes over memory instead of two ways through the loopback interface. Barriers of the queue's communicator
stand between the passes, so a rank that is gone is noticed as ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from spark_hvd.collectives.fusion import Batch
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.transport.exchange import exchange
from spark_hvd.transport.host.shared_memory import SharedArena, sum_share

CAPACITY = 8 << 20
"""Bytes of each rank's buffer; larger all-reduces take several rounds."""
LEAST = 3 << 19
"""Bytes from which two barriers cost less than Gloo's way of moving that much."""

_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}


class Staging:
    """The buffers of all ranks of a process set.

    Args:
        buffers: In rank order, of bytes.
        place: Mine in the process set.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], place: int) -> None:
        self._buffers = buffers
        self._place = place

    @classmethod
    def open(cls, group: dist.ProcessGroup, hosts: Sequence[str], wanted: bool) -> Staging | None:
        """Make and map buffers; collective over `group`.

        Args:
            group: A process group of the members that nobody else uses.
            hosts: Of each member, as all of them know.
            wanted: Whether this rank agrees.

        Returns:
            None, on every rank, if the members are on several hosts, one does not agree, or one cannot map another's.
        """
        if len(set(hosts)) > 1 or not hasattr(os, "memfd_create") or "cpu" not in str(dist.get_backend_config(group)):
            return None
        cpu = torch.device("cpu")
        if not all(exchange(wanted, group, cpu)):
            return None
        arena = SharedArena([(CAPACITY, torch.uint8)])
        place = dist.get_rank(group)
        gathered = arena.map_all(place, lambda fact: exchange(fact, group, cpu))
        return None if gathered is None else cls(gathered[0], place)

    def serves(self, batch: Batch) -> bool:
        """Whether a batch goes through here: the same answer on every rank."""
        request = batch[0].request
        return (
            request.kind == "allreduce"
            and request.op in (ReduceOp.SUM.name, ReduceOp.AVERAGE.name)
            and request.device == "cpu"
            and batch[0].absent is None
            and {getattr(torch, dtype) for dtype in request.dtypes} <= _DTYPES
            and len(set(request.dtypes)) == 1
            and batch.nbytes >= LEAST
        )

    def room(self, dtype: torch.dtype) -> int:
        """Elements that a buffer holds."""
        return CAPACITY // dtype.itemsize

    def mine(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The beginning of my buffer, flat."""
        return _view(self._buffers[self._place], dtype, numel)

    def sum_share(self, dtype: torch.dtype, numel: int, finish: Callable[[torch.Tensor], None]) -> None:
        """Sum my share of all ranks' buffers, into all of them; every rank must have filled its own.

        Args:
            dtype: Of the elements.
            numel: Their number.
            finish: Makes the result of a sum, in place and element by element.
        """
        sum_share([_view(buffer, dtype, numel) for buffer in self._buffers], self._place, finish)


def _view(buffer: torch.Tensor, dtype: torch.dtype, numel: int) -> torch.Tensor:
    return buffer[: numel * dtype.itemsize].view(dtype)
