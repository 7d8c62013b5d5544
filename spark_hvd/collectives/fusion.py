"""Fusion: sends many tensors as a few flat ones of bounded size, with the same plan on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from spark_hvd.collectives.messages import Entry, bits, bytes_of

PIECE_BYTES = 64 << 20
"""Maximum bytes of a flat tensor; a larger tensor is sent by itself."""

_REMEMBERED = 256
"""How many sets of numbers are remembered with their batches."""


def batches(tensors: Sequence[torch.Tensor], limit: int = PIECE_BYTES) -> list[list[int]]:
    """Divide tensors into batches to fuse, each of one dtype and device, in the same order on all ranks.

    Dtypes, shapes and kinds of device must be the same on every rank; ``limit`` is in bytes.

    Returns:
        The indices of the tensors of each batch.
    """
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        key = tensor.dtype, tensor.device
        bytes_here = tensor.numel() * tensor.element_size()
        members, filled = filling.setdefault(key, ([], 0))
        if members and filled + bytes_here > limit:
            full.append(members)
            members, filled = [], 0
        members.append(index)
        filling[key] = members, filled + bytes_here
    return full + [members for members, _ in filling.values()]


@torch.no_grad()
def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy the elements of tensors of one dtype and device into one new flat tensor."""
    return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors])


@torch.no_grad()
def flatten_into(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the elements of tensors into a flat tensor with as many elements."""
    if len(tensors) == 1:
        flat.view(tensors[0].shape).copy_(tensors[0])
    else:
        torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors], out=flat)


@torch.no_grad()
def unflatten_into(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the elements of a flat tensor back into the tensors from which it was made."""
    sizes = [tensor.numel() for tensor in tensors]
    if all(tensor.is_contiguous() for tensor in tensors):
        # One call for all; creating a view costs as much as copying a small tensor.
        rows = [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in tensors]
        torch.split_with_sizes_copy(flat, sizes, out=rows)
    else:
        for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
            tensor.copy_(part.view(tensor.shape))


class Batch(list[Entry]):
    """Entries that are sent together."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        super().__init__(entries)
        self.nbytes = sum(bytes_of(entry.request) for entry in self)
        """Bytes of all tensors of the batch, on this rank."""

    def add(self, entry: Entry, nbytes: int) -> None:
        """Add an entry to the batch."""
        self.append(entry)
        self.nbytes += nbytes


def plan_batches(entries: Sequence[Entry], threshold: int) -> list[Batch]:
    """Divide entries into batches that are sent together: identical operations on tensors of one dtype.

    ``entries`` are in the order in which the coordinator listed them. Entries are never divided, so groups stay whole.
    A ``threshold`` of 0 bytes turns fusion off.
    """
    full: list[Batch] = []
    filling: dict[tuple[object, ...], Batch] = {}
    for entry in entries:
        request = entry.request
        if request.kind not in ("allreduce", "broadcast") or len(set(request.dtypes)) != 1:
            full.append(Batch([entry]))
            continue
        key = (
            *(request.kind, request.dtypes[0], request.device, request.op, request.prescale, request.postscale),
            *(request.root, entry.divisor, tuple(entry.absent or ())),
        )
        nbytes = bytes_of(request)
        batch = filling.setdefault(key, Batch())
        if batch and (batch.nbytes + nbytes > threshold or not threshold):
            full.append(batch)
            batch = filling[key] = Batch()
        batch.add(entry, nbytes)
    return full + list(filling.values())


class Planner:
    """Divides what all ranks run into batches, and remembers the batches of sets of known names."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self._entries: list[Entry] = []
        self._known: dict[int, list[Batch]] = {}

    def tune(self, threshold: int) -> None:
        """Use another threshold from the next batch on."""
        self.threshold = threshold
        self._known.clear()

    def learn(self, number: int, entry: Entry) -> None:
        """Record the entry of a number: either the next number, or one whose entry changes."""
        if number < len(self._entries):
            self._known.clear()
        self._entries[number : number + 1] = [entry]

    def batches(self, entries: Sequence[Entry]) -> list[Batch]:
        """Divide entries into batches, in their order."""
        return plan_batches(entries, self.threshold)

    def batches_of_known(self, ids: int) -> list[Batch]:
        """Divide the entries with these numbers, given as bits."""
        batches = self._known.get(ids)
        if batches is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            batches = self._known[ids] = self.batches([self._entries[number] for number in bits(ids)])
        return batches
