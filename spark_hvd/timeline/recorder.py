"""The parts of a timeline: the names of its phases, a recorder on every rank, and the writer of rank 0's file.

Nothing here talks to another rank. Whoever carries the events to rank 0 also measures how far the ranks' clocks are
apart; the writer puts all times on rank 0's clock. The file is Chrome's trace-event format as an array, one event a
line. That format does without its closing bracket, so a file that a crash cut short still opens.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

Event = list[Any]
"""``["X", row, phase, start_ns, end_ns, args]`` is a span, ``["i", row, phase, at_ns, args]`` an instant.

Times are ``time.monotonic_ns()`` of the rank that recorded it; `args` is a dict that JSON can carry, or None.
"""

_END_NS = 1 << 63

# Phases of named collectives. They use Horovod's words if it has them, so that scripts for its timelines keep working.

NEGOTIATE = "NEGOTIATE_"
"""Begins NEGOTIATE_ALLREDUCE and so on: from the call until all ranks are known to be ready."""
RANK_READY = "RANK_READY"
"""Instant inside a negotiation: the rank in `args["rank"]` is ready."""
QUEUE = "QUEUE"
"""All ranks are ready; others' turns come first."""
MEMCPY_IN_FUSION_BUFFER = "MEMCPY_IN_FUSION_BUFFER"
"""Tensors are packed into the flat buffer in which they travel together."""
MEMCPY_OUT_FUSION_BUFFER = "MEMCPY_OUT_FUSION_BUFFER"
"""Results are copied out of it."""
GLOO_ALLREDUCE = "GLOO_ALLREDUCE"
"""On the wire over Gloo; for other operations see :func:`wire_phase`."""
NCCL_ALLREDUCE = "NCCL_ALLREDUCE"
"""On the wire over NCCL."""
CYCLE_START = "CYCLE_START"
"""Instant: the engine begins another round of looking for what is ready. Recorded only with `mark_cycles`."""

# Phases of gradient reducers.

STEP = "STEP"
"""From the end of one optimizer step to the end of the next."""
BACKWARD = "BACKWARD"
"""From the first gradient of a backward pass to its end."""
BUCKET_FILL = "BUCKET_FILL"
"""Gradients are brought into their bucket's buffer."""
SHARED_MEMORY = "SHARED_MEMORY"
"""A bucket is summed in memory that the ranks of a host share: what the wire phase is there."""
WAIT = "WAIT"
"""The step can do nothing but wait for communication."""


def negotiate_phase(kind: str) -> str:
    """Return the negotiation of a kind of collective: "allreduce" gives NEGOTIATE_ALLREDUCE."""
    return NEGOTIATE + kind.upper()


def wire_phase(backend: str, kind: str) -> str:
    """Return a collective on the wire: "gloo" and "allreduce" give GLOO_ALLREDUCE.

    A broadcast is Horovod's GLOO_BCAST.
    """
    return f"{backend.upper()}_{'BCAST' if kind == 'broadcast' else kind.upper()}"


def is_event(each: object) -> bool:
    """Return whether :class:`TraceWriter` can write this; other processes send it."""
    match each:
        case ["X", str(), str(), int(start), int(end), dict() | None]:
            return 0 <= start < _END_NS and 0 <= end < _END_NS
        case ["i", str(), str(), int(at), dict() | None]:
            return 0 <= at < _END_NS
    return False


