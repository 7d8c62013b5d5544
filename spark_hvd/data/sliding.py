"""Windows over the pieces of series that came to this rank: a window is a place in a piece until its batch is made."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spark_hvd.collectives.objects import allgather_object
from spark_hvd.context import who
from spark_hvd.data.column_form import ColumnForm
from spark_hvd.data.frame import FrameSource, UnitReader
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import BatchT, Form, pieces_of
from spark_hvd.data.readers.reader import Reader
from spark_hvd.data.series.pieces import COUNT, GAP, NULL, PROBLEM, REPEATED, SHORT, windows_in
from spark_hvd.data.source import Asked
from spark_hvd.data.spool import Spool
from spark_hvd.data.units import ROW, UNITS, Ints, Piece, Seed, mixing, order_in_units, stretches, units_of, windows_of

TOGETHER = 1 << 20
"""Windows that are shuffled together: of each, only its number is in memory."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WindowSource(FrameSource):
    """See :class:`FrameSource`, whose rows are windows here.

    Attributes:
        series: What this rank has.
    """

    series: SeriesHere

    @property
    def schema(self) -> pa.Schema:
        """See base class."""
        return self.series.schema

    def open(self, asked: Asked, form: Form[Any, BatchT]) -> Reader[BatchT]:
        """See base class."""
        units = units_of(self.part, len(self.parts))
        return WindowReader(self.series, self.counts, units, asked, form, asked.window_rows or self.window_rows)


class SeriesHere:
    """The pieces of series of some units, their values in files without a name that are mapped into memory.

    Args:
        spool: Where the pieces are.
        units: The rank's.
        asked: What :class:`~spark_hvd.data.series.windows.WindowSpec` has, as JSON gives it back.

    Attributes:
        schema: Of the windows.
        counts: Windows of each unit; of other ranks' units none.
        problems: What is wrong: how often, in how many series, the first one's key and how often there.
    """

    def __init__(self, spool: Spool, units: range, asked: Mapping[str, Any]) -> None:
        self._keys, self._columns = asked["keys"], asked["columns"]
        self.length, self._stride = asked["length"], asked["stride"]
        self.problems: dict[str, tuple[int, int, str, int]] = {}
        keys, rows, whose = [], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        owners, at = np.repeat(np.array(units, np.int64), spool.counts[units.start : units.stop]), 0
        files = {name: tempfile.TemporaryFile(dir=spool.folder) for name in self._columns}
        with spool.disk():
            for table in spool.tables([(unit, 0, int(spool.counts[unit])) for unit in units], None):
                problems = table.column(PROBLEM)
                fine = problems.is_null()
                whose.append(owners[at : at + table.num_rows][fine.to_numpy()])
                at += table.num_rows
                self._note(table.filter(problems.is_valid()))
                pieces = table.filter(fine)
                keys.append(pieces.select(self._keys))
                for name, file in files.items():
                    file.write(pieces.column(name).combine_chunks().flatten().to_numpy())
                rows.append(pieces.column(self._columns[0]).combine_chunks().value_lengths().to_numpy())
            for file in files.values():
                file.flush()
        self._rows = np.concatenate(rows)
        windows = windows_in(self._rows, self.length, self._stride)
        self.counts: Ints = np.bincount(np.concatenate(whose), windows, minlength=UNITS).astype(np.int64)
        self._unit_ends = np.cumsum(self.counts)
        self._ends, self._starts = np.cumsum(windows), np.cumsum(self._rows) - self._rows
        self._firsts = self._ends - windows
        fields = [spool.schema.field(name) for name in self._keys]
        self._key_columns = pa.concat_tables([pa.schema(fields).empty_table(), *keys]).combine_chunks()
        self.schema = pa.schema([*fields, *(pa.field(name, self._list()) for name in self._columns)])
        # An empty file cannot be mapped; no window is asked for then.
        self._values = {name: np.memmap(file, np.float32, "r") for name, file in files.items() if len(self._rows)}
        for file in files.values():
            file.close()

    def first_of(self, units: Ints) -> Ints:
        """The number of the first window of each unit."""
        found: Ints = self._unit_ends[units] - self.counts[units]
        return found

    def batch(self, numbers: Ints, columns: Sequence[str]) -> pa.RecordBatch:
        """Windows by their numbers."""
        pieces = np.searchsorted(self._ends, numbers, side="right")
        starts = self._starts[pieces] + (numbers - self._firsts[pieces]) * self._stride
        found = []
        for name in columns:
            if name in self._keys:
                found.append(self._key_columns.column(name).take(pieces).combine_chunks())
                continue
            windows = np.lib.stride_tricks.sliding_window_view(self._values[name], self.length)[starts]
            found.append(pa.FixedSizeListArray.from_arrays(pa.array(windows.reshape(-1)), type=self._list()))
        return pa.RecordBatch.from_arrays(found, schema=pa.schema([self.schema.field(name) for name in columns]))

    def _list(self) -> pa.DataType:
        return pa.list_(pa.float32(), self.length)

    def _note(self, found: pa.Table) -> None:
        for row in found.select([*self._keys, PROBLEM, COUNT]).to_pylist():
            key = ", ".join(f"{name}={row[name]!r}" for name in self._keys) or "the only one"
            times, series, *first = self.problems.get(row[PROBLEM], (0, 0, key, row[COUNT]))
            self.problems[row[PROBLEM]] = (times + row[COUNT], series + 1, *first)


