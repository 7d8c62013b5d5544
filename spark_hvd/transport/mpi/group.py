"""A process group of torch.distributed over MPI, through mpi4py: DDP, FSDP2 and the rest run on it as on Gloo.

torch's own "mpi" backend exists only in builds of torch that were compiled against one MPI.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.transport.dtypes import check_op, copy_unless_shared, divide, to_dense
from spark_hvd.transport.mpi import memory
from spark_hvd.transport.mpi.endpoint import MpiEndpoint
from spark_hvd.transport.mpi.library import MPI
from spark_hvd.transport.mpi.progress import Operation
from spark_hvd.transport.mpi.wire import Buffer, elements, in_blocks, in_bytes, in_parts, ready, to_mpi
from spark_hvd.transport.mpi.work import MpiWork
from spark_hvd.transport.shapes import require_dense

_OPS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.AVERAGE,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "PRODUCT": ReduceOp.PRODUCT,
}
_BITWISE = {"BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}

Part = tuple[Operation, Callable[[], None]]
"""An operation in flight, and what remains to be done when it has ended."""


if TYPE_CHECKING:
    # torch's stubs have further overloads, which nobody calls on a subclass.
    class _ProcessGroup:
        def __init__(self, rank: int, size: int) -> None: ...
else:
    _ProcessGroup = dist.ProcessGroup


class MpiProcessGroup(_ProcessGroup):
    """See torch.distributed.ProcessGroup. Ranks in its methods are numbers in the group."""

    def __init__(self, name: str, endpoint: MpiEndpoint) -> None:
        super().__init__(endpoint.rank, endpoint.size)
        self.endpoint = endpoint
        self._name = name
        self._mpi = endpoint.communicator

    def getBackendName(self) -> str:  # noqa: N802 # torch's name
        """Return the name of this backend."""
        return "mpi4py"

    def getGroupName(self) -> str:  # noqa: N802 # torch's name
        """Return torch.distributed's name of the group; torch itself would ask an inner backend."""
        return self._name

    @property
    def group_name(self) -> str:
        """The same as :meth:`getGroupName`."""
        return self._name

    # ---- reductions -----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Reduce in place over all ranks."""
        if len(tensors) == 1 and _is_sum(opts) and (buffer := ready(tensors[0])) is not None:
            operation = self._start("all_reduce", self._mpi.Iallreduce, MPI.IN_PLACE, buffer, MPI.SUM, keep=tensors)
            return MpiWork([operation], self.endpoint.timeout, tensors)
        return self._work(tensors, [self._allreduce(tensor, opts) for tensor in tensors])

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Reduce several tensors; see :meth:`allreduce`."""
        return self.allreduce(tensors, opts)

    def _allreduce(self, tensor: torch.Tensor, opts: Any) -> Part:
        wire, op, back = self._to_wire(tensor, opts)
        operation = self._start("all_reduce", self._mpi.Iallreduce, MPI.IN_PLACE, elements(wire), op, keep=wire)
        return operation, lambda: back(wire, tensor)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> MpiWork:
        """Reduce over all ranks, in place on the root only."""
        (tensor,), root = tensors, opts.rootRank
        wire, op, back = self._to_wire(tensor, opts)
        if self.endpoint.rank != root:
            operation = self._start("reduce", self._mpi.Ireduce, elements(wire), None, op, root, keep=wire)
            return self._work(tensors, [(operation, _nothing)])
        operation = self._start("reduce", self._mpi.Ireduce, MPI.IN_PLACE, elements(wire), op, root, keep=wire)
        return self._work(tensors, [(operation, lambda: back(wire, tensor))])

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> MpiWork:
        """Reduce a list of tensors, one for each rank, and keep this rank's."""
        parts = []
        for output, shares in zip(outputs, inputs, strict=True):
            parts.append(self._reduce_scatter(output, _joined(shares), [share.numel() for share in shares], opts))
        return self._work(outputs, parts)

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> MpiWork:
        """Reduce a tensor and keep this rank's share; all shares have the same size."""
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], wholes: list[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        """Reduce several tensors; see :meth:`reduce_scatter_single`."""
        parts = []
        for output, whole in zip(outputs, wholes, strict=True):
            parts.append(self._reduce_scatter(output, whole, [output.numel()] * self.endpoint.size, opts))
        return self._work(outputs, parts)

    # torch before 2.13 has other names for the last two.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor, counts: list[int], opts: Any) -> Part:
        wire, op, back = self._to_wire(whole, opts)
        share = wire.new_empty(output.shape)
        call = self._mpi.Ireduce_scatter
        operation = self._start("reduce_scatter", call, elements(wire), elements(share), counts, op, keep=(wire, share))
        return operation, lambda: back(share, output)

    def _to_wire(
        self, tensor: torch.Tensor, opts: Any
    ) -> tuple[torch.Tensor, MPI.Op, Callable[[torch.Tensor, torch.Tensor], None]]:
        """Return the tensor for MPI to reduce, the operation, and a function that copies the result back."""
        require_dense(tensor)
        wanted = "SUM" if opts is None else opts.reduceOp.op.name
        _, dense = to_dense(tensor)
        dense = memory.within_reach(dense)
        if wanted in _BITWISE:
            return dense, _BITWISE[wanted], lambda result, target: copy_unless_shared(target.detach(), result)
        if wanted not in _OPS:
            raise ValueError(f"the mpi4py backend does not support {wanted}; use SUM, AVG, MIN, MAX or PRODUCT.")
        op = _OPS[wanted]
        check_op(tensor.dtype, op)
        wire, mpi_op, restore = to_mpi(dense, op)

        def back(result: torch.Tensor, target: torch.Tensor) -> None:
            if op is ReduceOp.AVERAGE:
                divide(result, self.endpoint.size, tensor.dtype)
            copy_unless_shared(target.detach(), restore(result).view(target.shape))

        return wire, mpi_op, back

    # ---- moves ----------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> MpiWork:
        """Overwrite tensors with those of the root."""
        return self._work(tensors, [self._broadcast(tensor, opts.rootRank) for tensor in tensors])

    def _broadcast(self, tensor: torch.Tensor, root: int) -> Part:
        wire = self._outward(tensor)
        operation = self._start("broadcast", self._mpi.Ibcast, in_bytes(wire), root, keep=wire)
        return operation, lambda: copy_unless_shared(tensor.detach(), wire)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Fill a list of tensors with those of all ranks."""
        parts = []
        for shares, mine in zip(outputs, inputs, strict=True):
            wire, counts = self._outward(mine), [share.numel() for share in shares]
            room = _adjacent(shares)
            if room is None:
                room = memory.room(wire, (sum(counts),))
            operation = self._start(
                "all_gather", self._mpi.Iallgatherv, in_bytes(wire), in_parts(room, counts), keep=(wire, room)
            )
            parts.append((operation, functools.partial(_distribute, room, shares)))
        return self._work([share for shares in outputs for share in shares], parts)

    def all_gather_single(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> MpiWork:
        """Fill a tensor with those of all ranks, which have the same size."""
        return self.all_gather_single_coalesced([output], [mine], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        """Gather several tensors; see :meth:`all_gather_single`."""
        parts = []
        for output, mine in zip(outputs, inputs, strict=True):
            wire, room = self._outward(mine), self._inward(output)
            operation = self._start(
                "all_gather",
                self._mpi.Iallgather,
                in_bytes(wire),
                in_blocks(room, self.endpoint.size),
                keep=(wire, room),
            )
            parts.append((operation, functools.partial(copy_unless_shared, output.detach(), room)))
        return self._work(outputs, parts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> MpiWork:
        """Fill the root's list of tensors with those of all ranks."""
        (mine,), root = inputs, opts.rootRank
        wire = self._outward(mine)
        if self.endpoint.rank != root:
            operation = self._start("gather", self._mpi.Igatherv, in_bytes(wire), None, root, keep=wire)
            return self._work([], [(operation, _nothing)])
        (shares,) = outputs
        counts = [share.numel() for share in shares]
        room = memory.room(wire, (sum(counts),))
        operation = self._start(
            "gather", self._mpi.Igatherv, in_bytes(wire), in_parts(room, counts), root, keep=(wire, room)
        )
        return self._work(shares, [(operation, lambda: _distribute(room, shares))])

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> MpiWork:
        """Fill a tensor on each rank from the root's list of tensors."""
        (output,), root = outputs, opts.rootRank
        room = self._inward(output)
        parts: Buffer | None = None
        wire = None
        if self.endpoint.rank == root:
            (shares,) = inputs
            wire = memory.within_reach(_joined(shares))
            parts = in_parts(wire, [share.numel() for share in shares])
        operation = self._start("scatter", self._mpi.Iscatterv, parts, in_bytes(room), root, keep=(wire, room))
        return self._work(outputs, [(operation, lambda: copy_unless_shared(output.detach(), room))])

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Send each rank one tensor of a list, and fill another list with what the ranks send."""
        wire = memory.within_reach(_joined(inputs))
        counts = [output.numel() for output in outputs]
        room = memory.room(wire, (sum(counts),))
        operation = self._start(
            "all_to_all",
            self._mpi.Ialltoallv,
            in_parts(wire, [each.numel() for each in inputs]),
            in_parts(room, counts),
            keep=(wire, room),
        )
        return self._work(outputs, [(operation, lambda: _distribute(room, outputs))])

    def all_to_all_single(
        self, output: torch.Tensor, whole: torch.Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> MpiWork:
        """Send each rank some rows of a tensor, equally many if `sent` is empty, and fill another tensor likewise."""
        wire, room = self._outward(whole), self._inward(output)
        operation = self._start(
            "all_to_all",
            self._mpi.Ialltoallv,
            in_parts(wire, sent or self._evenly(whole)),
            in_parts(room, received or self._evenly(output)),
            keep=(wire, room),
        )
        return self._work([output], [(operation, lambda: copy_unless_shared(output.detach(), room))])

    alltoall_base = all_to_all_single

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> MpiWork:
        """Send to one rank."""
        wire = self._outward(tensors[0])
        operation = self._start("send", self._mpi.Isend, in_bytes(wire), rank, tag, keep=wire)
        return self._work(tensors, [(operation, _nothing)])

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> MpiWork:
        """Receive from one rank."""
        room = self._inward(tensors[0])
        operation = self._start("recv", self._mpi.Irecv, in_bytes(room), rank, tag, keep=room)
        return self._work(tensors, [(operation, lambda: copy_unless_shared(tensors[0].detach(), room))])

    def barrier(self, opts: Any = None) -> MpiWork:
        """Complete when every rank has called it."""
        return self._work([], [(self._start("barrier", self._mpi.Ibarrier), _nothing)])

    # ---- its end --------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Give up operations in flight on this rank."""
        self.endpoint.abort()

    def shutdown(self) -> None:
        """Let operations in flight end, give up the rest, and free MPI's resources for the group."""
        self.endpoint.close()

    # ---- helpers --------------------------------------------------------------------------------------------------

    def _start(self, name: str, call: Callable[..., MPI.Request], *arguments: Any, keep: Any = None) -> Operation:
        return self.endpoint.start(name, call, *arguments, keep=keep)

    def _work(self, outputs: list[torch.Tensor], parts: Sequence[Part]) -> MpiWork:
        def finish() -> None:
            for _, complete in parts:
                complete()

        return MpiWork([operation for operation, _ in parts], self.endpoint.timeout, outputs, finish)

    def _outward(self, tensor: torch.Tensor) -> torch.Tensor:
        require_dense(tensor)
        return memory.within_reach(to_dense(tensor)[1])

    def _inward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself if MPI can write to it, else memory from which it is filled later."""
        require_dense(tensor)
        if tensor.is_contiguous() and memory.reaches(tensor):
            return memory.within_reach(tensor.detach())
        return memory.room(tensor, tensor.shape)

    def _evenly(self, tensor: torch.Tensor) -> list[int]:
        size = self.endpoint.size
        if tensor.shape[0] % size:
            raise ValueError(f"{tensor.shape[0]} rows cannot be divided evenly among {size} ranks; pass splits.")
        return [tensor.shape[0] // size] * size


def _is_sum(opts: Any) -> bool:
    return opts is None or bool(opts.reduceOp == dist.ReduceOp.SUM)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    for tensor in tensors:
        require_dense(tensor)
    return torch.cat([to_dense(tensor)[1].reshape(-1) for tensor in tensors])


def _distribute(flat: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    for target, part in zip(targets, torch.split(flat, [each.numel() for each in targets]), strict=True):
        copy_unless_shared(target.detach(), part.view(target.shape))


def _adjacent(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return adjacent tensors as one tensor, if MPI can write to that memory; else None."""
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    end = filled[0].data_ptr() if filled else 0
    for tensor in filled:
        if tensor.data_ptr() != end or not tensor.is_contiguous() or not memory.reaches(tensor):
            return None
        end += tensor.nbytes
    if not filled or end > filled[0].untyped_storage().data_ptr() + filled[0].untyped_storage().nbytes():
        return None  # adjacent by chance
    return memory.within_reach(filled[0].as_strided((sum(tensor.numel() for tensor in filled),), (1,)))


def _nothing() -> None:
    pass
