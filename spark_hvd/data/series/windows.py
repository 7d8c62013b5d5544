"""``Windows``: the value for ``data=`` that makes windows over time series."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from spark_hvd.data.readers.errors import DataError

METADATA = b"spark_hvd.windows"
"""The key of the :class:`WindowSpec` in the metadata of a table of pieces."""


@dataclass(frozen=True, kw_only=True)
class WindowSpec:
    """The windows to make; see :class:`Windows` for the fields."""

    keys: tuple[str, ...]
    order_by: str
    columns: tuple[str, ...]
    length: int
    stride: int = 1
    every: int | timedelta | None = None
    short: str = "error"

    def to_json(self) -> bytes:
        """Return JSON for the metadata of a schema. The step in time is text, as in messages."""
        every = None if self.every is None else str(self.every)
        return json.dumps({**asdict(self), "every": every}).encode()


class Windows:
    """Windows over the time series in a long table, which has a row for each key and time; a value for ``data=``.

    Each window is a row of the data set: the key columns, and for each of ``columns`` a float32 array of ``length``
    numbers. Ranks keep each series once and cut a window from it when its batch is made.

    Args:
        rows: A Spark DataFrame, a pandas DataFrame or a ``pyarrow.Table``.
        keys: Columns that identify a series; none if all rows are one series.
        order_by: Column of integers, dates or timestamps by which the rows of a series are ordered. No value may occur
            twice in a series.
        columns: Columns of numbers in a window.
        length: Rows of a window, past and future together.
        stride: Rows from the start of a window to the start of the next one of the same series.
        every: Expected step from each time to the next, an integer or a ``timedelta``, which is then checked. None
            takes consecutive rows, whatever the time between them.
        short: How to treat series with fewer rows than a window: "error", or "skip" to leave them out and log how many
            there are.

    Raises:
        DataError: An argument has the wrong type or value.
    """

    __module__ = "spark_hvd.data"

    def __init__(
        self,
        rows: Any,
        *,
        keys: Sequence[str],
        order_by: str,
        columns: Sequence[str],
        length: int,
        stride: int = 1,
        every: int | timedelta | None = None,
        short: str = "error",
    ) -> None:
        for argument, names in (("keys", keys), ("columns", columns)):
            if isinstance(names, str):
                raise DataError(f"{argument}={names!r}: expected a list of names, [{names!r}]")
        for argument, number in (("length", length), ("stride", stride)):
            if not isinstance(number, int) or number < 1:
                raise DataError(f"{argument}={number!r}: expected a whole number of rows, at least 1")
        if short not in ("error", "skip"):
            raise DataError(f"short={short!r}: expected 'error' or 'skip'")
        if every is not None and not (every > timedelta(0) if isinstance(every, timedelta) else every > 0):
            raise DataError(f"every={every!r}: expected a positive whole number or a timedelta")
        if not columns:
            raise DataError("columns=[]: expected the columns of numbers of a window")
        used = [*keys, order_by, *columns]
        if twice := sorted({name for name in used if used.count(name) > 1}):
            raise DataError(
                f"column {twice[0]!r} is named twice among keys={list(keys)}, {order_by=} and columns={list(columns)}"
            )
        self.rows = rows
        self.spec = WindowSpec(
            keys=tuple(keys),
            order_by=order_by,
            columns=tuple(columns),
            length=length,
            stride=stride,
            every=every,
            short=short,
        )

    def over(self, rows: Any) -> Windows:
        """Return the same windows over other rows."""
        return Windows(rows, **asdict(self.spec))

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in asdict(self.spec).items())
        return f"Windows({type(self.rows).__name__}, {options})"
