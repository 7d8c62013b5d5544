"""Any benchmark's tables as a picture: a panel for each column of numbers, a bar for each row."""

from __future__ import annotations

import re
from pathlib import Path

Rows = list[list[str]]
"""A table as text, its heads first."""
_NUMBER = re.compile(r"([+-]?(?:\d[\d,]*)?\.?\d+(?:e[+-]?\d+)?)(?: ?%| [a-zA-Z/]+)?")
_PANELS = 4
_LONG = 44


def tables(text: str) -> list[Rows]:
    """The tables in what a benchmark prints, Markdown or CSV; those without rows are left out."""
    found: list[Rows] = []
    ended = True
    for line in text.splitlines():
        markdown = line.startswith("|")
        if re.fullmatch(r"[|:\- ]+", line) and markdown:
            continue
        cells = [cell.strip() for cell in (line.strip().strip("|").split("|") if markdown else line.split(","))]
        if not markdown and (len(cells) < 2 or " " in line or not (ended or len(cells) == len(found[-1][0]))):
            ended = True
        elif ended:
            found.append([cells])
            ended = False
        else:
            found[-1].append(cells)
    return [rows for rows in found if len(rows) > 1]


def number(cell: str) -> float | None:
    """What a cell says, without its unit; None where that is no number, as with a range."""
    found = _NUMBER.fullmatch(cell)
    return None if found is None else float(found[1].replace(",", ""))


def draw(text: str, path: Path) -> bool:
    """Draw the tables of a benchmark.

    Args:
        text: What it has printed.
        path: The PNG to write; its folder is made.

    Returns:
        Whether there is anything to draw.
    """
    drawn = [(rows, columns) for rows in tables(text) if (columns := _columns(rows))]
    if not drawn:
        return False
    from spark_hvd.runner.watch.display.figures import COLOURS, SMALL, Figure

    heights = [0.9 + 0.22 * (len(rows) - 1) for rows, _ in drawn]
    figure = Figure(figsize=(10.0, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(drawn), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (rows, columns) in zip(parts, drawn, strict=True):
        labels = [" ".join(cell for cell in row[: columns[0]] if cell)[:_LONG] for row in rows[1:]]
        panels = part.subplots(1, len(columns), squeeze=False, sharey=True)[0]
        for place, (axes, column) in enumerate(zip(panels, columns, strict=True)):
            values = [number(row[column]) if column < len(row) else None for row in rows[1:]]
            bars = axes.barh(range(len(labels)), [value or 0.0 for value in values], color=COLOURS[place])
            said = [row[column] if value is not None else "" for row, value in zip(rows[1:], values, strict=True)]
            axes.bar_label(bars, said, fontsize=SMALL, padding=2)
            axes.margins(x=0.25)
            axes.set_title(rows[0][column], fontsize=SMALL, loc="left")
            axes.set_yticks(range(len(labels)), labels, fontsize=SMALL)
            axes.tick_params(labelsize=SMALL)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def _columns(rows: Rows) -> list[int]:
    """Where the numbers are: not in the first column, which names the rows."""
    found = []
    for column in range(1, len(rows[0])):
        cells = [row[column] for row in rows[1:] if column < len(row) and row[column]]
        if cells and all(number(cell) is not None for cell in cells):
            found.append(column)
    return found[:_PANELS]