class WindowReader(UnitReader[BatchT]):
    """Cuts windows out of series, a batch ahead of the consumer."""

    def __init__(
        self, series: SeriesHere, counts: Ints, units: range, asked: Asked, form: Form[Any, BatchT], together: int
    ) -> None:
        super().__init__(counts, units, asked, form)
        self._series, self._together = series, together

    def _parts(self, pieces: Iterator[Piece], seed: Seed | None, sizes: Sequence[int]) -> Iterator[Any]:
        together = enumerate(windows_of(pieces, self._together))
        orders = (self._order(some, seed, number) for number, some in together)
        for parts in pieces_of((order for order in orders if len(order)), sizes):
            numbers = np.concatenate([order[start:stop] for order, start, stop in parts])
            batch = self._series.batch(numbers, self._asked.columns)
            if isinstance(self._form, ColumnForm):
                yield self._form.of_batch(batch, "the series")
            else:
                yield self._form.of(pa.Table.from_batches([batch]), "the series")

    def _order(self, pieces: Sequence[Piece], seed: Seed | None, number: int) -> Ints:
        """The windows of pieces that are left, in their order. As with rows, numbers of ranks and series decide none."""
        units, _, lengths = np.array(pieces, np.int64).T
        within = stretches(np.zeros_like(lengths), lengths)
        places = np.repeat(np.arange(len(units)), lengths)
        ids = units[places] * (ROW + 1) + within
        order = order_in_units(places.astype(np.int16), ids, seed)
        found: Ints = (self._series.first_of(units)[places] + within)[order][mixing(pieces, seed, number)]
        return found


def window_source(
    name: str, spool: Spool, units: range, part: int, asked: Mapping[str, Any]
) -> WindowSource:
    """What this rank has of windows over series. To be called by all ranks.

    Raises:
        DataError: series that are not as they were said to be, or too few windows; the same on all ranks.
    """
    series = SeriesHere(spool, units, asked)
    ranks = allgather_object((series.counts, part, series.problems), name=f"spark_hvd.rows_of.{name}")
    counts: Ints = np.sum([its for its, *_ in ranks], axis=0)
    problems: dict[str, tuple[int, int, str, int]] = {}
    for *_, its in ranks:
        for problem, (times, of, *first) in its.items():
            before = problems.get(problem, (0, 0, *first))
            problems[problem] = (before[0] + times, before[1] + of, *before[2:])
    _check(name, asked, problems, [int(its.sum()) for its, *_ in ranks])
    return WindowSource(spool, counts, tuple(its for _, its, _ in ranks), part, TOGETHER, series)


def _check(name: str, asked: Mapping[str, Any], problems: Mapping[str, tuple[int, int, str, int]], windows: Sequence[int]) -> None:
    left_out = ""
    for problem, (times, series, key, first) in problems.items():
        where, order = f"data set {name!r}: ", asked["order_by"]
        if problem.startswith(NULL):
            column = problem.removeprefix(NULL)
            raise DataError(
                f"{where}column {column!r} has {times} null(s) in {series} series, {first} of them in {key}. "
                f"Next: fill or drop them, e.g. df.na.fill(0, [{column!r}])"
            )
        if problem == REPEATED:
            raise DataError(
                f"{where}{series} series have a {order!r} more than once, {times} times in all; {key} {first} times. "
                "Expected one row for each. Next: name more keys, or aggregate rows"
            )
        if problem == GAP:
            raise DataError(
                f"{where}{series} series have steps of {order!r} other than every={asked['every']}, {times} in all; "
                f"{key} has {first}. Next: insert the missing rows, or leave every= out to take rows as they follow "
                "each other"
            )
        assert problem == SHORT
        left_out = f"{series} series have fewer rows than a window of {asked['length']}: {key} has {first}"
        if asked["short"] == "error":
            raise DataError(f"{where}{left_out}. Next: shorter windows, or short=\"skip\" to leave such series out")
        if who.rank() == 0:
            _log.warning("%s%s; they are left out", where, left_out)
    if not all(windows):
        raise DataError(
            f"data set {name!r} has {sum(windows)} windows of {asked['length']} rows, and none came to rank "
            f"{windows.index(0)} of {len(windows)}{f' ({left_out})' if left_out else ''}: each rank needs some. Next: "
            "more or longer series, shorter windows, or fewer ranks"
        )
