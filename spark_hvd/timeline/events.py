"""What the file of a timeline holds, read back: spans and instants of all ranks, each with what kind of thing it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from spark_hvd.timeline import recorder as trace


class NotATraceError(ValueError):
    """A file is not in Chrome's trace-event format, or has nothing to look at."""


class PhaseKind(Enum):
    """What kind of thing a phase is."""

    STEP = "step"
    BACKWARD = "backward"
    OPERATION = "operation"
    NEGOTIATE = "negotiate"
    QUEUE = "queue"
    PACK = "pack"
    WIRE = "wire"
    WAIT = "wait"
    OTHER = "other"


_ACTIVITIES = {
    trace.STEP: PhaseKind.STEP,
    trace.BACKWARD: PhaseKind.BACKWARD,
    trace.QUEUE: PhaseKind.QUEUE,
    trace.BUCKET_FILL: PhaseKind.PACK,
    trace.SHARED_MEMORY: PhaseKind.WIRE,
    trace.WAIT: PhaseKind.WAIT,
    **dict.fromkeys(trace.OPERATIONS, PhaseKind.OPERATION),
}


@cache
def kind_of(phase: str) -> PhaseKind:
    """What kind of thing a phase is; GLOO_, NCCL_ or whatever else before an operation is that backend's wire."""
    if phase in _ACTIVITIES:
        return _ACTIVITIES[phase]
    if phase.startswith(trace.NEGOTIATE):
        return PhaseKind.NEGOTIATE
    if phase.startswith("MEMCPY_"):
        return PhaseKind.PACK
    if phase.rpartition("_")[2] in (*trace.OPERATIONS, "BCAST"):
        return PhaseKind.WIRE
    return PhaseKind.OTHER


@dataclass(frozen=True, slots=True)
class Span:
    """An event with a beginning and an end."""

    rank: int
    row: str
    phase: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Instant:
    """Something that happened at one moment."""

    rank: int
    row: str
    phase: str
    at: int
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedTrace:
    """What a file holds."""

    spans: Sequence[Span]
    instants: Sequence[Instant]
    names: Mapping[int, str]
    """The name of each rank, with its host."""
    truncated: bool
    """Whether the file ends before its closing bracket: the recording process did not get to close it."""


_SEPARATOR = re.compile(r"\s*,\s*")


def parse_trace(text: str) -> ParsedTrace:
    """Read a file of Chrome's trace-event format: an array, also one without its end, or an object that holds one.

    Times become nanoseconds from the first event on.

    Raises:
        NotATraceError: It is something else, or has neither spans nor instants.
    """
    entries, truncated = _entries(text)
    try:
        kinds = {entry["ph"] for entry in entries}
        rows = {
            (int(entry["pid"]), entry["tid"]): str(entry["args"]["name"]) for entry in _named(entries, "thread_name")
        }
        names = {int(entry["pid"]): str(entry["args"]["name"]) for entry in _named(entries, "process_name")}
        lasting = [entry for entry in entries if entry["ph"] == "X"]
        brief = [entry for entry in entries if entry["ph"] in ("i", "I")]
        zero = min((_ns(entry["ts"]) for entry in lasting + brief), default=0)
        spans = []
        for entry in lasting:
            start = _ns(entry["ts"]) - zero
            spans.append(Span(*_place(entry, rows), start, start + _ns(entry["dur"])))
        instants = [Instant(*_place(entry, rows), _ns(entry["ts"]) - zero, entry.get("args", {})) for entry in brief]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise NotATraceError(f"some entry is none of ours ({type(error).__name__}: {error})") from error
    if not spans and not instants:
        found = f"only entries of kind {', '.join(sorted(kinds))}" if kinds else "nothing"
        raise NotATraceError(f"it holds no events: no spans (X) and no instants (i), {found}")
    return ParsedTrace(spans, instants, names, truncated)


def _named(entries: Sequence[dict[str, Any]], what: str) -> Iterator[dict[str, Any]]:
    return (entry for entry in entries if entry["ph"] == "M" and entry["name"] == what)


def _place(entry: dict[str, Any], rows: Mapping[tuple[int, Any], str]) -> tuple[int, str, str]:
    rank, tid = int(entry["pid"]), entry["tid"]
    return rank, rows.get((rank, tid), str(tid)), str(entry["name"])


def _ns(us: float) -> int:
    return round(us * 1000)


def _entries(text: str) -> tuple[list[Any], bool]:
    """The entries of a file, and whether it is cut short."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        entries = _leading(text)
        if not entries and text.strip() not in ("", "["):
            raise NotATraceError("it is no JSON array of trace events") from None
        return entries, True
    if isinstance(whole, dict):
        whole = whole.get("traceEvents")
    if not isinstance(whole, list):
        raise NotATraceError("it is JSON, but no array of trace events")
    return whole, False


def _leading(text: str) -> list[Any]:
    """Parse what is complete of an array that breaks off."""
    decoder = json.JSONDecoder()
    entries: list[Any] = []
    start = re.match(r"\s*\[\s*", text)
    while start is not None:
        try:
            entry, end = decoder.raw_decode(text, start.end())
        except json.JSONDecodeError:
            break
        entries.append(entry)
        start = _SEPARATOR.match(text, end)
    return entries
