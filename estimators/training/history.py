"""The history of a training, with a row for each epoch; converts to a pandas DataFrame and to a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Row = dict[str, Any]
NOT_MEANS = ("epoch", "lr", "seconds", "rows_per_second", "skipped_steps", "restarts")
"""Keys of a row that are neither losses nor metrics."""


class History(list[Row]):
    """A list with a row (a dict of numbers) for each epoch.

    Keys: ``epoch`` (from 1); ``loss`` and each metric; with validation, the same prefixed with ``val_``; ``lr`` (of the
        first parameter group, during the epoch); ``seconds`` and ``rows_per_second`` (of training, over all ranks).
        Losses and metrics are means over all rows of the epoch on all ranks. With ``terminate_on_nan=False``,
        ``skipped_steps`` counts the steps that were skipped because gradients were not finite. ``restarts`` counts how
        often the ranks had been restarted (``max_restarts``) or had changed (``max_num_proc``) by the end of the epoch;
        the key is absent if that never happened. With ``validation_in_background``, rows of epochs that were not
        validated have no ``val_`` keys.
    """

    __module__ = "spark_hvd.estimators"

    @property
    def restarts(self) -> int:
        """How often the ranks were restarted or have changed."""
        return max((int(row.get("restarts", 0)) for row in self), default=0)

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each epoch, indexed by epoch."""
        import pandas as pd

        frame: pd.DataFrame = pd.DataFrame(list(self))
        if len(frame):
            frame.set_index("epoch", inplace=True)
        return frame

    def best(self, monitor: str, mode: str = "min") -> Row:
        """Return the row of the best epoch. A row with NaN is best only if there is no other.

        Args:
            monitor: A key of the rows.
            mode: "min" or "max".

        Raises:
            KeyError: No row has it.
        """
        rows = [row for row in self if monitor in row]
        if not rows:
            raise KeyError(f"monitor={monitor!r}: the history has {sorted({key for row in self for key in row})}")
        known = [row for row in rows if not math.isnan(row[monitor])]
        return (min if mode == "min" else max)(known or rows, key=lambda row: row[monitor])

    def plot(self, keys: Iterable[str] = ("loss",)) -> Figure:
        """Draw curves over the epochs, training and validation together, as a matplotlib figure.

        Args:
            keys: Names of losses and metrics; the validation's curve is added if there is one.

        Raises:
            ValueError: No row has one of the keys.
            ImportError: matplotlib is not installed.
        """
        from spark_hvd.runner.watch.display.figures import Curve, draw, figure_of

        wanted = list(keys)
        figure, panels = figure_of(6 if len(wanted) == 1 else 4 * len(wanted), panels=len(wanted))
        for axes, key in zip(panels, wanted, strict=True):
            curves = []
            for name, label in ((key, "training"), (f"val_{key}", "validation")):
                points = [(row["epoch"], row[name]) for row in self if name in row]
                if points:
                    x, y = zip(*points, strict=True)
                    curves.append(Curve(label, x, y, points=True))
            if not curves:
                names = sorted({name for row in self for name in row} - {"epoch"})
                raise ValueError(f"{key!r}: the history has {', '.join(names) or 'no epochs'}")
            draw(axes, curves, x="epoch", y=key, title=f"{key} of each epoch", whole=True)
        return figure


def monitored(row: Row, monitor: str | None, in_background: bool = False) -> str:
    """Return the key of ``row`` that ``monitor`` names; by default ``val_loss``, or ``loss``.

    With ``in_background``, the row may get a validation value later for each training value.

    Raises:
        ValueError: The row has no such key.
    """
    keys = {
        *row,
        *(f"val_{key}" for key in row if in_background and not key.startswith("val_") and key not in NOT_MEANS),
    }
    if monitor is not None and monitor not in keys:
        raise ValueError(f"monitor={monitor!r}: expected one of {sorted(keys)}")
    return monitor or ("val_loss" if "val_loss" in keys else "loss")


def as_history(name: str, value: Any) -> History:
    """Check a parameter that holds a history; a saved one has plain lists of dicts as rows.

    Raises:
        TypeError: It is not a list of dicts.
    """
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise TypeError(f"{name}={value!r}: expected a list of dicts, one for each epoch")
    return value if isinstance(value, History) else History(value)
