"""What a slot serves: one kind of call, and how its result follows from the tensors of all ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.transport.dtypes import divide, is_integer, to_wire

LARGEST = 64 << 10
"""Maximum bytes of a tensor; for larger ones, messages are no longer the main cost."""
LARGEST_UNNAMED = 8 << 10
"""The same for generated names, of which there are many, perhaps all for one kind of call."""
_REDUCED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}
_MOVED = _REDUCED | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.complex64, torch.complex128}
_FOLDS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}


class SlotUse(NamedTuple):
    """A call that all ranks make in the same way: of one kind, on a CPU tensor of the same shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = "allreduce"
    """allreduce, broadcast, allgather or barrier; a barrier's tensor is empty."""
    op: ReduceOp | None = ReduceOp.SUM
    """The reduction of an allreduce."""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    """The place of the rank whose tensor is broadcast."""

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's data."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def sums(self) -> bool:
        """Whether the result is a sum or an average: these are computed for many slots at once."""
        return self.op is ReduceOp.SUM or self.op is ReduceOp.AVERAGE

    def fits(self, largest: int, size: int) -> bool:
        """Return whether a slot for tensors of at most ``largest`` bytes, among ``size`` ranks, can serve this call."""
        if self.kind == "barrier":
            return True
        if not 0 < self.nbytes <= largest:
            return False
        if self.kind != "allreduce":
            return self.dtype in _MOVED
        plain = self.prescale == 1.0 and self.postscale == 1.0
        if self.dtype not in _REDUCED or (is_integer(self.dtype) and not plain):
            return False
        # A product of three numbers may have other bits in another order, and the coordinator's calls use Gloo's order.
        in_order = self.op is not ReduceOp.PRODUCT or size == 2 or is_integer(self.dtype)
        return self.sums or (self.op in _FOLDS and in_order)

    def needs(self, place: int) -> bool:
        """Return whether the result depends on the tensor of the rank at this place."""
        return self.kind != "barrier" and (self.kind != "broadcast" or place == self.root)

    def finish(self, total: torch.Tensor, copies: Sequence[torch.Tensor]) -> None:
        """Turn ``total``, the sum of all ``copies``, into the result, in place; copies are in rank order."""
        if self.op is ReduceOp.AVERAGE and total.dtype == torch.int32:  # the sum may exceed 32 bits
            total.copy_(torch.stack([*copies]).sum(0).div_(len(copies), rounding_mode="trunc"))
        elif self.op is ReduceOp.AVERAGE:
            divide(total, len(copies))
        if self.postscale != 1.0:
            total.mul_(self.postscale)

    def result(self, copies: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the result of a call that is not a sum, in a new tensor; ``copies`` are in rank order."""
        if self.kind == "broadcast":
            return copies[self.root].clone()
        if self.kind == "allgather":
            return torch.cat([copy.view(1) if copy.dim() == 0 else copy for copy in copies])
        if self.kind == "barrier":
            return torch.empty(0, device="cpu")
        assert self.op is not None
        total = functools.reduce(_FOLDS[self.op], copies)
        if self.op is not ReduceOp.PRODUCT and bool(((total == 0) | (total != total)).any()):
            # Here, the order decides which zero and which NaN results. The coordinator's calls do not depend on it.
            forms = [to_wire(copy, self.op) for copy in copies]
            total = forms[0][2](functools.reduce(_FOLDS[self.op], [wire for wire, *_ in forms]))
        return total.mul_(self.postscale) if self.postscale != 1.0 else total
