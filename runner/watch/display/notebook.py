"""Shows a run as a table in a notebook's cell, updated in place without widgets, and kept in the saved notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from spark_hvd.runner.watch import words
from spark_hvd.runner.watch.display.lines import LinesDisplay, LineWriter
from spark_hvd.runner.watch.display.text import columns_of, head, table
from spark_hvd.runner.watch.snapshot import RankRow, RunSnapshot, shown_rows
from spark_hvd.runner.watch.summary import Summary
from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.palette import SHARES, VERMILION

_INTERVAL = 0.5
_MOST_ROWS = 32
_TEXT_WIDTH = 120
_BAR_PIXELS = 120
# Notebooks are light or dark, so text inherits its colour.
_TABLE = "color:inherit;border-collapse:collapse;font-variant-numeric:tabular-nums"
_CELL = "text-align:right;padding:1px 8px;white-space:nowrap"
_LEFT = "text-align:left;padding:1px 8px;white-space:nowrap"
_FAINT = "opacity:.6"
_ALARM = f"color:{VERMILION};white-space:pre-wrap"


class NotebookDisplay(LinesDisplay):
    """Shows HTML in the cell that called ``run``, with the ranks' output below it."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__(writer)
        self._handle: Any = None
        self._next = 0.0
        self._latest: tuple[RunView, float] | None = None
        self._ended = False

    def show(self, view: RunView, now: float) -> None:
        """Draw the table, at most twice a second."""
        self._latest = view, now
        if now < self._next:
            return
        self._next = now + _INTERVAL
        self._draw(view.snapshot(now), None)

    def end(self, summary: Summary | None) -> None:
        """Draw the table for the last time, with the summary."""
        if not self._ended and self._latest is not None:
            view, now = self._latest
            shown = summary if summary is not None and summary.worth_showing else None
            self._draw(view.snapshot(now).at_end(), shown)
        self._ended = True

    def _draw(self, snapshot: RunSnapshot, summary: Summary | None) -> None:
        from IPython.display import display  # a kernel always has IPython

        text = "\n".join(line.text for line in table(snapshot, _TEXT_WIDTH, _MOST_ROWS))
        bundle = {"text/html": page(snapshot, summary), "text/plain": f"{text}\n{summary}" if summary else text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)


def page(snapshot: RunSnapshot, summary: Summary | None = None) -> str:
    """Draw the run as HTML, with all texts of the user and the ranks escaped."""
    title = f'<b style="white-space:pre">{html.escape(head(snapshot, 1000))}</b>'
    if not snapshot.heard:
        return f"<div>{title}{summary._repr_html_() if summary else ''}</div>"
    rows, more = shown_rows(snapshot.rows, _MOST_ROWS)
    columns = [column for column in columns_of(rows, snapshot) if column.heading != "compute"]
    body = "".join(
        _tr([column.cells[number] for column in columns], _bar(row), words.note(row), _style(row))
        for number, row in enumerate(rows)
    )
    if more:
        body += _tr([f"and {more} more"], "", "", _FAINT)
    if len(snapshot.rows) > 1:
        body += _tr([column.whole for column in columns], _bar(snapshot), "", _FAINT)
    headings = "".join(f'<th style="{_CELL}">{html.escape(column.heading)}</th>' for column in columns)
    legend = " ".join(
        f'<span style="color:{color}">&#9632;</span> {name}'
        for name, color in SHARES.items()
        if any(getattr(row, name) is not None for row in rows)
    )
    verdict = f'<pre style="{_ALARM}">{html.escape(snapshot.verdict)}</pre>' if snapshot.verdict else ""
    return (
        f"<div>{title}"
        f'<table style="{_TABLE}"><thead><tr style="{_FAINT}">{headings}<th style="{_LEFT}">{legend}</th><th></th></tr>'
        f"</thead><tbody>{body}</tbody></table>{verdict}{summary._repr_html_() if summary else ''}</div>"
    )


def _tr(cells: Sequence[str], bar: str, note: str, style: str) -> str:
    inner = "".join(f'<td style="{_CELL}">{html.escape(cell)}</td>' for cell in cells)
    return f'<tr style="{style}">{inner}<td style="{_LEFT}">{bar}</td><td style="{_LEFT}">{html.escape(note)}</td></tr>'


def _bar(of: RankRow | RunSnapshot) -> str:
    """Draw the shares of time as a strip of three colours."""
    known = {name: share for name in SHARES if (share := getattr(of, name)) is not None}
    parts = "".join(
        f'<span style="display:inline-block;height:.7em;width:{share * _BAR_PIXELS:.0f}px;background:{SHARES[name]}">'
        "</span>"
        for name, share in known.items()
    )
    title = ", ".join(f"{name} {words.share(share)}" for name, share in known.items())
    return f'<span title="{title}">{parts}</span>' if known else ""


def _style(row: RankRow) -> str:
    if row.quiet:
        return _FAINT
    return "font-weight:bold" if row.skew is not None else ""
