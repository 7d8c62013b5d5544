"""What a rank says of a collective it is ready for, and what becomes of it when all ranks have said so.

Requests and entries are made of what JSON carries, lists instead of tuples included, so that a request compares equal
to its copy from another rank.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from spark_hvd.transport.communicator import ReduceOp

AUTO = ".noname."
"""Part of every made-up name; such names never come back."""


class Request(NamedTuple):
    """One named collective, as one rank has called it. A grouped call is one request with several tensors."""

    kind: str
    """allreduce, allgather, broadcast, alltoall, reducescatter or barrier."""
    dtypes: list[str]
    """Of each tensor, without the "torch."."""
    shapes: list[list[int]]
    """Of each tensor."""
    device: str
    """Kind of device, "cpu" or "cuda"; empty if there is no tensor."""
    op: str | None = None
    """Name of the ReduceOp."""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int | None = None
    """Rank in the world whose tensor is broadcast."""
    splits: list[int] | None = None
    """Rows for each rank of the process set, for alltoall."""
    fault: str | None = None
    """Why the call cannot run, if its arguments do not fit each other."""
    seal: str | None = None
    """By which the others know this rank's pickle, see :mod:`spark_hvd.collectives.objects`; ranks' seals differ."""


class Entry(NamedTuple):
    """A collective that all ranks are ready for."""

    name: str
    request: Request
    """As the first rank made it; the ranks' requests differ in the rows of allgather and the splits of alltoall."""
    table: list[list[int]] | None = None
    """Allgather: for each rank the rows of each tensor. Alltoall: for each rank its splits."""
    absent: list[int] | None = None
    """Places in the process set of the ranks that have joined and contribute nothing."""
    divisor: int | None = None
    """What Average divides by; None: the number of ranks."""
    seals: list[str | None] | None = None
    """That of each rank, if any has one."""


_NAMES = {value: str(value)[len("torch.") :] for value in vars(torch).values() if isinstance(value, torch.dtype)}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_OPS = {op.name: op for op in ReduceOp}


def dtype_text(dtype: torch.dtype) -> str:
    """The dtype's name in a request."""
    return _NAMES[dtype]


def dtype_of(text: str) -> torch.dtype:
    """The dtype with this name in a request."""
    return _DTYPES[text]


def op_of(request: Request) -> ReduceOp:
    """The reduction of an allreduce or reducescatter."""
    assert request.op is not None
    return _OPS[request.op]


def bytes_of(request: Request) -> int:
    """Bytes of all tensors."""
    return sum(
        math.prod(shape) * _DTYPES[dtype].itemsize for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
    )
