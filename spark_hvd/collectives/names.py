"""Names of calls: one for a call that has none, and how this rank made its last call under a known one.

Calls without a name are matched by their order: the third allreduce of a rank meets the third of every other. The
calls of several threads have no order that is the same on all ranks. So ranks may combine what does not belong
together, and nobody notices if the shapes agree; this is told once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.messages import AUTO, Entry, Request, dtype_of, op_of
from spark_hvd.collectives.underway.slots import Slot
from spark_hvd.collectives.underway.use import LARGEST, LARGEST_UNNAMED, SlotUse

How = tuple[object, ...]
"""All that a call says besides its name and its one tensor, as :func:`how_of` makes it."""

RING = 60
"""Calls of a kind without a name that have names of their own; the next ones have these names again, so that what comes
back is known. Of a loop with 2, 3, 4, 5, 6, 10 or 12 such calls, each gets the same names in every turn."""


class KnownCall:
    """A name with a number, and how this rank called it."""

    __slots__ = ("bit", "device", "dtype", "how", "request", "shape", "slot", "title")

    def __init__(self, handle: NamedHandle[Any], bit: int, slot: Slot | None) -> None:
        request, tensors = handle.request, handle.work.tensors
        self.request = request
        self.bit = bit
        self.slot = slot
        self.title = repr(handle.name)
        self.device: torch.device | None = None
        """None: the CPU, or no tensor."""
        # For the calls that come most often, so that they need not be described again to be recognised.
        plain = len(tensors) == (0 if request.kind == "barrier" else 1) and request.seal is None
        self.how = how_of(request) if plain else None
        if tensors:
            self.dtype, self.shape = tensors[0].dtype, tensors[0].shape
            self.device = None if tensors[0].is_cpu else tensors[0].device


def how_of(request: Request) -> How | None:
    """What a request says besides its one tensor; None for kinds that are always described in full."""
    if request.kind == "allreduce":
        return op_of(request), request.prescale, request.postscale
    return (request.kind, request.root) if request.kind in ("allgather", "barrier", "broadcast") else None


_log = logging.getLogger("spark_hvd")
_told = False


def slot_use(entry: Entry, ranks: Sequence[int]) -> SlotUse | None:
    """What to do in memory for a name that stands for this entry; None if it is nothing for memory."""
    request = entry.request
    if request.kind == "barrier":
        return SlotUse(entry.name, (0,), torch.uint8, request.kind, None)
    if request.device != "cpu" or len(request.shapes) != 1 or entry.seals is not None:
        return None
    shape, dtype = tuple(request.shapes[0]), dtype_of(request.dtypes[0])
    if request.kind == "allreduce":
        use = SlotUse(entry.name, shape, dtype, request.kind, op_of(request), request.prescale, request.postscale)
    elif request.kind == "broadcast":
        assert request.root is not None
        use = SlotUse(entry.name, shape, dtype, request.kind, None, root=ranks.index(request.root))
    elif (
        request.kind == "allgather" and entry.table is not None and all(rows == entry.table[0] for rows in entry.table)
    ):
        use = SlotUse(entry.name, shape, dtype, request.kind, None)
    else:
        return None
    return use if use.fits(LARGEST_UNNAMED if AUTO in entry.name else LARGEST, len(ranks)) else None


_STRIDED = torch.strided
_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Whose attributes tell all: others' are looked at more closely."""


class KnownCalls:
    """The names of one process set that have numbers."""

    def __init__(self) -> None:
        self._calls: dict[str, KnownCall] = {}

    def learn(self, handle: NamedHandle[Any], bit: int, slot: Slot | None) -> None:
        """The call of a handle has a number, and may have a slot."""
        self._calls[handle.name] = KnownCall(handle, bit, slot)

    def bit(self, name: str, request: Request) -> int:
        """That of the number that stands for a call; 0 if none does."""
        known = self._calls.get(name)
        return known.bit if known is not None and known.request == request else 0

    def as_before(self, name: str, tensor: torch.Tensor | None, how: How) -> KnownCall | None:
        """The call that a number stands for, if this one is made in just the same way."""
        known = self._calls.get(name)
        if known is None or known.how != how:
            return None
        if tensor is not None and (
            type(tensor) not in _PLAIN
            or tensor.layout is not _STRIDED
            or known.dtype is not tensor.dtype
            or known.shape != tensor.shape
            or (not tensor.is_cpu if known.device is None else known.device != tensor.device)
        ):
            return None
        return known


class Unnamed:
    """The made-up names of one process set, :data:`RING` of each kind in turns."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._last: dict[str, tuple[int, str]] = {}

    def next(self, kind: str) -> str:
        """The name that :meth:`take` is about to take."""
        return f"{kind}{AUTO}{self._counters.get(kind, 0) % RING + 1}"

    def take(self, kind: str, under_way: Mapping[str, NamedHandle[Any]]) -> str:
        """The next name of a kind.

        ``under_way`` are this rank's handles, those that have just ended perhaps among them.
        """
        name = self.next(kind)
        self._counters[kind] = self._counters.get(kind, 0) + 1
        thread = threading.get_ident()
        before, last = self._last.get(kind, (thread, ""))
        self._last[kind] = thread, name
        # One thread after the other is in order, as with those of autograd.
        if before != thread and not _told and (other := under_way.get(last)) is not None and not other.done:
            _tell(kind)
        return name

    def joined(self) -> None:
        """Begin to count anew after all ranks have joined: they have come to different numbers by now."""
        self._counters.clear()


def _tell(kind: str) -> None:
    global _told
    _told = True
    _log.warning(
        "%s was called without a name in thread %r, while one of another thread is under way. Such calls are matched "
        "by their order, which is not the same on all ranks when there are several threads: ranks may combine what "
        "does not belong together. Give each of these calls a name=, the same on every rank.",
        kind,
        threading.current_thread().name,
    )
