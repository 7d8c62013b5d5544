"""The base class of displays, the ranks' output, and displays of lines: plain, or JSON for programs."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TextIO

from spark_hvd.runner.terminal import harmless, is_terminal
from spark_hvd.runner.watch import words
from spark_hvd.runner.watch.snapshot import RunSnapshot
from spark_hvd.runner.watch.summary import Summary
from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.words import count

_MAX_BACKLOG = 32 << 20


class Display(Protocol):
    """Shows one run. Only the thread that called ``run`` calls it, because a notebook's cell belongs to that thread."""

    def lines(self, rank: int, stream: str, text: str) -> None:
        """Write whole lines that a rank has printed.

        Args:
            rank: The rank; -1 for a note of ours.
            stream: "out" or "err".
            text: Lines, separated by newlines, without the last newline.
        """

    def show(self, view: RunView, now: float) -> None:
        """Take the state of the run, about four times a second. The display decides what to draw, and when.

        Args:
            view: The state.
            now: ``time.monotonic()``.
        """

    def end(self, summary: Summary | None) -> None:
        """Show the summary, if there is one, and release the terminal, after the run. Idempotent."""


class OutputQueue:
    """The ranks' output that is not written yet.

    Lines arrive in the hub's thread (:meth:`put`) and are written by the thread that called ``run`` (:meth:`take`),
    because in a notebook a thread's output goes to the cell that the thread belongs to.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, str, str]] = deque()
        self._queued = 0
        self._dropped = 0
        self._lock = threading.Lock()

    def put(self, rank: int, stream: str, text: str) -> None:
        """Add lines of a rank, from any thread. Beyond 32 MiB, the oldest are dropped, with a note."""
        with self._lock:
            self._queue.append((rank, stream, text))
            self._queued += len(text)
            while self._queued > _MAX_BACKLOG:
                _, _, old = self._queue.popleft()
                self._queued -= len(old)
                self._dropped += old.count("\n") + 1

    def take(self) -> Iterable[tuple[int, str, str]]:
        """Take what has arrived: the rank, or -1 for a note of ours, "out" or "err", and whole lines."""
        with self._lock:
            items, self._queue = self._queue, deque()
            dropped, self._dropped, self._queued = self._dropped, 0, 0
        if dropped:
            items.appendleft((-1, "err", f"({dropped} lines of the ranks arrived faster than they could be shown)"))
        return items


class LineWriter:
    """Writes the ranks' output to text streams, each line as ``[rank] line``; a terminal gets only text and colours.

    Nothing is written for a stream that is None.
    """

    def __init__(self, stdout: TextIO | None, stderr: TextIO | None) -> None:
        self._streams = {"out": stdout, "err": stderr}

    def write(self, rank: int, stream: str, text: str) -> None:
        """Write whole lines of a rank; for -1 without a number."""
        target = self._streams[stream]
        if target is not None:
            text = harmless(text) if is_terminal(target) else text
            prefix = f"[{rank}] " if rank >= 0 else ""
            target.write("".join(f"{prefix}{line}\n" for line in text.split("\n")))
            target.flush()


class LinesDisplay(Display):
    """Writes only the ranks' output."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def lines(self, rank: int, stream: str, text: str) -> None:
        self._writer.write(rank, stream, text)

    def show(self, view: RunView, now: float) -> None:
        """See base class."""

    def end(self, summary: Summary | None) -> None:
        """See base class."""


class Interval:
    """Decides when a regular action is due, first one interval after the first call."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next: float | None = None

    def over(self, now: float) -> bool:
        """Tell whether the action is due; if so, begin the next interval."""
        if self._next is None:
            self._next = now + self._seconds
        if now < self._next:
            return False
        self._next = max(self._next + self._seconds, now + self._seconds / 2)
        return True


class PlainDisplay(LinesDisplay):
    """Writes the ranks' output, and regularly a line of progress.

    A run that ends within the first interval and reports no steps shows only the ranks' output.
    """

    def __init__(self, writer: LineWriter, notes: LineWriter, interval: float = 30.0) -> None:
        super().__init__(writer)
        self._notes, self._interval, self._ended = notes, Interval(interval), False

    def show(self, view: RunView, now: float) -> None:
        """Write a line if it is due."""
        if self._interval.over(now) and (text := compact(view.snapshot(now))):
            self._notes.write(-1, "err", text)

    def end(self, summary: Summary | None) -> None:
        """Write the summary if it is worth showing."""
        if not self._ended and summary is not None and summary.worth_showing:
            self._notes.write(-1, "err", str(summary))
        self._ended = True


class JsonDisplay(Display):
    """Writes a JSON object per line with an ``event``: "output" for a line of a rank, "progress", or "summary".

    ``clock`` returns seconds since 1970, for the ``time`` of each event.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.time) -> None:
        self._stream, self._clock = stream, clock
        self._interval, self._ended = Interval(1.0), False

    def lines(self, rank: int, stream: str, text: str) -> None:
        """Write one event for each line."""
        self._write(*({"event": "output", "rank": rank, "stream": stream, "text": line} for line in text.split("\n")))

    def show(self, view: RunView, now: float) -> None:
        """Write the state if it is due."""
        if self._interval.over(now):
            self._write({"event": "progress", **view.snapshot(now).as_dict()})

    def end(self, summary: Summary | None) -> None:
        """Write the summary as the last event."""
        if not self._ended and summary is not None:
            self._write({"event": "summary", **summary.as_dict()})
        self._ended = True

    def _write(self, *events: dict[str, Any]) -> None:
        now = round(self._clock(), 3)
        for event in events:
            line = {"event": event.pop("event"), "time": now, **plain(event)}
            self._stream.write(json.dumps(line, allow_nan=False) + "\n")
        self._stream.flush()


def compact(snapshot: RunSnapshot) -> str:
    """Describe the run in one line; "" if only its time is known."""
    parts = [snapshot.title + ": " + words.duration(snapshot.seconds)]
    if not snapshot.heard:
        parts.append("no reports from the ranks yet")
    first = snapshot.rows[0] if snapshot.rows else None
    if first is not None and first.stage:
        epoch = f"epoch {words.epoch(first)} " if words.epoch(first) else ""
        parts.append(f"{epoch}step {words.step(first)}")
    if first is not None and first.metrics:
        parts.append(words.metrics(first.metrics))
    if snapshot.samples_per_second is not None:
        parts.append(f"{words.number(snapshot.samples_per_second)} samples/s")
    elif snapshot.steps_per_second is not None:
        parts.append(f"{words.number(snapshot.steps_per_second)} steps/s")
    for name, share in (("data", snapshot.data), ("communication", snapshot.communication)):
        if share is not None:
            parts.append(f"{name} {words.share(share)}")
    if snapshot.remaining is not None:
        parts.append(words.remaining(snapshot.remaining))
    if snapshot.slowest is not None:
        parts.append(f"slowest {words.slowest(snapshot.slowest)}")
    silent = [f"rank {row.rank} silent for {row.silent:.0f} s" for row in snapshot.rows if row.silent is not None]
    parts += silent[:3] + ([f"{len(silent) - 3} more silent"] if len(silent) > 3 else [])
    if len(parts) == 1:
        return ""
    if again := words.again(snapshot.restarts, snapshot.changes):
        parts.append(f"{again}, now {count(snapshot.size, 'rank')}")
    return ", ".join(parts)


def plain(value: Any) -> Any:
    """Replace nan and inf, which JSON lacks, by None, and drop insignificant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value
