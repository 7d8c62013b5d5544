"""What every transport offers: collectives over one fixed set of ranks, matched by the order of the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol, TypeVar, runtime_checkable

import torch

T_co = TypeVar("T_co", covariant=True)


class ReduceOp(Enum):
    """How elements of the ranks are reduced to one."""

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

        For tensors on a GPU the current stream waits, not the host.

        Raises:
            CollectiveError: A peer or the network failed, or the process group's timeout is over.
        """

    def done(self) -> bool:
        """Whether :meth:`wait` would return or raise at once."""

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, as soon as :meth:`wait` would return or raise at once; from whatever thread.

        The callback must be short and must not call the communicator. :meth:`done` may lag behind it a little.
        """


@runtime_checkable
class Communicator(Protocol):
    """Collectives over a set of ranks. Every rank calls the same methods in the same order.

    Tensors may be of any dtype, shape (0-dim and empty included) and stride. Unless a method says otherwise, the
    result is a new tensor, which carries no gradient.

    Reductions: a bool tensor's SUM and MAX are any, its MIN and PRODUCT are all. An integer AVERAGE truncates toward
    zero. There is no AVERAGE of bool, and no MIN or MAX of complex numbers (TypeError). Elements that the wire cannot
    carry (16-bit integers, 8-bit floats ...) are widened for the way and narrowed afterwards.
    """

    rank: int
    """This process' rank among the members, from 0."""
    size: int
    """Number of ranks."""
    fact_device: torch.device
    """Where small facts and pickles travel: the CPU, or a GPU if the transport serves no CPU tensors."""

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> Handle[torch.Tensor]:
        """Reduce over all ranks, in place; the result is `tensor` itself, which must not be touched before.

        Shapes and dtypes are not compared across ranks: that would cost a message.

        Raises:
            TypeError: `op` does not exist for this dtype.
        """

    def allgather(self, tensor: torch.Tensor, rows: Sequence[int]) -> Handle[torch.Tensor]:
        """Concatenate all ranks' tensors along dimension 0, which may differ by rank; a 0-dim tensor counts as one row.

        dtypes and shapes are not compared across ranks.

        Args:
            tensor: Mine.
            rows: The rows of every rank's tensor.
        """

    def broadcast(self, tensor: torch.Tensor, root_rank: int) -> Handle[torch.Tensor]:
        """Overwrite `tensor` in place with the one of `root_rank`; the result is `tensor` itself.

        Shapes and dtypes are not compared across ranks.

        Raises:
            ValueError: `root_rank` is no rank.
        """

    def reducescatter(self, tensor: torch.Tensor, op: ReduceOp) -> Handle[torch.Tensor]:
        """Reduce over all ranks and keep my share of the rows; the first ``rows % size`` ranks get one more row.

        Shapes and dtypes are not compared across ranks.

        Raises:
            ValueError: `tensor` is 0-dim.
            TypeError: `op` does not exist for this dtype.
        """

    def alltoall(self, tensor: torch.Tensor, splits: Sequence[int], received: Sequence[int]) -> Handle[torch.Tensor]:
        """Send `splits[i]` rows to rank i; the result is the received rows in rank order.

        dtypes, shapes and splits are not compared across ranks.

        Args:
            tensor: At least 1-dim.
            splits: Rows for each rank, summing up to the rows of `tensor`.
            received: How many rows each rank sends me.
        """

    def barrier(self) -> Handle[None]:
        """End when every rank has called it."""
