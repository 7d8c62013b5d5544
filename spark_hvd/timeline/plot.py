"""Draws a trace: a band for every rank, in it a lane for every kind of activity, time from left to right.

The only module of the core that imports matplotlib.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from spark_hvd.timeline.events import ParsedTrace, PhaseKind, Span, kind_of
from spark_hvd.world import palette

# Lanes from top to bottom. An operation only encloses what is drawn anyway, and a step is drawn as its end.
_COLOURS = {
    PhaseKind.BACKWARD: palette.GREY,
    PhaseKind.PACK: palette.ORANGE,
    PhaseKind.NEGOTIATE: palette.PURPLE,
    PhaseKind.QUEUE: palette.YELLOW,
    PhaseKind.WIRE: palette.BLUE,
    PhaseKind.WAIT: palette.VERMILION,
    PhaseKind.OTHER: palette.GREEN,
}
_LEVELS = 4
"""Most spans of a lane that are drawn below each other where they overlap."""
_MS = 1e6

Colour = tuple[float, float, float]
Bar = tuple[int, int, str]
"""Start, end and phase."""


class Picture(Figure):
    """A figure that a notebook shows by itself: pyplot, which would see to it, need not be loaded."""

    def _repr_png_(self) -> bytes:
        target = io.BytesIO()
        self.savefig(target, format="png", dpi=100)
        return target.getvalue()


def draw(events: ParsedTrace, picture: Path, from_ms: float | None = None, to_ms: float | None = None) -> None:
    """Draw a trace into a file.

    Args:
        events: The trace.
        picture: The file to write; its ending says in which format.
        from_ms: Where to begin, in milliseconds from the first event; None: there.
        to_ms: Where to end; None: at the last span's end.

    Raises:
        OSError: The picture cannot be written.
        ValueError: There is nothing to draw in this window, or matplotlib does not know the format.
    """
    figure_of(events, from_ms, to_ms).savefig(picture, dpi=150)


def figure_of(events: ParsedTrace, from_ms: float | None = None, to_ms: float | None = None) -> Figure:
    """Draw a trace.

    Args:
        events: The trace.
        from_ms: Where to begin, in milliseconds from the first event; None: there.
        to_ms: Where to end; None: at the last span's end.

    Raises:
        ValueError: There is nothing to draw in this window.
    """
    begin = 0.0 if from_ms is None else from_ms
    end = max((span.end / _MS for span in events.spans), default=0.0) if to_ms is None else to_ms
    shown = [span for span in events.spans if span.start / _MS < end and span.end / _MS > begin]
    bars = [span for span in shown if kind_of(span.phase) in _COLOURS]
    if not bars:
        raise ValueError(f"nothing happened between {begin:g} and {end:g} ms")
    colours = _colours(bars)
    lanes = [activity for activity in _COLOURS if any(kind_of(bar.phase) is activity for bar in bars)]
    ranks = sorted({bar.rank for bar in bars})
    band = len(lanes) + 1
    figure = Picture(figsize=(12, 1.2 + 0.22 * band * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    for number, activity in enumerate(lanes):
        found = [_lane(bars, rank, activity) for rank in ranks]
        height = 0.9 / max(level + 1 for lane in found for level, _ in lane)
        for place, lane in enumerate(found):
            _draw_lane(axes, lane, place * band + number, height, colours, (end - begin) / 500)
    for place, rank in enumerate(ranks):
        ends = [
            span.end / _MS
            for span in shown
            if span.rank == rank and kind_of(span.phase) is PhaseKind.STEP and span.end / _MS <= end
        ]
        axes.vlines(ends, place * band, place * band + len(lanes), colors="black", linewidth=0.8)
    axes.set_yticks(
        [place * band + len(lanes) / 2 for place in range(len(ranks))],
        [events.names.get(rank, f"rank {rank}") for rank in ranks],
    )
    axes.set_ylim(band * len(ranks) - 0.5, -0.5)
    axes.set_xlim(begin, end)
    axes.set_xlabel("ms (black lines: ends of steps)" if any(s.phase == "STEP" for s in shown) else "ms")
    axes.spines[["left", "right", "top"]].set_visible(False)
    figure.legend(
        handles=[Patch(color=colour, label=phase) for phase, colour in colours.items()],
        loc="outside upper center",
        ncols=5,
        frameon=False,
    )
    return figure


def _colours(bars: Iterable[Span]) -> dict[str, Colour]:
    """A colour for each phase, in the order of the lanes: its activity's, lighter for each further phase of it."""
    phases: dict[PhaseKind, list[str]] = defaultdict(list)
    for phase in sorted({bar.phase for bar in bars}):
        phases[kind_of(phase)].append(phase)
    found = {}
    for activity, colour in _COLOURS.items():
        red, green, blue = to_rgb(colour)
        for number, phase in enumerate(phases[activity]):
            white = 0.6 * number / len(phases[activity])
            found[phase] = red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white
    return found


def _lane(bars: Sequence[Span], rank: int, activity: PhaseKind) -> list[tuple[int, Bar]]:
    """The bars of a lane, each with its level: the first on which it meets no other; the last level takes the rest."""
    # Tensors that travel in one buffer have the same spans: one bar is enough.
    lane = {
        (span.start, span.end, span.phase) for span in bars if span.rank == rank and kind_of(span.phase) is activity
    }
    ends = [0] * _LEVELS
    found = []
    for start, end, phase in sorted(lane):
        level = next((level for level in range(_LEVELS - 1) if ends[level] <= start), _LEVELS - 1)
        ends[level] = end
        found.append((level, (start, end, phase)))
    return found


def _draw_lane(
    axes: Axes, lane: Sequence[tuple[int, Bar]], top: float, height: float, colours: Mapping[str, Colour], thin: float
) -> None:
    pieces: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for level, (start, end, phase) in lane:
        pieces[level, phase].append((start / _MS, (end - start) / _MS))
    for (level, phase), bars in pieces.items():
        # A white edge tells a bar from the next one, but would leave nothing of a thin one.
        edges = ["white" if width > thin else colours[phase] for _, width in bars]
        axes.broken_barh(
            bars, (top + level * height, height), facecolor=colours[phase], edgecolors=edges, linewidth=0.4
        )
