"""Shows a run as a table at the bottom of a terminal, with the ranks' output scrolling above it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import ExitStack
from typing import TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from spark_hvd.runner.terminal import harmless
from spark_hvd.runner.watch.display.lines import Display, LineWriter
from spark_hvd.runner.watch.display.text import table
from spark_hvd.runner.watch.snapshot import RunSnapshot
from spark_hvd.runner.watch.summary import Summary
from spark_hvd.runner.watch.view import RunView

_MOST_ROWS = 16
_OTHER_LINES = 5
"""Lines of the terminal that are not for ranks: headings, the total, and one for output."""
_INTERVAL = 0.2
_drawing = threading.Lock()
"""Held by the run whose table is shown; two tables would draw over each other."""


class TableDisplay(Display):
    """Draws the table with rich, in the caller's thread; this program's own output also goes above it.

    The cursor is hidden until :meth:`end`, which leaves the last table, with the summary below it. ``writer`` writes
    the ranks' lines that are not for this terminal; ``above`` names the streams that go above the table.
    """

    def __init__(self, terminal: TextIO, writer: LineWriter, above: frozenset[str]) -> None:
        self._console = Console(
            file=terminal, force_jupyter=False, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._writer = writer
        self._above = above
        self._live = Live(console=self._console, auto_refresh=False)
        self._closing = ExitStack()
        self._next = 0.0
        self._latest: tuple[RunView, float] | None = None
        self._ended = False

    def lines(self, rank: int, stream: str, text: str) -> None:
        if stream not in self._above:
            self._writer.write(rank, stream, text)
            return
        prefix = f"[{rank}] " if rank >= 0 else ""
        marked = "\n".join(prefix + line for line in harmless(text).split("\n"))
        self._console.print(Text.from_ansi(marked) if "\x1b" in marked else Text(marked))

    def show(self, view: RunView, now: float) -> None:
        """Draw the table, at most five times a second."""
        self._latest = view, now
        if now < self._next:
            return
        self._next = now + _INTERVAL
        if not self._live.is_started:
            if not _drawing.acquire(blocking=False):
                return
            self._closing.callback(_drawing.release)
            self._live.start()
            self._closing.callback(self._live.stop)
            self._take_log_handlers()
        self._live.update(self._lines_of(view.snapshot(now)), refresh=True)

    def end(self, summary: Summary | None) -> None:
        """Leave the last table and the summary, and release the terminal."""
        if self._ended:
            return
        self._ended = True
        with self._closing:
            if self._latest is not None:
                view, now = self._latest
                self._live.update(self._lines_of(view.snapshot(now).at_end()))
        if summary is not None and summary.worth_showing:
            self._console.print(Text(str(summary)))

    def _lines_of(self, snapshot: RunSnapshot) -> Group:
        width, height = self._size()
        most = max(1, min(_MOST_ROWS, height - _OTHER_LINES))
        # Some terminals begin another line after one that is as wide as the terminal.
        return Group(*(Text(line.text, line.style) for line in table(snapshot, width - 1, most)))

    def _size(self) -> tuple[int, int]:
        """Return the terminal's own size; rich uses COLUMNS and LINES, which may belong to another terminal."""
        try:
            return os.get_terminal_size(self._console.file.fileno())
        except (OSError, ValueError):  # not a terminal; the last table is still printed
            return self._console.size

    def _take_log_handlers(self) -> None:
        """Redirect log handlers to rich. They hold the original streams, whose output rich would not see."""
        proxied = {getattr(proxy, "rich_proxied_file", None): proxy for proxy in (sys.stdout, sys.stderr)}
        for logger in (logging.getLogger(), logging.getLogger("spark_hvd")):
            for handler in logger.handlers:
                if isinstance(handler, logging.StreamHandler) and (proxy := proxied.get(handler.stream)) is not None:
                    self._closing.callback(handler.setStream, handler.stream)
                    handler.setStream(cast(TextIO, proxy))
