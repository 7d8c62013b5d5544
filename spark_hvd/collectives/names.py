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

from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.messages import AUTO, op_of


class KnownCall:
    """A name with a number, and how this rank called it."""

    __slots__ = ("bit", "device", "dtype", "reducing", "request", "shape")

    def __init__(self, handle: NamedHandle[Any], bit: int) -> None:
        request, tensors = handle.request, handle.work.tensors
        self.request = request
        self.bit = bit
        # For the calls that come most often, so that they need not be described again to be recognised.
        self.reducing: tuple[object, ...] | None = None
        if request.kind == "allreduce" and len(tensors) == 1:
            self.reducing = (op_of(request), request.prescale, request.postscale)
            self.dtype, self.shape, self.device = tensors[0].dtype, tensors[0].shape, tensors[0].device


_log = logging.getLogger("spark_hvd")
_told = False


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
