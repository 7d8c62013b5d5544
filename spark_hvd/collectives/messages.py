"""What a rank tells the coordinator of a call, and what the coordinator decides, as they travel."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from spark_hvd.transport.communicator import ReduceOp

AUTO = ".noname."
"""Part of every made-up name."""


class Request(NamedTuple):
    """One named collective, as one rank has called it. A grouped call is one request with several tensors."""

    kind: str
    """allreduce, allgather, broadcast, alltoall, reducescatter or barrier."""
    dtypes: list[str]
    """The dtype of each tensor, without the "torch."."""
    shapes: list[list[int]]
    """The shape of each tensor."""
    device: str
    """"cpu", "cuda:1" ...; ranks compare only the part before the colon. Empty if there is no tensor."""
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
    """What names this rank's pickle to the others, see :mod:`spark_hvd.collectives.objects`; ranks' seals differ."""

    @property
    def on_gpu(self) -> bool:
        """Whether the tensors are on a CUDA device."""
        return self.device.startswith("cuda")


class Entry(NamedTuple):
    """A collective that all ranks are ready for."""

    name: str
    request: Request
    """The first rank's request; the ranks' requests differ in the rows of allgather and the splits of alltoall."""
    table: list[list[int]] | None = None
    """Allgather: for each rank the rows of each tensor. Alltoall: for each rank its splits."""
    absent: list[int] | None = None
    """Places in the process set of the ranks that have joined and contribute nothing."""
    divisor: int | None = None
    """What Average divides by; None: the number of ranks."""
    seals: list[str | None] | None = None
    """The seal of each rank, if any has one."""
    zeros: bool = False
    """Whether ranks that have joined contribute zeros to any reduction, as Horovod's do."""


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
    """The number of bytes of all tensors together."""
    return sum(
        math.prod(shape) * _DTYPES[dtype].itemsize for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
    )


class Learn(NamedTuple):
    """From now on this number stands for this entry; a name that had another entry has this one."""

    id: int
    entry: Entry


class RunKnown(NamedTuple):
    """Run the entries whose numbers are the bits of `ids`, in ascending order."""

    ids: int


class Recall(NamedTuple):
    """A rank waits here, or has joined: those that wait for these numbers in memory are to say so here too."""

    ids: int


class Run(NamedTuple):
    """Run these entries, in this order."""

    entries: list[Entry]


class Fail(NamedTuple):
    """Calls of these collectives fail; the world goes on."""

    names: list[str]
    error: str
    """"mismatch", "horovod mismatch" or "stall"."""
    text: str
    places: list[int] | None = None
    """The places in the process set of the ranks whose calls these are; None: all. To others the names mean other
    calls, which have not been heard of yet, or were made after the failure."""


class AllJoined(NamedTuple):
    """Every rank has joined; `last` was the last, by its number in the world."""

    last: int


class Gone(NamedTuple):
    """A rank has gone, so nothing that has not started yet can run."""

    rank: int
    text: str
    left: bool
    """Whether it said that it would leave."""
    done: int | None = None
    """If it left: how many batches it took part in. Later ones would wait for it for ever."""


class Tune(NamedTuple):
    """Settings that hold for all decisions after this one."""

    fusion_threshold: int
    horovod: bool = False
    """Whether errors are Horovod's."""


class Trace(NamedTuple):
    """Record a timeline, or stop it."""

    on: bool
    mark_cycles: bool = False


class Pong(NamedTuple):
    """The answer to one rank's question for the time."""

    place: int
    asked: int
    """The asking rank's clock, ns."""
    answered: int
    """The coordinator's clock, ns."""


Decision = Learn | RunKnown | Recall | Run | Fail | AllJoined | Gone | Tune | Trace | Pong
_TYPES = {kind.__name__: kind for kind in (Learn, RunKnown, Recall, Run, Fail, AllJoined, Gone, Tune, Trace, Pong)}


def encode(decisions: Sequence[Decision]) -> bytes:
    """Encode decisions as JSON."""
    return json.dumps([_encoded(decision) for decision in decisions], separators=(",", ":")).encode()


def decode(data: bytes) -> list[Decision]:
    """The decisions that :func:`encode` was given."""
    return [_decoded(name, fields) for name, *fields in json.loads(data)]


def _encoded(decision: Decision) -> list[Any]:
    # Hexadecimal: a set of a thousand ids is too long a number for most readers of JSON.
    fields = [f"{decision.ids:x}"] if isinstance(decision, RunKnown | Recall) else decision
    return [type(decision).__name__, *fields]


def _decoded(name: str, fields: list[Any]) -> Decision:
    if name in ("RunKnown", "Recall"):
        ids = int(fields[0], 16)
        return RunKnown(ids) if name == "RunKnown" else Recall(ids)
    if name == "Run":
        return Run([_entry(entry) for entry in fields[0]])
    if name == "Learn":
        return Learn(fields[0], _entry(fields[1]))
    decision: Decision = _TYPES[name](*fields)
    return decision


def _entry(fields: list[Any]) -> Entry:
    name, request, *rest = fields
    return Entry(name, Request(*request), *rest)


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set, in ascending order."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
