"""Names of calls: generates one for a call that has none, and remembers how this rank last called each known name.

Calls without a name match by their order: a rank's third allreduce meets the third of every other rank. Calls of
several threads have no order that all ranks share, so ranks may combine tensors that do not belong together. If the
shapes agree, nobody notices, so this logs a warning once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.messages import AUTO, Entry, Request, dtype_of, op_of
from spark_hvd.collectives.pending.slots import Slot
from spark_hvd.collectives.pending.use import LARGEST, LARGEST_UNNAMED, SlotUse

How = tuple[object, ...]
"""Everything that a call specifies besides its name and its one tensor, as returned by :func:`how_of`."""

RING = 60
"""Number of names of a kind of unnamed call before they repeat; repeated names are recognised. In a loop with 2, 3, 4,
5, 6, 10 or 12 such calls, each call gets the same names in every iteration."""


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
        # Only for the most frequent calls, which are then recognised without being described again.
        plain = len(tensors) == (0 if request.kind == "barrier" else 1) and request.seal is None
        self.how = how_of(request) if plain else None
        if tensors:
            self.dtype, self.shape = tensors[0].dtype, tensors[0].shape
            self.device = None if tensors[0].is_cpu else tensors[0].device


def how_of(request: Request) -> How | None:
    """Return what a request specifies besides its one tensor; None for kinds that are always described in full."""
    if request.kind == "allreduce":
        return op_of(request), request.prescale, request.postscale
    return (request.kind, request.root) if request.kind in ("allgather", "barrier", "broadcast") else None


_log = logging.getLogger("spark_hvd")
_warned = False


def slot_use(entry: Entry, ranks: Sequence[int]) -> SlotUse | None:
    """Return what a slot does for a name with this entry; None if the call cannot use a slot."""
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
"""Types that are fully described by their attributes; other types are examined more closely."""


class KnownCalls:
    """Names of one process set that have numbers."""

    def __init__(self) -> None:
        self._calls: dict[str, KnownCall] = {}

    def learn(self, handle: NamedHandle[Any], bit: int, slot: Slot | None) -> None:
        """Record the number of a handle's call, and its slot, if any."""
        self._calls[handle.name] = KnownCall(handle, bit, slot)

    def bit(self, name: str, request: Request) -> int:
        """Return the bit of the number that stands for a call; 0 if none does."""
        known = self._calls.get(name)
        return known.bit if known is not None and known.request == request else 0

    def as_before(self, name: str, tensor: torch.Tensor | None, how: How) -> KnownCall | None:
        """Return the known call of a name, if this call is made in exactly the same way."""
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
    """Generated names of one process set, :data:`RING` of each kind in rotation."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._last: dict[str, tuple[int, str]] = {}

    def next(self, kind: str) -> str:
        """Return the name that :meth:`take` will take next."""
        return f"{kind}{AUTO}{self._counters.get(kind, 0) % RING + 1}"

    def take(self, kind: str, in_flight: Mapping[str, NamedHandle[Any]]) -> str:
        """Take the next name of a kind.

        ``in_flight`` are this rank's handles; some may have just ended.
        """
        name = self.next(kind)
        self._counters[kind] = self._counters.get(kind, 0) + 1
        thread = threading.get_ident()
        before, last = self._last.get(kind, (thread, ""))
        self._last[kind] = thread, name
        # Threads that take turns, like autograd's, keep an order.
        if before != thread and not _warned and (other := in_flight.get(last)) is not None and not other.done:
            _warn_once(kind)
        return name

    def joined(self) -> None:
        """Restart the count: all ranks have joined, and their counts differ by now."""
        self._counters.clear()


def _warn_once(kind: str) -> None:
    global _warned
    _warned = True
    _log.warning(
        "%s was called without a name in thread %r, while another thread's call is in flight. Such calls are matched "
        "by their order, which is not the same on all ranks when there are several threads: ranks may combine tensors "
        "that do not belong together. Give each of these calls a name=, the same on every rank.",
        kind,
        threading.current_thread().name,
    )
