"""Formats a snapshot of a run as lines of text of any width: a heading, a row for each rank, and notes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from spark_hvd.runner.terminal import harmless
from spark_hvd.runner.watch import words
from spark_hvd.runner.watch.snapshot import RankRow, RunSnapshot, shown_rows
from spark_hvd.world.words import count

T = TypeVar("T")
_GAP = "  "
_LEAST_NOTE = 14
"""Characters of the notes for which columns must make room."""
_VERDICT_LINES = 6


@dataclass(frozen=True, slots=True)
class Line:
    """One line and its style.

    ``style`` is one of rich's: "bold", "dim", "yellow", "red"; "" for none.
    """

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column of the table.

    If there is no room for all columns, those with the highest ``place`` are dropped first. ``whole`` is the cell of
    the whole run.
    """

    heading: str
    place: int
    cells: tuple[str, ...]
    whole: str = ""

    @property
    def width(self) -> int:
        """The number of characters in its longest cell."""
        return max(map(len, (self.heading, *self.cells, self.whole)))


def table(snapshot: RunSnapshot, width: int, most_rows: int) -> list[Line]:
    """Format the run as lines, and remove colours and line breaks from names that the user's function gave.

    No line is longer than ``width`` characters, and at most ``most_rows`` ranks are shown.
    """
    return [replace(line, text=_plain(line.text)) for line in _lines(snapshot, width, most_rows)]


def _plain(text: str) -> str:
    return harmless(text, colors=False).replace("\n", " ")


def _lines(snapshot: RunSnapshot, width: int, most_rows: int) -> list[Line]:
    title = Line(_cut(head(snapshot, width), width), "bold")
    if not snapshot.heard:
        return [title]
    rows, more = shown_rows(snapshot.rows, most_rows)
    notes = [words.note(row) for row in rows]
    longest = max(map(len, notes), default=0)
    columns = _that_fit(columns_of(rows, snapshot), width - (min(longest, _LEAST_NOTE) + len(_GAP) if longest else 0))
    lines = [title, Line(_cut(_GAP.join(column.heading.rjust(column.width) for column in columns), width), "dim")]
    for number, (row, note) in enumerate(zip(rows, notes, strict=True)):
        text = _GAP.join([column.cells[number].rjust(column.width) for column in columns] + [note] * bool(note))
        style = "dim" if row.quiet else "yellow" if row.skew is not None else ""
        lines.append(Line(_cut(text, width), style))
    if more:
        lines.append(Line(_cut(f"and {more} more", width), "dim"))
    if len(snapshot.rows) > 1 and any(column.whole for column in columns[1:]):
        lines.append(Line(_cut(_GAP.join(column.whole.rjust(column.width) for column in columns), width), "dim"))
    if snapshot.verdict:
        wrapped = [line for part in snapshot.verdict.splitlines() for line in textwrap.wrap(part, width)]
        lines += [Line(line, "red") for line in wrapped[:_VERDICT_LINES]]
    return lines


def head(snapshot: RunSnapshot, width: int) -> str:
    """Format the title, the time so far and the time left; parts that do not fit are left out, the last ones first."""
    parts = [snapshot.title, words.duration(snapshot.seconds)]
    if not snapshot.heard:
        parts.append("no reports from the ranks yet")
    if snapshot.remaining is not None:
        parts.append(words.remaining(snapshot.remaining))
    if again := words.again(snapshot.restarts, snapshot.changes):
        parts.append(f"{again}, now {count(snapshot.size, 'rank')}")
    while len(parts) > 2 and len("   ".join(parts)) > width:
        parts.pop()
    return "   ".join(parts)


def columns_of(rows: Sequence[RankRow], snapshot: RunSnapshot) -> list[TableColumn]:
    """Return all columns that are not empty, in order."""
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    steps = _column("steps/s", 3, rows, lambda row: _rate(row.steps_per_second))
    samples = _column(
        "samples/s", 3, rows, lambda row: _rate(row.samples_per_second), _rate(snapshot.samples_per_second)
    )
    columns = [
        _column("rank", 0, rows, lambda row: str(row.rank), "all"),
        _column("epoch", 4, rows, words.epoch),
        _column("step", 1, rows, words.step),
        *(_metric(name, 12 + place if place else 2, rows) for place, name in enumerate(metrics)),
        samples if any(samples.cells) else steps,
        _column("compute", 11, rows, lambda row: _share(row.compute), _share(snapshot.compute)),
        _column("data", 6, rows, lambda row: _share(row.data), _share(snapshot.data)),
        _column("comm", 5, rows, lambda row: _share(row.communication), _share(snapshot.communication)),
        _column("CPU", 8, rows, lambda row: _known("{:.1f}".format, row.cpu)),
        _column("memory", 9, rows, lambda row: _known(words.size, row.memory_bytes)),
        _column("GPU", 7, rows, lambda row: _share(row.gpu_utilization)),
        _column("GPU mem", 10, rows, lambda row: _known(words.size, row.gpu_memory_bytes)),
    ]
    return [column for column in columns if any(column.cells)]


def _column(
    heading: str, place: int, rows: Sequence[RankRow], cell: Callable[[RankRow], str], whole: str = ""
) -> TableColumn:
    return TableColumn(heading, place, tuple(map(cell, rows)), whole)


def _metric(name: str, place: int, rows: Sequence[RankRow]) -> TableColumn:
    return _column(name, place, rows, lambda row: _known(words.metric, row.metrics.get(name)))


def _known(text: Callable[[T], str], value: T | None) -> str:
    return "" if value is None else text(value)


def _rate(value: float | None) -> str:
    return _known(words.number, value)


def _share(value: float | None) -> str:
    return _known(words.share, value)


def _that_fit(columns: list[TableColumn], width: int) -> list[TableColumn]:
    """Drop the least important columns until the rest fits."""
    while len(columns) > 1 and sum(column.width + len(_GAP) for column in columns) - len(_GAP) > width:
        worst = max(columns, key=lambda column: column.place)
        columns = [column for column in columns if column is not worst]
    return columns


def _cut(text: str, width: int) -> str:
    text = text.rstrip()
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."
