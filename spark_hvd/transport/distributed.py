"""The communicator over torch.distributed: Gloo, NCCL for tensors on a GPU, or MPI."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from spark_hvd.transport.communicator import Communicator, Handle, ReduceOp
from spark_hvd.transport.dtypes import as_bytes, check_op, copy_unless_shared, divide, to_dense, to_wire
from spark_hvd.transport.handles import FinishedHandle, PendingHandle, failed
from spark_hvd.transport.shapes import even_rows, require_dense, require_root, require_rows

T = TypeVar("T")
_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}

# torch 2.13 renamed two functions and warns about the old names.
_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MPI_BACKEND = "mpi4py"
"""Our backend's name; torch has reserved "mpi" for one that its wheels do not have."""

PADDED_LIMIT = 1 << 20
"""Maximum bytes of a result for which uneven rows are padded: one collective, but the padding is sent too."""


class TorchCommunicator(Communicator):
    """Collectives over a process group of torch.distributed, which may have other users.

    The device of each tensor selects the group's backend.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Use a process group, or the default one if None; the communicator does not close it."""
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # A group that the user made for NCCL alone cannot carry the small facts over the CPU.
        config = dist.get_backend_config(group)
        on_cpu = "cpu:" in config
        self._over_mpi = f"cpu:{MPI_BACKEND}" in config
        self.fact_device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> Handle[torch.Tensor]:
        require_dense(tensor)
        check_op(tensor.dtype, op)
        mine, dense = to_dense(tensor)
        if op is ReduceOp.PRODUCT and mine.is_complex():
            return self._complex_product(tensor, mine, dense)
        wire, wire_op, restore = to_wire(dense, op)
        work = self._start("allreduce", lambda: dist.all_reduce(wire, _OPS[wire_op], self.group, async_op=True))

        def finish() -> torch.Tensor:
            if op is ReduceOp.AVERAGE:
                divide(wire, self.size, tensor.dtype)
            copy_unless_shared(mine, restore(wire))
            return tensor

        return self._pending(dense, "allreduce", [work], finish)

    def _complex_product(self, tensor: torch.Tensor, mine: torch.Tensor, dense: torch.Tensor) -> Handle[torch.Tensor]:
        # Neither Gloo nor NCCL can multiply complex numbers.
        gathered = dense.new_empty((self.size, *dense.shape))
        work = self._start(
            "allreduce", lambda: _gather_equal(as_bytes(gathered), as_bytes(dense), self.group, async_op=True)
        )

        def finish() -> torch.Tensor:
            mine.copy_(gathered.prod(0))
            return tensor

        return self._pending(dense, "allreduce", [work], finish)

    def allgather(self, tensor: torch.Tensor, rows: Sequence[int]) -> Handle[torch.Tensor]:
        require_dense(tensor)
        _, dense = to_dense(tensor)
        out = dense.new_empty((sum(rows), *dense.shape[1:]))
        if out.numel() == 0:
            return FinishedHandle(out)
        if len(set(rows)) == 1:
            work = self._start(
                "allgather", lambda: _gather_equal(as_bytes(out), as_bytes(dense), self.group, async_op=True)
            )
            return self._pending(dense, "allgather", [work], lambda: out)
        row_bytes = out.numel() // sum(rows) * out.element_size()
        if self._over_mpi:  # MPI itself moves uneven parts
            parts = list(torch.split(as_bytes(out), [count * row_bytes for count in rows]))
            work = self._start("allgather", lambda: dist.all_gather(parts, as_bytes(dense), self.group, async_op=True))
            return self._pending(dense, "allgather", [work], lambda: out)
        if max(rows) * self.size * row_bytes <= PADDED_LIMIT:
            return self._gather_padded(dense, out, rows)
        return self._gather_by_broadcast(dense, out, rows)

    def _gather_padded(self, dense: torch.Tensor, out: torch.Tensor, rows: Sequence[int]) -> Handle[torch.Tensor]:
        padded = dense.new_empty((max(rows), *out.shape[1:]))
        padded[: rows[self.rank]] = dense
        gathered = dense.new_empty((self.size, *padded.shape))
        work = self._start(
            "allgather", lambda: _gather_equal(as_bytes(gathered), as_bytes(padded), self.group, async_op=True)
        )

        def finish() -> torch.Tensor:
            for part, received, count in zip(torch.split(out, list(rows)), gathered, rows, strict=True):
                part.copy_(received[:count])
            return out

        return self._pending(dense, "allgather", [work], finish)

    def _gather_by_broadcast(self, dense: torch.Tensor, out: torch.Tensor, rows: Sequence[int]) -> Handle[torch.Tensor]:
        parts = torch.split(out, list(rows))
        parts[self.rank].copy_(dense)
        works = [self._broadcast_bytes("allgather", part, root) for root, part in enumerate(parts) if part.numel()]
        return self._pending(dense, "allgather", works, lambda: out)

    def broadcast(self, tensor: torch.Tensor, root_rank: int) -> Handle[torch.Tensor]:
        require_dense(tensor)
        require_root(root_rank, self.size)
        mine, dense = to_dense(tensor)
        work = self._broadcast_bytes("broadcast", dense, root_rank)

        def finish() -> torch.Tensor:
            if self.rank != root_rank:
                copy_unless_shared(mine, dense)
            return tensor

        return self._pending(tensor, "broadcast", [work], finish)

    def reducescatter(self, tensor: torch.Tensor, op: ReduceOp) -> Handle[torch.Tensor]:
        require_dense(tensor)
        require_rows(tensor)
        check_op(tensor.dtype, op)
        rows = even_rows(tensor.shape[0], self.size)
        if op is ReduceOp.PRODUCT and tensor.is_complex():
            whole = self.allreduce(tensor.detach().clone(), op).wait()
            return FinishedHandle(torch.split(whole, rows)[self.rank].clone())
        _, dense = to_dense(tensor)
        wire, wire_op, restore = to_wire(dense, op)
        over_gloo = tensor.device.type == "cpu" and not self._over_mpi
        if over_gloo:
            # Gloo's own reduce-scatter is an all-reduce too, and cannot tell when it is done.
            if wire.data_ptr() == tensor.data_ptr():
                wire = wire.clone()
            work = self._start("reducescatter", lambda: dist.all_reduce(wire, _OPS[wire_op], self.group, async_op=True))
            share = torch.split(wire, rows)[self.rank]
        else:
            if rows[0] != rows[-1]:
                wire = _padded(wire, rows)
            share = wire.new_empty((rows[0], *wire.shape[1:]))
            work = self._start(
                "reducescatter", lambda: _reduce_scatter_equal(share, wire, _OPS[wire_op], self.group, async_op=True)
            )

        def finish() -> torch.Tensor:
            mine = share[: rows[self.rank]]
            if op is ReduceOp.AVERAGE:
                divide(mine, self.size, tensor.dtype)
            result = restore(mine)
            return result.clone() if over_gloo else result  # a clone, so as not to keep all ranks' rows alive

        return self._pending(tensor, "reducescatter", [work], finish)

    def alltoall(self, tensor: torch.Tensor, splits: Sequence[int], received: Sequence[int]) -> Handle[torch.Tensor]:
        require_dense(tensor)
        _, dense = to_dense(tensor)
        out = dense.new_empty((sum(received), *dense.shape[1:]))
        row_bytes = math.prod(dense.shape[1:]) * dense.element_size()
        if row_bytes == 0:  # true on every rank, whereas the number of rows may be 0 on some ranks only
            return FinishedHandle(out)
        work = self._start(
            "alltoall",
            lambda: dist.all_to_all_single(
                as_bytes(out),
                as_bytes(dense),
                [count * row_bytes for count in received],
                [count * row_bytes for count in splits],
                self.group,
                async_op=True,
            ),
        )
        return self._pending(tensor, "alltoall", [work], lambda: out)

    def barrier(self) -> Handle[None]:
        # Not dist.barrier: if there are GPUs, it would start NCCL for a program that never uses it.
        token = torch.zeros(1, device=self.fact_device)
        work = self._start("barrier", lambda: dist.all_reduce(token, group=self.group, async_op=True))

        def finish() -> None:
            token.cpu()  # with NCCL, wait() only orders the stream, but a barrier must block the host

        return self._pending(token, "barrier", [work], finish)

    def _broadcast_bytes(self, name: str, dense: torch.Tensor, root_rank: int) -> dist.Work | None:
        root = dist.get_global_rank(self.group, root_rank) if self.group is not None else root_rank
        return self._start(name, lambda: dist.broadcast(as_bytes(dense), root, self.group, async_op=True))

    def _pending(
        self, tensor: torch.Tensor, name: str, works: Sequence[dist.Work | None], finish: Callable[[], T]
    ) -> PendingHandle[T]:
        return PendingHandle(name, works, finish, [] if tensor.is_cuda else [self.group or dist.group.WORLD])

    def _start(self, name: str, call: Callable[[], dist.Work | None]) -> dist.Work | None:
        try:
            return call()
        except RuntimeError as error:
            raise failed(name, error) from error


def _padded(wire: torch.Tensor, rows: list[int]) -> torch.Tensor:
    padded = wire.new_zeros((len(rows), rows[0], *wire.shape[1:]))
    for room, part, count in zip(padded, torch.split(wire, rows), rows, strict=True):
        room[:count] = part
    return padded.view(len(rows) * rows[0], *wire.shape[1:])
