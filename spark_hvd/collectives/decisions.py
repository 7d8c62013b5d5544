"""What the coordinator tells all ranks, in one order for all of them, and its form on the wire."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from spark_hvd.collectives.request import Entry, Request


class Learn(NamedTuple):
    """From now on this number stands for this entry; a name that had another entry has this one."""

    id: int
    entry: Entry


class RunKnown(NamedTuple):
    """Run the entries whose numbers are the bits of `ids`, in ascending order."""

    ids: int


class Run(NamedTuple):
    """Run these entries, in this order."""

    entries: list[Entry]


class Fail(NamedTuple):
    """Calls of these collectives fail; the world goes on."""

    names: list[str]
    error: str
    """"mismatch" or "stall"."""
    text: str
    places: list[int] | None = None
    """In the process set, of the ranks whose calls these are; None: all. To others the names mean other calls, which
    have not been heard of yet, or were made after the failure."""


class Joined(NamedTuple):
    """Every rank has joined; `last` was the last, by its number in the world."""

    last: int


class Gone(NamedTuple):
    """A rank is no longer there, so nothing that is not under way yet can run any more."""

    rank: int
    text: str
    left: bool
    """Whether it took its leave."""
    done: int | None = None
    """If so: of how many batches it has done its part. What comes after those would wait for it in vain."""


class Tune(NamedTuple):
    """New values from here on."""

    fusion_threshold: int


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


Decision = Learn | RunKnown | Run | Fail | Joined | Gone | Tune | Trace | Pong
_TYPES = {kind.__name__: kind for kind in (Learn, RunKnown, Run, Fail, Joined, Gone, Tune, Trace, Pong)}


def encode(decisions: Sequence[Decision]) -> bytes:
    """The decisions as JSON."""
    return json.dumps([_encoded(decision) for decision in decisions], separators=(",", ":")).encode()


def decode(data: bytes) -> list[Decision]:
    """The decisions that :func:`encode` was given."""
    return [_decoded(name, fields) for name, *fields in json.loads(data)]


def _encoded(decision: Decision) -> list[Any]:
    # Hexadecimal: a set of a thousand ids is too long a number for most readers of JSON.
    fields = [f"{decision.ids:x}"] if isinstance(decision, RunKnown) else decision
    return [type(decision).__name__, *fields]


def _decoded(name: str, fields: list[Any]) -> Decision:
    if name == "RunKnown":
        return RunKnown(int(fields[0], 16))
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
