"""``RunResult``: the return values of a run's ranks, and how the run went."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from spark_hvd.runner.watch.history import RunHistory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from spark_hvd.runner.watch.summary import Summary

R = TypeVar("R")
_FEW = 8
"""Maximum number of elements for which an array is printed in full."""


class _Abbreviating(reprlib.Repr):
    """Prints arrays and tensors that are not small as their shape and dtype, and everything else in full."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 10
        for kind in ("list", "tuple", "set", "frozenset", "deque", "string", "long", "other"):
            setattr(self, f"max{kind}", sys.maxsize)

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        if level <= 0:
            return "{...}"
        return "{" + ", ".join(f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in x) + "}"

    def repr_OrderedDict(self, x: Mapping[Any, Any], level: int) -> str:  # noqa: N802 - named after the type
        return f"OrderedDict({self.repr_dict(x, level)})"

    def repr_ndarray(self, x: Any, level: int) -> str:
        if math.prod(x.shape) <= _FEW:
            return repr(x)
        return f"{type(x).__name__}(shape={tuple(x.shape)}, dtype={x.dtype})"

    repr_Tensor = repr_Parameter = repr_ndarray  # noqa: N815


_abbreviating = _Abbreviating()


class RunResult(list[R]):
    """The return values of the ranks, in rank order: a list that also records how the run went.

    It prints large arrays and tensors as their shape and dtype; ``result[0]`` is the value itself.

    Attributes:
        summary: Speed, where the time went, restarts; None if the driver received nothing from the ranks.
        history: What the ranks reported, at least once a second: ``history.points(rank)``, ``history.to_pandas()``.

    Args:
        values: One for each rank.
        summary: See above.
        history: See above; None for an empty one.
    """

    __module__ = "spark_hvd.runner"

    def __init__(
        self, values: Iterable[R] = (), summary: Summary | None = None, history: RunHistory | None = None
    ) -> None:
        super().__init__(values)
        self.summary = summary
        self.history = RunHistory() if history is None else history

    def __repr__(self) -> str:
        return _abbreviating.repr_list(self, _abbreviating.maxlevel)

    def plot_loss(self, metric: str = "loss") -> Figure:
        """Draw a metric over the steps: the mean of the ranks and their range. Needs matplotlib.

        Args:
            metric: A name that was given to `hvd.progress`.

        Raises:
            ValueError: No rank has reported it.
            ImportError: matplotlib is not installed.
        """
        from spark_hvd.runner.watch.display.plots import plot_loss

        return plot_loss(self.history, metric)

    def plot_throughput(self) -> Figure:
        """Draw samples (or steps) per second of each rank over time. Needs matplotlib.

        Raises:
            ValueError: No rank has counted any.
            ImportError: matplotlib is not installed.
        """
        from spark_hvd.runner.watch.display.plots import plot_throughput

        return plot_throughput(self.history)

    def timeline(self) -> Figure:
        """Draw a lane for each rank over time that shows where its time went. Needs matplotlib.

        Raises:
            ValueError: There is nothing to draw.
            ImportError: matplotlib is not installed.
        """
        from spark_hvd.runner.watch.display.plots import plot_timeline

        return plot_timeline(self.history)
