"""A run as JSON lines, for programs: one object a line, and nothing else."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from spark_hvd.runner.watch.display.lines import Display
from spark_hvd.runner.watch.summary import Summary
from spark_hvd.runner.watch.view import RunView

INTERVAL = 1.0


class JsonDisplay(Display):
    """Writes objects with an ``event``: "output" for each line of a rank, "progress", and "summary" at the end.

    Args:
        stream: Where they go.
        interval: Seconds between two of "progress".
        clock: Seconds since 1970, for the ``time`` of each event.
    """

    def __init__(self, stream: TextIO, interval: float = INTERVAL, clock: Callable[[], float] = time.time) -> None:
        self._stream = stream
        self._interval = interval
        self._clock = clock
        self._next: float | None = None
        self._ended = False

    def lines(self, rank: int, stream: str, text: str) -> None:
        """One event for each line."""
        self._write(*({"event": "output", "rank": rank, "stream": stream, "text": line} for line in text.split("\n")))

    def show(self, view: RunView, now: float) -> None:
        """Write the state if it is time."""
        if self._next is None:
            self._next = now + self._interval
        if now >= self._next:
            self._next = max(self._next + self._interval, now + self._interval / 2)
            self._write({"event": "progress", **view.snapshot(now).as_dict()})

    def end(self, summary: Summary | None) -> None:
        """Write the summary."""
        if not self._ended and summary is not None:
            self._write({"event": "summary", **summary.as_dict()})
        self._ended = True

    def _write(self, *events: dict[str, Any]) -> None:
        now = round(self._clock(), 3)
        for event in events:
            line = {"event": event.pop("event"), "time": now, **_plain(event)}
            self._stream.write(json.dumps(line, allow_nan=False) + "\n")
        self._stream.flush()


def _plain(value: Any) -> Any:
    """The value without what JSON has no word for (nan, inf), and without digits that mean nothing."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value
