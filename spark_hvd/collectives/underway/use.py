"""What a slot serves: one kind of call, and what its result is, given the tensors of all ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.transport.dtypes import divide, is_integer, to_wire

LARGEST = 64 << 10
"""Bytes of a tensor up to which messages cost more than all else."""
LARGEST_UNNAMED = 8 << 10
"""The same for made-up names, which are many and may all be of one kind of call."""
_REDUCED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}
_MOVED = _REDUCED | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.complex64, torch.complex128}
_FOLDS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}


class SlotUse(NamedTuple):
    """A call that ranks make alike: the same kind, on a CPU tensor of the same shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = "allreduce"
    """allreduce, broadcast, allgather or barrier, whose tensor is empty."""
    op: ReduceOp | None = ReduceOp.SUM
    """Of an allreduce."""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    """The place of the rank whose tensor is broadcast."""

    @property
    def nbytes(self) -> int:
        """Of a rank's data."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def sums(self) -> bool:
        """Whether the result is a sum, or an average: those of many slots are computed together."""
        return self.op is ReduceOp.SUM or self.op is ReduceOp.AVERAGE

    def fits(self, largest: int, size: int) -> bool:
        """Whether a slot for tensors of ``largest`` bytes at most, among ``size`` ranks, can serve such a call."""
        if self.kind == "barrier":
            return True
        if not 0 < self.nbytes <= largest:
            return False
        if self.kind != "allreduce":
            return self.dtype in _MOVED
        plain = self.prescale == 1.0 and self.postscale == 1.0
        if self.dtype not in _REDUCED or (is_integer(self.dtype) and not plain):
            return False
        # A product of three in another order may have other bits, and the coordinator's calls go by Gloo's.
        in_order = self.op is not ReduceOp.PRODUCT or size == 2 or is_integer(self.dtype)
        return self.sums or (self.op in _FOLDS and in_order)

    def needs(self, place: int) -> bool:
        """Whether the result is made of the tensor of the rank at this place, too."""
        return self.kind != "barrier" and (self.kind != "broadcast" or place == self.root)

    def finish(self, total: torch.Tensor, copies: Sequence[torch.Tensor]) -> None:
        """Make the result out of ``total``, the sum of all ``copies``, in place; these are in rank order."""
        if self.op is ReduceOp.AVERAGE and total.dtype == torch.int32:  # whose sum may leave its range
            total.copy_(torch.stack([*copies]).sum(0).div_(len(copies), rounding_mode="trunc"))
        elif self.op is ReduceOp.AVERAGE:
            divide(total, len(copies))
        if self.postscale != 1.0:
            total.mul_(self.postscale)

    def result(self, copies: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result of a call that is no sum, in a new tensor; ``copies`` are in rank order."""
        if self.kind == "broadcast":
            return copies[self.root].clone()
        if self.kind == "allgather":
            return torch.cat([copy.view(1) if copy.dim() == 0 else copy for copy in copies])
        if self.kind == "barrier":
            return torch.empty(0, device="cpu")
        assert self.op is not None
        total = functools.reduce(_FOLDS[self.op], copies)
        if self.op is not ReduceOp.PRODUCT and bool(((total == 0) | (total != total)).any()):
            # Which zero, and which NaN, depends on the order here. On the wire of the coordinator's calls it does not.
            forms = [to_wire(copy, self.op) for copy in copies]
            total = forms[0][2](functools.reduce(_FOLDS[self.op], [wire for wire, *_ in forms]))
        return total.mul_(self.postscale) if self.postscale != 1.0 else total
