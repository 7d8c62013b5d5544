"""The messages between ranks and the coordinator: what ranks report of a call, and what the coordinator decides."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from spark_hvd.transport.communicator import ReduceOp

AUTO = ".noname."
"""Part of every generated name."""


class Request(NamedTuple):
    """One named collective, as one rank has called it. A grouped call is one request with several tensors."""

    kind: str
    """allreduce, allgather, broadcast, alltoall, reducescatter or barrier."""
    dtypes: list[str]
    """The dtype of each tensor, without "torch."."""
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
    """Why the call cannot run, if its arguments contradict each other."""
    seal: str | None = None
    """Identifies this rank's pickle, see :mod:`spark_hvd.collectives.objects`; each rank has its own seal."""

    @property
    def on_gpu(self) -> bool:
        """Whether the tensors are on a CUDA device."""
        return self.device.startswith("cuda")


class Entry(NamedTuple):
    """A collective that all ranks are ready for."""

    name: str
    request: Request
    """The first rank's request; others may differ in the rows of allgather and the splits of alltoall."""
    table: list[list[int]] | None = None
    """For allgather, each rank's rows of each tensor; for alltoall, each rank's splits."""
    absent: list[int] | None = None
    """Places in the process set of ranks that have joined and contribute nothing."""
    divisor: int | None = None
    """The divisor of Average; None: the number of ranks."""
    seals: list[str | None] | None = None
    """The seal of each rank, if any has one."""
    zeros: bool = False
    """Whether ranks that have joined contribute zeros to any reduction, as Horovod's do."""


_NAMES = {value: str(value)[len("torch.") :] for value in vars(torch).values() if isinstance(value, torch.dtype)}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_OPS = {op.name: op for op in ReduceOp}


def dtype_text(dtype: torch.dtype) -> str:
    """Return the dtype's name in a request."""
    return _NAMES[dtype]


def dtype_of(text: str) -> torch.dtype:
    """Return the dtype with this name in a request."""
    return _DTYPES[text]


def op_of(request: Request) -> ReduceOp:
    """Return the reduction of an allreduce or reducescatter."""
    assert request.op is not None
    return _OPS[request.op]


def bytes_of(request: Request) -> int:
    """Return the total bytes of all tensors."""
    return sum(
        math.prod(shape) * _DTYPES[dtype].itemsize for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
    )


class Learn(NamedTuple):
    """From now on, this number stands for this entry, which replaces any other entry of the name."""

    id: int
    entry: Entry


class RunKnown(NamedTuple):
    """Run the entries whose numbers are the bits of `ids`, in ascending order."""

    ids: int


class Recall(NamedTuple):
    """Move calls of these numbers from shared memory to the coordinator: a rank waits here, or has joined."""

    ids: int


class Run(NamedTuple):
    """Run these entries, in this order."""

    entries: list[Entry]


class Fail(NamedTuple):
    """Calls of these collectives fail; the world continues."""

    names: list[str]
    error: str
    """"mismatch", "horovod mismatch" or "stall"."""
    text: str
    places: list[int] | None = None
    """Places in the process set of the ranks whose calls fail; None: all. On other ranks, the names belong to other
    calls, which have not arrived yet or were made after the failure."""


class AllJoined(NamedTuple):
    """Every rank has joined; `last` was the last, by its number in the world."""

    last: int


class Gone(NamedTuple):
    """A rank is gone, so nothing can start any more."""

    rank: int
    text: str
    left: bool
    """Whether the rank announced that it would leave."""
    done: int | None = None
    """If it left: the number of batches in which it took part. Later ones would wait for it forever."""


class Tune(NamedTuple):
    """Settings that apply to all later decisions."""

    fusion_threshold: int
    horovod: bool = False
    """Whether errors are Horovod's."""


class Trace(NamedTuple):
    """Start or stop recording a timeline."""

    on: bool
    mark_cycles: bool = False


class Pong(NamedTuple):
    """The answer to a rank that asked for the time."""

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
    """Return the decisions that were passed to :func:`encode`."""
    return [_decoded(name, fields) for name, *fields in json.loads(data)]


def _encoded(decision: Decision) -> list[Any]:
    # Hexadecimal: for a set of a thousand ids, the number is too long for most JSON readers.
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
    """Yield the positions of the bits that are set, in ascending order."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
