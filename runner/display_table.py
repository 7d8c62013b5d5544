"""A run as a table that stays at the bottom of a terminal, while what ranks print goes by above it."""

from __future__ import annotations

import logging
import sys
from typing import TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from spark_hvd.runner.output import LineWriter
from spark_hvd.runner.run_view import RunView
from spark_hvd.runner.summary import Summary
from spark_hvd.runner.table_text import Line, table

_MOST_ROWS = 16
_OTHER_LINES = 5
"""Lines of the terminal that are not left to ranks: headings, the sum, and one for what is printed."""
_REFRESH = 0.2


class TableDisplay:
    """Draws the table with rich, in the caller's thread; what this program itself prints meanwhile goes above it too.

    The cursor is hidden until :meth:`end`, which leaves the last table, and the summary below it.

    Args:
        terminal: Where it is drawn.
        writer: Where those lines of ranks go that are not to be on this terminal.
        above: The streams of ranks, "out" and "err", that go above the table.
    """

    def __init__(self, terminal: TextIO, writer: LineWriter, above: frozenset[str]) -> None:
        self._console = Console(file=terminal, force_jupyter=False, highlight=False, markup=False, emoji=False)
        self._writer = writer
        self._above = above
        self._live = Live(console=self._console, auto_refresh=False)
        self._handlers: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._drawn = False
        self._next = 0.0
        self._last: tuple[RunView, float] | None = None

    def lines(self, rank: int, stream: str, text: str) -> None:
        """See the Protocol."""
        if stream not in self._above:
            self._writer.write(rank, stream, text)
            return
        prefix = f"[{rank}] " if rank >= 0 else ""
        marked = "\n".join(prefix + line for line in text.split("\n"))
        # Of control sequences only colours are left: others would move the cursor away from below the table.
        self._console.print(Text.from_ansi(marked) if "\x1b" in marked else Text(marked), soft_wrap=True)

    def show(self, view: RunView, now: float) -> None:
        """Draw."""
        if now < self._next:
            return
        self._next = now + _REFRESH
        if not self._live.is_started:
            self._live.start()
            self._take_handlers()
        self._last = view, now
        self._live.update(self._table(view, now), refresh=True)

    def end(self, summary: Summary | None) -> None:
        """Leave the last table and the summary, and let go of the terminal."""
        ...

    def _table(self, view: RunView, now: float) -> Group:
        width, height = self._console.size
        most = max(1, min(_MOST_ROWS, height - _OTHER_LINES))
        return Group(*(Text(line.text, line.style) for line in table(view.picture(now), width - 1, most)))
