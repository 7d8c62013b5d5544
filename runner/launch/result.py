"""``RunResult``: what a run gives back: the values of its ranks, and how it went."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from spark_hvd.runner.watch.history import RunHistory
from spark_hvd.timeline import read_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from spark_hvd.runner.watch.summary import Summary

R = TypeVar("R")


class RunResult(list[R]):
    """The values that the ranks returned, in rank order: a list like any other, that also knows how the run went.

    Attributes:
        summary: Speed, where the time went, restarts; None where nothing was heard of the ranks.
        history: What the ranks told, once a second: ``history.points(rank)``, ``history.to_pandas()``.

    Args:
        values: One for each rank.
        summary: See above.
        history: See above; None for one without records.
    """

    __module__ = "spark_hvd.runner"

    def __init__(
        self, values: Iterable[R] = (), summary: Summary | None = None, history: RunHistory | None = None
    ) -> None:
        super().__init__(values)
        self.summary = summary
        self.history = RunHistory() if history is None else history

    def plot_loss(self, metric: str = "loss") -> Figure:
        """A metric over the steps: the mean of the ranks, and the band they are in; needs matplotlib.

        Args:
            metric: A name that was given to `hvd.progress`.

        Raises:
            ValueError: nobody has reported it.
            ImportError: matplotlib is not installed.
        """
        from spark_hvd.runner.watch.display.plots import plot_loss

        return plot_loss(self.history, metric)

    def plot_throughput(self) -> Figure:
        """Samples (or steps) a second of each rank, over the time; needs matplotlib.

        Raises:
            ValueError: nobody has counted any.
            ImportError: matplotlib is not installed.
        """
        from spark_hvd.runner.watch.display.plots import plot_throughput

        return plot_throughput(self.history)

    def timeline(
        self, path: str | PathLike[str] | None = None, from_ms: float | None = None, to_ms: float | None = None
    ) -> Figure:
        """A lane for each rank over the time, filled by where its time went; needs matplotlib.

        Args:
            path: A file that ``hvd.start_timeline`` or HOROVOD_TIMELINE wrote: drawn is every phase of every rank that
                is in it, instead.
            from_ms: Where to begin in that file, in milliseconds from its first event.
            to_ms: Where to end.

        Raises:
            ValueError: there is nothing to draw, or the file is none of these.
            OSError: the file cannot be read.
            ImportError: matplotlib is not installed.
        """
        from spark_hvd.runner.watch.display.plots import plot_timeline
        from spark_hvd.timeline.plot import figure_of

        return plot_timeline(self.history) if path is None else figure_of(read_trace(Path(path)), from_ms, to_ms)
