"""Common parts of all plots: figures of one style, curves with bands, marks of generations.

Figures are made without pyplot, so they need no display and do not change a program's own plotting state.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spark_hvd.world.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION

try:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
    from matplotlib.patches import Patch as Patch
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(f"plots need matplotlib: pip install matplotlib ({error})") from error

if TYPE_CHECKING:
    from spark_hvd.runner.watch.history import Generation

COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
DASHES: tuple[str, ...] = ("-", "--", "-.", ":")
SIZE = (6.0, 3.0)
FONT, SMALL = 8, 7
_NAME_WIDTH = 0.25
"""Width of a generation's name, as a fraction of the plot's width."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line with an optional band around it.

    ``low`` and ``high`` are the band's edges, with a value for each point. By default, each curve has the next colour
    and its own dash pattern.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = field(default=())
    high: Sequence[float] = field(default=())
    points: bool = False
    colour: str | None = None
    dash: str | None = None


class Picture(Figure):
    """A figure that a notebook shows by itself, without pyplot."""

    def _repr_png_(self) -> bytes:
        target = io.BytesIO()
        self.savefig(target, format="png", dpi=100)
        return target.getvalue()


def figure_of(width: float = SIZE[0], height: float = SIZE[1], panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Make a figure in our style, with panels side by side."""
    figure = Picture(figsize=(width, height), layout="constrained")
    found = list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=FONT)
        axes.grid(axis="y", linewidth=0.5, color="#E6E6E6")
        axes.set_axisbelow(True)
    return figure, found


def draw(
    axes: Axes, curves: Sequence[Curve], *, x: str = "", y: str = "", title: str = "", whole: bool = False
) -> None:
    """Draw curves and label them. A single curve gets no label; ``whole`` says that x has only whole numbers."""
    for number, curve in enumerate(curves):
        colour = curve.colour or COLOURS[number % len(COLOURS)]
        dash = curve.dash or DASHES[number % len(DASHES)]
        if len(curve.low):
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)
        marker = "o" if curve.points or len(curve.x) < 2 else None
        axes.plot(curve.x, curve.y, color=colour, linestyle=dash, linewidth=1.4, marker=marker, ms=3, label=curve.label)
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x, fontsize=FONT)
    axes.set_ylabel(y, fontsize=FONT)
    axes.set_title(title, fontsize=FONT + 1, loc="left")
    if len(curves) > 1:
        axes.legend(fontsize=SMALL, frameon=False, ncols=1 + (len(curves) > 4))


def mark(axes: Axes, generations: Iterable[tuple[float, Generation]]) -> None:
    """Draw labelled lines where worlds begin; labels that would overlap are stacked."""
    left, right = axes.get_xlim()
    ends: list[float] = []  # where the last name of each row ends, as a fraction of the axes
    for place, one in generations:
        axes.axvline(place, color="black", linewidth=0.8, linestyle=":")
        at = (place - left) / (right - left)
        row = next((row for row, end in enumerate(ends) if end <= at), len(ends))
        ends[row : row + 1] = [at + _NAME_WIDTH]
        axes.annotate(
            f" generation {one.number}, {one.size} rank{'s' * (one.size != 1)}",
            (place, 1),
            (0, row * (SMALL + 1)),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=SMALL,
            va="bottom",
        )
    if ends:  # the title goes above them
        title = axes.get_title(loc="left")
        axes.set_title(title, fontsize=FONT + 1, loc="left", pad=6 + len(ends) * (SMALL + 1))
