"""Adasum: gradients that point the same way are averaged, orthogonal ones are summed, by their dot products.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", https://arxiv.org/abs/2006.02924, with
the paper's recursive vector halving and distance doubling (ADASUMRVH).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch

from spark_hvd.collectives.fusion import unflatten_into
from spark_hvd.transport.communicator import Communicator, Handle
from spark_hvd.transport.shapes import require_dense

T = TypeVar("T")
Steps = Generator[Handle[Any], None, T]
"""Yields each handle before it needs the handle's result, and finally returns a T."""

CHUNK = 1 << 18
"""Number of elements widened to float64 at a time: 2 MiB fit into a processor's cache, which doubles the speed."""

_SMALLEST = torch.finfo(torch.float64).tiny


def adasum(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> Generator[Handle[Any], None, None]:
    """Reduce tensors over all ranks, in place. The caller may do other work between the steps.

    Two vectors a and b become ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``. Each tensor is one vector. If a vector's
    squared norm is 0 or not a normal float64, its factor is 1. Horovod uses factor 1 for any squared norm below 1e-8;
    without such a limit, gradients may have any scale.

    The order, with 2^k the largest power of two that is no larger than the number of ranks:

    1. Ranks from 2^k on hand their vectors to rank ``r - 2^k``, which combines the two.
    2. The ranks below 2^k form a binary tree: (0, 1), (2, 3) and so on are combined first, then pairs of pairs. At
       each level partners swap halves of what they hold, and each combines the half that it keeps.
    3. The halves are put together again, and the ranks from 2^k on receive the result.

    The result has the same bits on every rank. Dot products and sums are computed in float64. Between two levels a
    vector is kept in float64 if the tensors are, else in float32, and it is rounded to their dtype once, at the end.

    Each step may start a collective. So all ranks must take the steps of several reductions in the same order, and on
    the same stream if the tensors are on a GPU.

    Args:
        communicator: Any communicator; in a world of one there are no steps, and the tensors do not change.
        tensors: Floating-point, dense, of one dtype and on one device, of any shapes and strides. Dtypes and shapes
            must be the same on every rank; this is not checked. All tensors change in the last step, or none if a step
            fails.

    Returns:
        A generator that yields each handle of the communicator before it needs the handle's result. Resume it when the
        handle is done, and it never blocks; resume it earlier, and it waits. Steps raise CollectiveError when a peer or
        the network failed.

    Raises:
        TypeError: A tensor is not floating-point, or is sparse.
        ValueError: Dtypes or devices differ.
    """
    for tensor in tensors:
        _require_like(tensor, tensors[0])
    return _steps(communicator, tensors)


def _require_like(tensor: torch.Tensor, first: torch.Tensor) -> None:
    require_dense(tensor)
    if not tensor.is_floating_point():
        raise TypeError(
            f"Adasum needs floating-point tensors, not {tensor.dtype}; convert with .float() first, or use another op."
        )
    if (tensor.dtype, tensor.device) != (first.dtype, first.device):
        raise ValueError(
            f"Adasum got tensors of {first.dtype} on {first.device} and of {tensor.dtype} on {tensor.device}; "
            f"use a separate call for each dtype and device."
        )


def _steps(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> Steps[None]:
    lengths = [tensor.numel() for tensor in tensors]
    if communicator.size > 1 and sum(lengths) > 0:
        # A copy even of a single tensor: `tensors` change in the last step only.
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        yield from _Tree(communicator, lengths, flat).reduce()
        unflatten_into(flat, tensors)


class _Tree:
    """One reduction, from this rank's point of view.

    "Members" are the ranks of the binary tree, "extras" the others. A communicator's collectives need all ranks, so
    extras take part in each of the members' calls, without elements.
    """

    def __init__(self, communicator: Communicator, lengths: Sequence[int], flat: torch.Tensor) -> None:
        """Plan to reduce `flat`, 1-dim, in place; it consists of layers with these lengths."""
        self._communicator = communicator
        self._rank, self._size = communicator.rank, communicator.size
        self._members = 1 << (self._size.bit_length() - 1)
        self._extra = self._rank >= self._members
        self._lengths = list(lengths)
        self._ends = list(accumulate(lengths))
        self._flat = flat
        self._nothing = flat[:0]
        self._held = _widened(self._nothing if self._extra else flat)

    def reduce(self) -> Steps[None]:
        if self._members < self._size:
            yield from self._hand_over()
        yield from self._halve(0, self._held.numel(), 1)
        if self._members < self._size:
            yield from self._hand_back()

    def _hand_over(self) -> Steps[None]:
        """Send the extras' vectors to members, which combine them with their own."""
        buddy, adopts = self._buddy()
        sent = self._flat if self._extra else self._nothing
        received = yield from self._exchange(sent, buddy, self._flat.numel() if adopts else 0)
        if adopts:
            a, b = self._held, _widened(received)
            _combine(a, b, self._lengths, _dots(a, b, self._lengths), into=a)

    def _hand_back(self) -> Steps[None]:
        """Send the result to the extras."""
        buddy, adopts = self._buddy()
        sent = self._flat if adopts else self._nothing
        result = yield from self._exchange(sent, buddy, self._flat.numel() if self._extra else 0)
        if self._extra:
            self._flat.copy_(result)

    def _buddy(self) -> tuple[int, bool]:
        """Return an extra's member, or a member's extra (this rank if it has none), and whether it has one."""
        if self._extra:
            return self._rank - self._members, False
        extra = self._rank + self._members
        return (extra, True) if extra < self._size else (self._rank, False)

    def _halve(self, start: int, stop: int, distance: int) -> Steps[None]:
        """Reduce the elements from `start` to `stop`, which the ranks with this rank's `rank % distance` share.

        Args:
            start: First of the elements that this rank's group of `distance` ranks assigned to it.
            stop: One past the last of them.
            distance: Distance to this rank's partner.
        """
        if distance == self._members:
            if self._held.dtype != self._flat.dtype:
                self._flat[start:stop] = self._held[start:stop]  # rounded here, so that fewer bytes travel back
            return
        upper = bool(self._rank & distance)
        partner = self._rank if self._extra else self._rank ^ distance
        middle = (start + stop) // 2
        halves = slice(start, middle), slice(middle, stop)
        kept, sent = halves[upper], halves[not upper]
        own = self._held[kept]
        received = yield from self._exchange(self._held[sent], partner, own.numel())
        # Both partners must agree on which of the two vectors is a.
        a, b = (received, own) if upper else (own, received)
        lengths = self._lengths_within(kept.start, kept.stop)
        dots = yield from self._summed(_dots(a, b, lengths), 2 * distance)
        _combine(a, b, lengths, dots, into=own)
        yield from self._halve(kept.start, kept.stop, 2 * distance)
        self._flat[sent] = yield from self._exchange(self._flat[kept], partner, sent.stop - sent.start)

    def _exchange(self, sent: torch.Tensor, partner: int, expected: int) -> Steps[torch.Tensor]:
        """Exchange 1-dim tensors with a rank; it sends `expected` elements. The rank is this one if both are empty."""
        splits, received = [0] * self._size, [0] * self._size
        splits[partner], received[partner] = sent.numel(), expected
        handle = self._communicator.alltoall(sent, splits, received)
        yield handle
        return handle.wait()

    def _summed(self, dots: torch.Tensor, group: int) -> Steps[torch.Tensor]:
        """Sum what each of a group of neighbouring ranks computed for its part of the vectors."""
        handle = self._communicator.allgather(dots.unsqueeze(0), rows=[1] * self._size)
        yield handle
        gathered = handle.wait()
        first = self._rank // group * group
        total = torch.zeros_like(dots)
        # Not sum(0): its order depends on the processor, but partners must get the same bits.
        for part in gathered[first : first + group]:
            total += part
        return total

    def _lengths_within(self, start: int, stop: int) -> list[int]:
        """Return how many of the elements from `start` to `stop` belong to each layer."""
        cuts = [start, *(min(max(end, start), stop) for end in self._ends)]
        return [cut - before for before, cut in pairwise(cuts)]


def _widened(flat: torch.Tensor) -> torch.Tensor:
    return flat if flat.dtype == torch.float64 else flat.float()


def _chunks(*flats: torch.Tensor, lengths: list[int]) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Yield parts of flat tensors of one size, as views within one layer, each with the layer's number."""
    for layer, parts in enumerate(zip(*(torch.split(flat, lengths) for flat in flats), strict=True)):
        if parts[0].numel():
            for chunks in zip(*(torch.split(part, CHUNK) for part in parts), strict=True):
                yield layer, chunks


def _dots(a: torch.Tensor, b: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Return a.b, |a|^2 and |b|^2 of every layer: float64, (layers, 3)."""
    dots = torch.zeros(len(lengths), 3, dtype=torch.float64, device=a.device)
    for layer, (a_part, b_part) in _chunks(a, b, lengths=lengths):
        x, y = a_part.double(), b_part.double()
        dots[layer] += torch.stack((torch.dot(x, y), torch.dot(x, x), torch.dot(y, y)))
    return dots


def _combine(a: torch.Tensor, b: torch.Tensor, lengths: list[int], dots: torch.Tensor, into: torch.Tensor) -> None:
    """Write the adaptive sum of a and b into one of them, given the :func:`_dots` of the whole layers."""
    product, squares = dots[:, :1], dots[:, 1:]
    # `<`, so that a NaN spreads to the whole layer and does not go unnoticed.
    factors = torch.where(squares < _SMALLEST, 1.0, 1 - product / (2 * squares))
    # In float64: a float32 could not hold the factor of a short vector next to a long one.
    for layer, (a_part, b_part, target) in _chunks(a, b, into, lengths=lengths):
        target.copy_(factors[layer, 0] * a_part.double() + factors[layer, 1] * b_part.double())
