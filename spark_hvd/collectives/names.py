"""Names of calls: one for a call that has none, and how this rank made its last call under a known one.

Calls without a name are matched by their order: the third allreduce of a rank meets the third of every other. The
calls of several threads have no order that is the same on all ranks. So ranks may combine what does not belong
together, and nobody notices if the shapes agree; this is told once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import torch

from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.messages import AUTO, Entry, Request, dtype_of, op_of
from spark_hvd.collectives.underway.slots import Slot, SlotUse
from spark_hvd.transport.communicator import ReduceOp


class KnownCall:
    """A name with a number, and how this rank called it."""

    __slots__ = ("bit", "device", "dtype", "reducing", "request", "shape", "slot", "title")

    def __init__(self, handle: NamedHandle[Any], bit: int, slot: Slot | None) -> None:
        request, tensors = handle.request, handle.work.tensors
        self.request = request
        self.bit = bit
        self.slot = slot
        self.title = repr(handle.name)
        # For the calls that come most often, so that they need not be described again to be recognised.
        self.reducing: tuple[object, ...] | None = None
        if request.kind == "allreduce" and len(tensors) == 1:
            self.reducing = (op_of(request), request.prescale, request.postscale)
            self.dtype, self.shape, self.device = tensors[0].dtype, tensors[0].shape, tensors[0].device


_log = logging.getLogger("spark_hvd")
_told = False


def slot_use(entry: Entry) -> SlotUse | None:
    """What to do in memory for a name that stands for this entry; None if it is nothing for memory."""
    request = entry.request
    if request.kind != "allreduce" or request.device != "cpu" or len(request.shapes) != 1:
        return None
    op = op_of(request)
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return None
    shape, dtype = tuple(request.shapes[0]), dtype_of(request.dtypes[0])
    return SlotUse(entry.name, shape, dtype, op is ReduceOp.AVERAGE, request.prescale, request.postscale)


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

    def as_before(self, name: str, tensor: torch.Tensor, reducing: tuple[object, ...]) -> KnownCall | None:
        """An allreduce that is called in just the way that its number stands for."""
        known = self._calls.get(name)
        if (
            known is None
            or type(tensor) not in _PLAIN
            or tensor.layout is not torch.strided
            or known.reducing != reducing
            or known.dtype is not tensor.dtype
            or known.shape != tensor.shape
            or known.device != tensor.device
        ):
            return None
        return known


class Unnamed:
    """The names of one process set."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._last: dict[str, tuple[int, str]] = {}
        self._joins = 0

    def name(self, kind: str, under_way: Mapping[str, NamedHandle[Any]]) -> str:
        """The next name of a kind.

        Args:
            kind: Of collective.
            under_way: The handles of this rank, by name, those that have just ended perhaps among them.
        """
        number = self._counters[kind] = self._counters.get(kind, 0) + 1
        name = f"{kind}{AUTO}{number}" + (f".{self._joins}" if self._joins else "")
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
        self._joins += 1


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
