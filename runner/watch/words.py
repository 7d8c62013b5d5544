"""Formats numbers and rows, in the same way for the terminal, the notebook and the log."""

from __future__ import annotations

import math
from collections.abc import Mapping

from spark_hvd.runner.watch.snapshot import RankRow, Remaining, Slowest
from spark_hvd.world.words import count


def duration(seconds: float) -> str:
    """Format seconds: ``7.3 s``, ``42 s``, ``12 min 31 s``, ``3 h 05 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def number(value: float) -> str:
    """Format a number with three digits, or all before the point: ``0.0123``, ``1.23``, ``123``, ``12,345``."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) >= 1e-4 else f"{value:.2e}"


def share(value: float) -> str:
    """Format a share in percent: ``12 %``."""
    return f"{value * 100:.0f} %"


def size(count: int) -> str:
    """Format bytes: ``512 MiB``, ``1.5 GiB``."""
    return f"{count >> 20} MiB" if count < 1000 << 20 else f"{count / (1 << 30):.1f} GiB"


def metric(value: float) -> str:
    """Format a metric with four digits, because losses become small, and accuracies approach 1."""
    return f"{value:#.4g}".removesuffix(".")


def metrics(values: Mapping[str, float]) -> str:
    """Format metrics: ``loss 0.1234, accuracy 0.98``."""
    return ", ".join(f"{name} {metric(value)}" for name, value in values.items())


def slowest(slow: Slowest) -> str:
    """Name the slowest rank, and say how much slower it is."""
    return f"rank {slow.rank}: {slow.skew:.2f} times the median rank's own time a step"


def again(restarts: int, changes: int) -> str:
    """Name the numbers of restarts and changes; "" if there were none."""
    parts = [count(restarts, "restart")] if restarts else []
    parts += [count(changes, "change") + " of membership"] if changes else []
    return ", ".join(parts)


def remaining(left: Remaining) -> str:
    """Format the remaining time: ``ETA 3 min 10 s``, or the time until this loop ends."""
    return f"ETA {duration(left.seconds)}" if left.whole else f"this loop ends in {duration(left.seconds)}"


def epoch(row: RankRow) -> str:
    """Format the epoch, counted from 1: ``3/10``; "" if it is unknown."""
    if row.epoch is None:
        return ""
    return f"{row.epoch + 1}/{row.epochs}" if row.epochs else f"{row.epoch + 1}"


def step(row: RankRow) -> str:
    """Format the step: ``120/1000``, after the loop's name if that is not "train"; "" before the first step."""
    if not row.stage and not row.step:
        return ""
    name = "" if row.stage in ("", "train") else f"{row.stage} "
    return f"{name}{row.step}/{row.steps}" if row.steps is not None else f"{name}{row.step}"


def note(row: RankRow) -> str:
    """Return the note at the end of a rank's row; "" if there is none."""
    if row.ended:
        return "ended"
    if row.silent is not None:
        return f"silent for {row.silent:.0f} s"
    if not row.started:
        return "starting"
    slow = "" if row.skew is None else f"slowest, {row.skew:.2f}x"
    return ", ".join(part for part in (slow, row.waits) if part)
