"""How this rank made the last call under a name that has a number, so that the same call is recognised quickly."""

from __future__ import annotations

from typing import Any

from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.request import op_of


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
