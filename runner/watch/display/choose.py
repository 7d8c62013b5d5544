"""Chooses the display of a run, and replaces one that fails: a run never ends because it cannot be shown."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import TextIO

from spark_hvd.runner.terminal import is_terminal
from spark_hvd.runner.watch.display.lines import Display, JsonDisplay, LinesDisplay, LineWriter, PlainDisplay
from spark_hvd.runner.watch.display.notebook import NotebookDisplay
from spark_hvd.runner.watch.summary import Summary
from spark_hvd.runner.watch.view import RunView

_log = logging.getLogger(__name__)


def make_display(progress: str, verbose: int, stdout: TextIO | None, stderr: TextIO | None) -> Display:
    """Make the display for a run.

    The table and our own lines go to ``sys.stderr``, so ``sys.stdout`` has only the ranks' output, or with "json" only
    JSON lines. If streams are given, the ranks' output goes there, and errors of these streams are raised, because the
    caller needs to know of them.

    Args:
        progress: One of `CHOICES`. "auto" is the notebook in a notebook's kernel, the table if ``sys.stderr`` is a
            terminal, and otherwise plain lines.
        verbose: 0 shows nothing; the given streams still get output.
        stdout: Stream for the ranks' stdout; None for ``sys.stdout``.
        stderr: Stream for the ranks' stderr; None for ``sys.stderr``.
    """
    if verbose < 1:
        return LinesDisplay(LineWriter(stdout, stderr))
    if progress == "auto":
        progress = _automatic()
    both = LineWriter(stdout or sys.stdout, stderr or sys.stderr)
    given = {name for name, stream in (("out", stdout), ("err", stderr)) if stream is not None}
    display: Display
    match progress:
        case "json":
            display = JsonDisplay(stdout or sys.stdout)
            if stdout is not None:
                return _Shown(display, both, given - {"out"}, guarded=False)
            given.discard("out")
        case "table":
            from spark_hvd.runner.watch.display.table import TableDisplay  # rich takes a tenth of a second to import

            targets = {"out": stdout or sys.stdout, "err": stderr or sys.stderr}
            above = frozenset(name for name, target in targets.items() if is_terminal(target))
            display = TableDisplay(sys.stderr, both, above)
            given -= above
        case "notebook":
            display = NotebookDisplay(both)
        case "plain":
            display = PlainDisplay(both, LineWriter(None, sys.stderr))
        case _:
            display = LinesDisplay(both)
    then = None if progress in ("json", "off") else LinesDisplay(both)
    return _Shown(display, both, given, then)


class _Shown(Display):
    """A display whose errors end the display but not the run. Some of the ranks' streams may bypass it.

    Args:
        display: The display, which shows everything else.
        writer: Writes the streams that bypass the display; its errors are raised.
        past: Names of those streams, "out" and "err".
        then: Replaces a display that has failed, to show at least the ranks' output; None means nothing does.
        guarded: False raises errors of the display, too.
    """

    def __init__(
        self, display: Display, writer: LineWriter, past: set[str], then: Display | None = None, *, guarded: bool = True
    ) -> None:
        self._display: Display | None = display
        self._writer, self._past = writer, past
        self._next, self._guarded = then, guarded

    def lines(self, rank: int, stream: str, text: str) -> None:
        if stream in self._past:
            self._writer.write(rank, stream, text)
        else:
            self._do(lambda display: display.lines(rank, stream, text))

    def show(self, view: RunView, now: float) -> None:
        self._do(lambda display: display.show(view, now))

    def end(self, summary: Summary | None) -> None:
        self._do(lambda display: display.end(summary))

    def _do(self, what: Callable[[Display], None]) -> None:
        display = self._display
        if display is None:
            return
        try:
            what(display)
        except Exception as error:
            if not self._guarded:
                raise
            with contextlib.suppress(Exception):
                display.end(None)  # releases the terminal
            self._display, self._next = self._next, None
            if self._display is None:
                _log.warning("the ranks' output can no longer be shown (%s); the run continues", error)
            else:
                _log.warning("the run can no longer be shown (%s); it continues", error, exc_info=True)


def in_notebook() -> bool:
    """Tell whether this program runs in a notebook's kernel."""
    interactive = sys.modules.get("IPython")  # a notebook's kernel has imported it
    shell = None if interactive is None else interactive.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _automatic() -> str:
    if in_notebook():
        return "notebook"
    # A shell command in a notebook's cell (!python train.py) has a terminal without a cursor.
    plain = os.environ.get("TERM") in (None, "", "dumb") or "JPY_PARENT_PID" in os.environ
    return "table" if is_terminal(sys.stderr) and not plain else "plain"
