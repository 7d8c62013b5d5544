"""The communicator over MPI, by mpi4py's non-blocking collectives on the tensors' own memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from spark_hvd.transport.communicator import Communicator, Handle, ReduceOp
from spark_hvd.transport.dtypes import check_op, copy_unless_shared, divide, to_dense
from spark_hvd.transport.mpi.endpoint import MpiEndpoint
from spark_hvd.transport.mpi.library import MPI
from spark_hvd.transport.mpi.memory import Memory
from spark_hvd.transport.mpi.progress import Operation
from spark_hvd.transport.mpi.wire import elements, in_blocks, in_bytes, in_parts, ready, to_mpi
from spark_hvd.transport.shapes import (
    describe,
    even_rows,
    exchange_splits,
    require_dense,
    require_root,
    require_rows,
    require_same,
    rows_of,
)

T = TypeVar("T")


class MpiHandle(Handle[T]):
    """A collective that MPI runs.

    Args:
        operation: What is under way.
        timeout: Seconds that :meth:`wait` has if it is not told otherwise.
        finish: Makes the result, once, when that has ended; None: it is `result`.
        result: The result.
    """

    __slots__ = ("_finish", "_operation", "_result", "_timeout")

    def __init__(
        self, operation: Operation, timeout: float, finish: Callable[[], T] | None, result: T | None = None
    ) -> None:
        self._operation = operation
        self._timeout = timeout
        self._finish = finish
        self._result: Any = result

    def wait(self, timeout: float | None = None) -> T:
        """See base class."""
        self._operation.wait(self._timeout if timeout is None else timeout)
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        result: T = self._result
        return result

    def done(self) -> bool:
        """See base class."""
        return self._operation.poll()

    def when_done(self, callback: Callable[[], None]) -> None:
        """See base class."""
        self._operation.when_done(callback)


class MpiCommunicator(Communicator):
    """Collectives over an endpoint of MPI.

    Args:
        endpoint: What it talks over; others may use it as well, and it is not closed with the communicator.
        memory: Copies what MPI cannot reach.
    """

    def __init__(self, endpoint: MpiEndpoint, memory: Memory | None = None) -> None:
        self._endpoint = endpoint
        self._memory = memory or Memory()
        self._direct = memory is None
        self._mpi = endpoint.communicator

    @property
    def rank(self) -> int:
        """See base class."""
        return self._endpoint.rank

    @property
    def size(self) -> int:
        """See base class."""
        return self._endpoint.size

    @property
    def fact_device(self) -> torch.device:
        """See base class."""
        return torch.device("cpu")

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> Handle[torch.Tensor]:
        """See base class."""
        if op is ReduceOp.SUM and self._direct and (buffer := ready(tensor)) is not None:
            operation = self._endpoint.start(
                "allreduce", self._mpi.Iallreduce, MPI.IN_PLACE, buffer, MPI.SUM, keep=tensor
            )
            return MpiHandle(operation, self._endpoint.timeout, None, tensor)
        require_dense(tensor)
        check_op(tensor.dtype, op)
        mine, dense = to_dense(tensor)
        wire, mpi_op, restore = to_mpi(self._memory.within_reach(dense), op)
        operation = self._endpoint.start(
            "allreduce", self._mpi.Iallreduce, MPI.IN_PLACE, elements(wire), mpi_op, keep=wire
        )

        def finish() -> torch.Tensor:
            if op is ReduceOp.AVERAGE:
                divide(wire, self.size)
            copy_unless_shared(mine, restore(wire))
            return tensor

        return self._handle(operation, finish)

    def allgather(self, tensor: torch.Tensor, rows: Sequence[int] | None = None) -> Handle[torch.Tensor]:
        """See base class."""
        require_dense(tensor)
        _, dense = to_dense(tensor)
        if rows is None:
            headers = self._gather_facts(describe(tensor))
            require_same("allgather", headers)
            rows = [rows_of(header) for header in headers]
        sent = self._memory.within_reach(dense)
        out = self._memory.room(dense, (sum(rows), *dense.shape[1:]))
        if len(set(rows)) == 1:
            operation = self._endpoint.start(
                "allgather", self._mpi.Iallgather, in_bytes(sent), in_blocks(out, self.size), keep=(sent, out)
            )
        else:
            operation = self._endpoint.start(
                "allgather", self._mpi.Iallgatherv, in_bytes(sent), in_parts(out, rows), keep=(sent, out)
            )
        return self._handle(operation, lambda: out.to(tensor.device))

    def broadcast(self, tensor: torch.Tensor, root_rank: int) -> Handle[torch.Tensor]:
        """See base class."""
        require_dense(tensor)
        require_root(root_rank, self.size)
        mine, dense = to_dense(tensor)
        wire = self._memory.within_reach(dense)
        operation = self._endpoint.start("broadcast", self._mpi.Ibcast, in_bytes(wire), root_rank, keep=wire)

        def finish() -> torch.Tensor:
            if self.rank != root_rank:
                copy_unless_shared(mine, wire)
            return tensor

        return self._handle(operation, finish)

    def reducescatter(self, tensor: torch.Tensor, op: ReduceOp) -> Handle[torch.Tensor]:
        """See base class."""
        require_dense(tensor)
        require_rows(tensor, "reducescatter")
        check_op(tensor.dtype, op)
        rows = even_rows(tensor.shape[0], self.size)
        _, dense = to_dense(tensor)
        wire, mpi_op, restore = to_mpi(self._memory.within_reach(dense), op)
        share = wire.new_empty((rows[self.rank], *wire.shape[1:]))
        row = wire[0].numel() if wire.shape[0] else 0
        operation = self._endpoint.start(
            "reducescatter",
            self._mpi.Ireduce_scatter,
            elements(wire),
            elements(share),
            [count * row for count in rows],
            mpi_op,
            keep=(wire, share),
        )

        def finish() -> torch.Tensor:
            if op is ReduceOp.AVERAGE:
                divide(share, self.size)
            return restore(share).to(tensor.device)

        return self._handle(operation, finish)

    def alltoall(
        self, tensor: torch.Tensor, splits: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Handle[tuple[torch.Tensor, list[int]]]:
        """See base class."""
        require_dense(tensor)
        sent, received = exchange_splits(tensor, splits, received, self.rank, self.size, self._gather_facts)
        _, dense = to_dense(tensor)
        wire = self._memory.within_reach(dense)
        out = self._memory.room(dense, (sum(received), *dense.shape[1:]))
        operation = self._endpoint.start(
            "alltoall", self._mpi.Ialltoallv, in_parts(wire, sent), in_parts(out, received), keep=(wire, out)
        )
        return self._handle(operation, lambda: (out.to(tensor.device), received))

    def barrier(self) -> Handle[None]:
        """See base class."""
        return self._handle(self._endpoint.start("barrier", self._mpi.Ibarrier), lambda: None)

    def close(self) -> None:
        """See base class."""

    def abort(self) -> None:
        """See base class."""
        self._endpoint.abort()

    def _gather_facts(self, fact: list[int]) -> list[list[int]]:
        mine = torch.tensor(fact, dtype=torch.int64)
        gathered = mine.new_empty((self.size, len(fact)))
        name = "exchange of shapes"
        operation = self._endpoint.start(name, self._mpi.Iallgather, in_bytes(mine), in_blocks(gathered, self.size))
        operation.wait(self._endpoint.timeout)
        table: list[list[int]] = gathered.tolist()
        return table

    def _handle(self, operation: Operation, finish: Callable[[], T]) -> Handle[T]:
        return MpiHandle(operation, self._endpoint.timeout, finish)
