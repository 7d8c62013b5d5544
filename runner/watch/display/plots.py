"""Draws the history of a run as matplotlib figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from spark_hvd.runner.watch.display.figures import FONT, SIZE, Axes, Curve, Figure, Patch, draw, figure_of, mark
from spark_hvd.world.palette import SHARES

if TYPE_CHECKING:
    from spark_hvd.runner.watch.history import Point, RunHistory

OUTSIDE = "#DDDDDD"
_MOST_LINES = 8
"""Maximum number of ranks with a line each; more ranks are drawn as a band."""
_GRID = 400
_SPAN = 0.9
"""Minimum seconds over which a speed is measured; the speed of single steps is noise."""
_EDGE = 0.05
"""Fraction of the width by which a line may begin after the others, or end before them, and is still extended."""
_MOST_EPOCHS = 60
"""Maximum number of epochs that are marked in a lane of the timeline; more marks would hide it."""


def plot_loss(history: RunHistory, metric: str = "loss") -> Figure:
    """Draw a metric over the steps: the mean of the ranks, in a band from minimum to maximum; a line for each stage.

    Args:
        history: The history of the run.
        metric: A name that was given to `hvd.progress`.

    Raises:
        ValueError: There is nothing to draw.
    """
    _check(history)
    if metric not in history.metrics:
        reported = ", ".join(map(repr, history.metrics)) or "no metrics"
        raise ValueError(
            f"metric={metric!r}: the ranks reported {reported}; give it to hvd.progress, as in "
            f"bar.report({metric}=value)"
        )
    ranks = [history.points(rank) for rank in history.ranks]
    stages = list(dict.fromkeys(point.stage for points in ranks for point in points))
    curves = []
    for stage in stages:
        lines = [_line(points, stage, metric) for points in ranks]
        lines = [line for line in lines if line[0]]
        if lines:
            curves.append(_mean(stage or "all", lines))
    if not curves:
        raise ValueError(f"metric={metric!r}: none of its values is a finite number")
    figure, (axes,) = figure_of()
    band = f": mean and range of {len(ranks)} ranks" if any(curve.low for curve in curves) else ""
    draw(axes, curves, x="steps", y=metric, title=f"{metric}{band}", whole=True)
    steps = {point.generation: point.total_steps for point in reversed(ranks[0])}
    mark(axes, [(steps[one.number], one) for one in history.generations[1:] if one.number in steps])
    return figure


def plot_throughput(history: RunHistory) -> Figure:
    """Draw the speed of each rank over time: samples per second, or steps if samples are not counted.

    Up to eight ranks have a line each. For more ranks, it draws their mean, their range, and the slowest.

    Raises:
        ValueError: There is nothing to draw.
    """
    _check(history)
    speeds = {rank: _speeds(history.points(rank)) for rank in history.ranks}
    counted = any(sample for line in speeds.values() for _, sample, _ in line)
    lines = {
        rank: ([at for at, _, _ in line], [sample if counted else step for _, sample, step in line])
        for rank, line in speeds.items()
        if line
    }
    if not lines or not any(any(y) for _, y in lines.values()):
        raise ValueError(
            "no rank counted samples or steps for longer than a second: iterate over the data with hvd.progress(loader)"
        )
    slowest = min(lines, key=lambda rank: median(lines[rank][1]))
    if len(lines) <= _MOST_LINES:
        curves = [Curve(f"rank {rank}", x, y) for rank, (x, y) in lines.items()]
    else:
        curves = [
            _mean(f"mean of {len(lines)} ranks", list(lines.values())),
            Curve(f"slowest: rank {slowest}", *lines[slowest]),
        ]
    unit = "samples/s" if counted else "steps/s"
    total = sum(
        point.rates.samples_per_second * point.rates.seconds
        for rank in lines
        for point in history.points(rank)
        if point.rates is not None
    )
    figure, (axes,) = figure_of()
    title = f"on average {total / history.seconds:,.0f} samples/s together" if counted else "steps of each rank"
    draw(axes, curves, x="seconds", y=f"{unit}, each rank", title=title)
    axes.set_ylim(bottom=0)
    mark(axes, [(one.seconds, one) for one in history.generations[1:]])
    return figure


def plot_timeline(history: RunHistory) -> Figure:
    """Draw a lane for each rank over time, with the shares of its time; epochs and generations are marked.

    Raises:
        ValueError: There is nothing to draw.
    """
    _check(history)
    ranks = history.ranks
    figure, (axes,) = figure_of(SIZE[0], min(12.0, max(SIZE[1] - 1, 1.1 + 0.3 * len(ranks))))
    axes.grid(visible=False)
    spent = dict.fromkeys([*SHARES, ""], 0.0)
    for lane, rank in enumerate(ranks):
        points = history.points(rank)
        for name, seconds in _draw_lane(axes, lane, points).items():
            spent[name] += seconds
        epochs = [b.seconds for a, b in pairwise(points) if b.epoch != a.epoch]
        if len(epochs) <= _MOST_EPOCHS:
            axes.vlines(epochs, lane + 0.05, lane + 0.95, colors="black", linewidth=0.8)
    whole = sum(spent.values())
    if not whole:
        raise ValueError("the run was over before its ranks had reported twice: nothing to draw yet")
    every = -(-len(ranks) // 32)
    axes.set_yticks([lane + 0.5 for lane in range(len(ranks))][::every], [f"rank {rank}" for rank in ranks][::every])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(ranks), 0)
    axes.set_xlim(0, history.seconds)
    axes.set_xlabel("seconds (black: a new epoch)", fontsize=FONT)
    axes.spines["left"].set_visible(False)
    named = {**{name: (name, colour) for name, colour in SHARES.items()}, "": ("outside of hvd.progress", OUTSIDE)}
    handles = [
        Patch(color=colour, label=f"{label} {spent[name] / whole:.0%}")
        for name, (label, colour) in named.items()
        if spent[name]
    ]
    title = {"title": "where each rank's time went", "title_fontsize": FONT + 1}
    figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=FONT, frameon=False, **title)
    mark(axes, [(one.seconds, one) for one in history.generations[1:]])
    return figure


def _check(history: RunHistory) -> None:
    if not history:
        raise ValueError(
            "the ranks reported nothing while they ran: the run was shorter than a second, or executors cannot reach "
            "the driver. Use hvd.progress(...) in your loops to record more"
        )


def _line(points: Iterable[Point], stage: str, metric: str) -> tuple[list[float], list[float]]:
    """Return the steps and values of a metric in a stage, one value per step."""
    found = {
        point.total_steps: point.metrics[metric]
        for point in points
        if point.stage == stage and math.isfinite(point.metrics.get(metric, math.nan))
    }
    return [float(step) for step in found], list(found.values())


def _speeds(points: Iterable[Point]) -> list[tuple[float, float, float]]:
    """Return times, samples per second and steps per second, each over about a second; ranks may report more often."""
    found = []
    seconds = samples = steps = 0.0
    for point in points:
        if point.rates is None or not point.stage:
            seconds = samples = steps = 0.0
            continue
        seconds += point.rates.seconds
        samples += point.rates.samples
        steps += point.rates.steps
        if seconds >= _SPAN:
            found.append((point.seconds - seconds / 2, samples / seconds, steps / seconds))
            seconds = samples = steps = 0.0
    return found


def _mean(label: str, lines: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Curve:
    """Return the mean of lines that have values at different places."""
    if len(lines) == 1:
        return Curve(label, *lines[0])
    places = sorted({place for x, _ in lines for place in x})
    if len(places) > _GRID:
        places = list(np.linspace(places[0], places[-1], _GRID))
    edge = _EDGE * (places[-1] - places[0])
    values = np.array(
        [
            np.interp(
                places,
                x,
                y,
                left=y[0] if x[0] <= places[0] + edge else math.nan,
                right=y[-1] if x[-1] >= places[-1] - edge else math.nan,
            )
            for x, y in lines
        ]
    )
    known = ~np.isnan(values).all(axis=0)
    x, values = np.array(places)[known], values[:, known]
    low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    return Curve(label, x.tolist(), np.nanmean(values, axis=0).tolist(), low.tolist(), high.tolist())


def _draw_lane(axes: Axes, lane: int, points: Sequence[Point]) -> dict[str, float]:
    """Draw the stacked shares of time from point to point, and return the seconds of each."""
    seconds = [0.0 if point.rates is None else point.rates.seconds for point in points]
    parts = {name: [0.0 if point.rates is None else getattr(point.rates, name) for point in points] for name in SHARES}
    parts[""] = [
        0.0 if point.rates is None else max(0.0, 1 - sum(parts[name][place] for name in SHARES))
        for place, point in enumerate(points)
    ]
    x = [point.seconds for point in points]
    floor = np.full(len(points), lane + 0.95)
    for name, part in parts.items():
        top = floor - 0.9 * np.array(part)
        axes.fill_between(x, floor, top, step="pre", color=SHARES.get(name, OUTSIDE), linewidth=0)
        floor = top
    return {name: float(np.dot(part, seconds)) for name, part in parts.items()}