class Recorder:
    """Gathers one rank's events and ships them in batches. Any thread may record.

    To record is to append to a list, which needs no lock. The spans of one row must nest or lie apart: viewers cannot
    show two that overlap in part.

    Args:
        ship: Takes a batch, in the order of recording. It is called by whichever thread fills the batch or calls
            :meth:`flush`, one call at a time; it should hand the batch on at once, and must neither raise nor flush.
        mark_cycles: Whether the engine is to record CYCLE_START.
        batch: Events that make a batch.
    """

    def __init__(self, ship: Callable[[list[Event]], None], mark_cycles: bool = False, batch: int = 2048) -> None:
        self.mark_cycles = mark_cycles
        self._ship = ship
        self._batch = batch
        self._events: list[Event] = []
        self._shipping = threading.Lock()  # one batch at a time: a rank's events arrive in their order

    def span(self, row: str, phase: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Record that `phase` of `row` lasted from `start_ns` to `end_ns`, both ``time.monotonic_ns()``."""
        events = self._events
        events.append(["X", row, phase, start_ns, end_ns, args or None])
        if len(events) >= self._batch:
            self._ship_full()

    def instant(self, row: str, phase: str, at_ns: int, **args: Any) -> None:
        """Record that `phase` of `row` happened at `at_ns`, a ``time.monotonic_ns()``."""
        events = self._events
        events.append(["i", row, phase, at_ns, args or None])
        if len(events) >= self._batch:
            self._ship_full()

    def flush(self) -> None:
        """Ship what has gathered."""
        with self._shipping:
            self._ship_gathered()

    def _ship_full(self) -> None:
        # While another thread ships, nobody waits for it: the next event to be recorded finds the list still full.
        if self._shipping.acquire(blocking=False):
            try:
                self._ship_gathered()
            finally:
                self._shipping.release()

    def _ship_gathered(self) -> None:
        # Copying and deleting the head are two atomic steps. Appends between them land behind it, so none is lost.
        count = len(self._events)
        if count:
            batch = self._events[:count]
            del self._events[:count]
            self._ship(batch)


class TraceWriter:
    """Writes the events of all ranks to one file as they come in. Any thread may add.

    A rank is a process of the trace, a row one of its threads. Zero is when the writer was made, or the first event of
    the first batch if that is earlier; later batches are cut there, as Perfetto drops negative times. What is at the
    path is replaced; ``hosts[r]`` is the host of rank r.

    Raises:
        OSError: The file cannot be written: FileNotFoundError or NotADirectoryError for its folder, PermissionError,
            IsADirectoryError.
    """

    def __init__(self, path: str | os.PathLike[str], hosts: Sequence[str]) -> None:
        self._made_ns = time.monotonic_ns()
        self._zero_ns: int | None = None
        self._rows: dict[tuple[int, str], int] = {}
        self._heads: dict[tuple[int, str, str, str], str] = {}
        self._ranks = len(hosts)
        self._encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
        self._lock = threading.Lock()  # a batch is written whole, and numbers of rows are given once
        self._file = _open(Path(path))
        self._file.write("[\n")
        lines = []
        for rank, host in enumerate(hosts):
            lines.append(self._metadata(rank, 0, "process_name", name=f"rank {rank} ({host})"))
            lines.append(self._metadata(rank, 0, "process_sort_index", sort_index=rank))
        self._file.write(",\n".join(lines))
        self._file.flush()

    def add(self, rank: int, events: Sequence[Event], offset_ns: int) -> None:
        """Append a rank's events.

        ``offset_ns`` is added to its times. Of two values for a rank, spans in different batches would no longer nest.

        Raises:
            OSError: The disk is full, or the like.
            ValueError: The writer is closed.
        """
        if not events:
            return
        with self._lock:
            if self._zero_ns is None:
                self._zero_ns = min(self._made_ns, offset_ns + min(event[3] for event in events))
            shift = offset_ns - self._zero_ns
            lines = [line for event in events for line in self._lines(rank, event, shift)]
            self._file.write(",\n" + ",\n".join(lines))
            self._file.flush()

    def close(self) -> None:
        """Complete the file; a second call does nothing."""
        with self._lock:
            if not self._file.closed:
                with self._file:  # closed also if the disk is full
                    self._file.write("\n]\n")

    def _lines(self, rank: int, event: Event, shift: int) -> list[str]:
        # Rank 0 comes here for every event of every rank, so what repeats is encoded once.
        lines = []
        kind, row, phase, start = event[:4]
        head = self._heads.get((rank, row, kind, phase))
        if head is None:
            if (rank, row) not in self._rows:
                lines += self._introduction(rank, row)
            entry = {"ph": kind, "name": phase, "pid": rank, "tid": self._rows[rank, row]}
            if kind == "i":
                entry["s"] = "t"  # a mark on its own row, not across all of them
            head = self._heads[rank, row, kind, phase] = self._encode(entry)[:-1]
        begin = max(0, start + shift)
        lasts = f',"dur":{max(0, event[4] + shift - begin) / 1000}' if kind == "X" else ""
        args = f',"args":{self._encode(event[-1])}' if event[-1] else ""
        lines.append(f'{head},"ts":{begin / 1000}{lasts}{args}}}')
        return lines

    def _introduction(self, rank: int, row: str) -> list[str]:
        place = len(self._rows)
        # Perfetto takes a thread whose number is its process's for the main one and lists it first; no row is that.
        tid = self._rows[rank, row] = self._ranks + place
        return [
            self._metadata(rank, tid, "thread_name", name=row),
            self._metadata(rank, tid, "thread_sort_index", sort_index=place),
        ]

    def _metadata(self, rank: int, tid: int, what: str, **args: Any) -> str:
        return self._encode({"ph": "M", "name": what, "pid": rank, "tid": tid, "ts": 0, "args": args})


def _open(path: Path) -> IO[str]:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        reason = {
            FileNotFoundError: f"the folder {path.parent} does not exist; create it on rank 0's host",
            NotADirectoryError: f"{path.parent} is not a folder",
            IsADirectoryError: "it is a folder; name a file",
            PermissionError: f"no permission to write it in {path.parent}",
        }.get(type(error), error.strerror)
        raise OSError(error.errno, f"the timeline cannot be written to {path}: {reason}") from None
