"""A run as plain lines, for logs and pipes: what ranks print, and now and then a line on how far they are."""

from __future__ import annotations

from spark_hvd.runner.watch import words
from spark_hvd.runner.watch.display.lines import Display, LineWriter
from spark_hvd.runner.watch.snapshot import RunSnapshot
from spark_hvd.runner.watch.summary import Summary
from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.words import count

INTERVAL = 30.0


class LinesDisplay(Display):
    """Writes what ranks print, and nothing else.

    Args:
        writer: Where it goes.
    """

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def lines(self, rank: int, stream: str, text: str) -> None:
        """See base class."""
        self._writer.write(rank, stream, text)

    def show(self, view: RunView, now: float) -> None:
        """See base class."""

    def end(self, summary: Summary | None) -> None:
        """See base class."""


class PlainDisplay(LinesDisplay):
    """Writes how far the ranks are, besides what they print.

    A run that ends before the first interval is over, and tells of no steps, shows only what its ranks print.

    Args:
        writer: Where ranks' lines go.
        notes: Where our own lines go.
        interval: Seconds between two of them.
    """

    def __init__(self, writer: LineWriter, notes: LineWriter, interval: float = INTERVAL) -> None:
        super().__init__(writer)
        self._notes = notes
        self._interval = interval
        self._next: float | None = None
        self._ended = False

    def show(self, view: RunView, now: float) -> None:
        """Write a line if it is time."""
        if self._next is None:
            self._next = now + self._interval
        if now >= self._next:
            self._next = max(self._next + self._interval, now + self._interval / 2)
            if text := compact(view.snapshot(now)):
                self._notes.write(-1, "err", text)

    def end(self, summary: Summary | None) -> None:
        """Write the summary of a run that has something to tell."""
        if not self._ended and summary is not None and summary.worth_showing:
            self._notes.write(-1, "err", str(summary))
        self._ended = True


def compact(snapshot: RunSnapshot) -> str:
    """The run in one line; "" if nothing is known of it but that it runs."""
    parts = [snapshot.title + ": " + words.duration(snapshot.seconds)]
    if not snapshot.heard:
        parts.append("nothing heard of the ranks yet")
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
