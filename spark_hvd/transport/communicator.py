"""The interface of every transport: collectives over one fixed set of ranks, matched by the order of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol, TypeVar, runtime_checkable

import torch

T_co = TypeVar("T_co", covariant=True)


class ReduceOp(Enum):
    """The reduction that combines the elements of all ranks into one."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"
    """Adaptive summation, see :mod:`spark_hvd.collectives.adasum`; made of several collectives."""


@runtime_checkable
class Handle(Protocol[T_co]):
    """A collective in flight."""

    __slots__ = ()

    def wait(self) -> T_co:
        """Block until the collective has ended, and return its result; a second call returns the same result.

        For tensors on a GPU, the current stream waits and not the host.

        Raises:
            CollectiveError: A peer or the network failed, or the process group's timeout has expired.
        """

    def done(self) -> bool:
        """Return whether :meth:`wait` would return or raise at once."""

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, as soon as :meth:`wait` would return or raise at once; from any thread.

        The callback must be short and must not call the communicator. :meth:`done` may become true a little later.
        """


@runtime_checkable
class Communicator(Protocol):
    """Collectives over a set of ranks. Every rank calls the same methods in the same order.

    Tensors may have any dtype, shape (including 0-dim and empty) and stride. Unless a method says otherwise, the result
    is a new tensor without a gradient.

    Reductions: for bool, SUM and MAX mean any, MIN and PRODUCT mean all. An integer AVERAGE truncates toward zero.
    AVERAGE of bool, and MIN or MAX of complex numbers, raise TypeError. Elements that the transport cannot carry
    (16-bit integers, 8-bit floats ...) are widened before sending and narrowed afterwards.
    """

    rank: int
    """This process's rank among the members, from 0."""
    size: int
    """Number of ranks."""
    fact_device: torch.device
    """Device for small facts and pickles: the CPU, or a GPU if the transport does not support CPU tensors."""

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> Handle[torch.Tensor]:
        """Reduce over all ranks, in place; the result is `tensor` itself, which must not be touched until then.

        Shapes and dtypes are not compared across ranks, because that would cost a message.

        Raises:
            TypeError: `op` does not support this dtype.
        """

    def allgather(self, tensor: torch.Tensor, rows: Sequence[int]) -> Handle[torch.Tensor]:
        """Concatenate all ranks' tensors along dimension 0, whose size may differ; a 0-dim tensor counts as one row.

        Dtypes and shapes are not compared across ranks.

        Args:
            tensor: This rank's tensor.
            rows: The number of rows of every rank's tensor.
        """

    def broadcast(self, tensor: torch.Tensor, root_rank: int) -> Handle[torch.Tensor]:
        """Overwrite `tensor` in place with `root_rank`'s; the result is `tensor` itself.

        Shapes and dtypes are not compared across ranks.

        Raises:
            ValueError: `root_rank` is not a rank.
        """

    def reducescatter(self, tensor: torch.Tensor, op: ReduceOp) -> Handle[torch.Tensor]:
        """Reduce over all ranks and keep this rank's share of rows; the first ``rows % size`` ranks get one more row.

        Shapes and dtypes are not compared across ranks.

        Raises:
            ValueError: `tensor` is 0-dim.
            TypeError: `op` does not support this dtype.
        """

    def alltoall(self, tensor: torch.Tensor, splits: Sequence[int], received: Sequence[int]) -> Handle[torch.Tensor]:
        """Send `splits[i]` rows to rank i; the result is the received rows in rank order.

        Dtypes, shapes and splits are not compared across ranks.

        Args:
            tensor: At least 1-dim.
            splits: Rows for each rank; they add up to the rows of `tensor`.
            received: Rows that each rank sends to this one.
        """

    def barrier(self) -> Handle[None]:
        """Complete when every rank has called it."""
