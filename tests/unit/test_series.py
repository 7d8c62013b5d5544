"""Series are cut into pieces so that every window is in one, in whatever order rows arrive."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_hvd import DataError
from spark_hvd.data import Windows, sliding
from spark_hvd.data.series.pieces import COUNT, PROBLEM, Pieces, pieces_of_sorted, pieces_of_table, windows_in


@given(
    rows=st.lists(st.integers(0, 400), max_size=5),
    length=st.integers(1, 30),
    stride=st.integers(1, 40),
)
def test_every_window_lies_in_one_piece(rows: list[int], length: int, stride: int) -> None:
    pieces = Pieces.of(np.array(rows, np.int64), length, stride)
    found = [
        (int(series), int(start) + number * stride)
        for series, start, here in zip(pieces.series, pieces.starts, pieces.rows, strict=True)
        for number in range(int(windows_in(here, length, stride)))
    ]
    assert found == [(at, start) for at, each in enumerate(rows) for start in range(0, each - length + 1, stride)]
    ends = pieces.starts + pieces.rows
    assert all(ends <= np.array(rows, np.int64)[pieces.series])


@given(
    rows=st.integers(20, 1 << 20),
    length=st.integers(1, 2000),
)
def test_pieces_take_little_more_memory_than_their_series(rows: int, length: int) -> None:
    pieces = Pieces.of(np.array([rows]), length, 1)
    assert pieces.rows.sum() <= 5 * rows
    if rows > 65 * length:
        assert pieces.rows.sum() <= 1.26 * rows
    if rows > 2 * length > 64:
        assert len(pieces.rows) >= 4, "one series is enough for two ranks"


def table_of(lengths: list[int]) -> pa.Table:
    keys = [key for key, rows in enumerate(lengths) for _ in range(rows)]
    times = [time for rows in lengths for time in range(rows)]
    values = [1000.0 * key + time for key, time in zip(keys, times, strict=True)]
    return pa.table({"key": [f"k{key}" for key in keys], "time": times, "value": values})


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    seed=st.integers(0, 9),
    batch=st.integers(1, 50),
)
def test_rows_come_in_any_order_and_in_any_batches(lengths: list[int], seed: int, batch: int) -> None:
    spec = Windows(None, keys=["key"], order_by="time", columns=["value"], length=8).spec
    table = table_of(lengths)
    expected = pieces_of_table(table, spec).to_pylist()
    mixed = table.take(np.random.default_rng(seed).permutation(len(table)))
    assert pieces_of_table(mixed, spec).to_pylist() == expected
    sorted_rows = table.to_batches(max_chunksize=batch)
    found = [row for each in pieces_of_sorted(sorted_rows, spec) for row in each.to_pylist()]
    by_value = sorted(expected, key=str)
    assert sorted(found, key=str) == by_value
    short = {row["key"]: row[COUNT] for row in expected if row[PROBLEM] == "short"}
    assert short == {f"k{key}": rows for key, rows in enumerate(lengths) if rows < 8}
    starts = sorted(
        value for row in expected if row[PROBLEM] is None for value in row["value"][: len(row["value"]) - 7]
    )
    assert starts == [1000.0 * key + time for key, rows in enumerate(lengths) for time in range(rows - 7)]


def problems_of(table: pa.Table, **asked: Any) -> list[tuple[str, str, int]]:
    spec = Windows(None, **{"keys": ["key"], "order_by": "time", "columns": ["value"], "length": 3, **asked}).spec
    rows = pieces_of_table(table, spec).to_pylist()
    return [(row["key"], row[PROBLEM], row[COUNT]) for row in rows if row[PROBLEM] is not None]


def test_what_is_wrong_is_counted_by_series() -> None:
    keys = ["a"] * 5 + ["b"] * 4 + ["c"] * 2 + ["d"] * 4
    times = [*[1, 2, 2, 2, 4], *[1, 2, 3, 4], *[1, 2], *[1, 2, 4, 5]]
    values = [0.0] * 5 + [1.0, None, None, 2.0] + [0.0] * 2 + [0.0] * 4
    table = pa.table({"key": keys, "time": times, "value": values})
    assert problems_of(table) == [("c", "short", 2), ("b", "null in value", 2), ("a", "repeated", 2)]
    assert problems_of(table, every=1)[-2:] == [("a", "gap", 1), ("d", "gap", 1)]
    assert problems_of(table.set_column(1, "time", pa.array([None, *times[1:]])))[1:] == [
        ("a", "null in time", 1),
        ("b", "null in value", 2),
    ]


@pytest.mark.parametrize(
    ("times", "every"),
    [
        ([datetime(2020, 1, 1, hour) for hour in (0, 1, 2, 4)], timedelta(hours=1)),
        ([datetime(2020, 1, 1, hour, tzinfo=timezone.utc) for hour in (0, 1, 2, 4)], timedelta(hours=1)),
        ([date(2020, 1, day) for day in (1, 2, 3, 5)], timedelta(days=1)),
        ([1, 3, 5, 6], 2),
    ],
)
def test_steps_in_time_of_any_type(times: list[Any], every: Any) -> None:
    table = pa.table({"key": ["a"] * 4, "time": times, "value": [1, 2, 3, 4]})
    assert problems_of(table) == []
    assert problems_of(table, every=every) == [("a", "gap", 1)]


def test_columns_become_float32_and_no_keys_make_one_series() -> None:
    table = pa.table({"time": [2, 1, 3], "a": [2, 1, 3], "b": [False, True, True]})
    spec = Windows(None, keys=[], order_by="time", columns=["a", "b"], length=3).spec
    (row,) = pieces_of_table(table, spec).to_pylist()
    assert (row["a"], row["b"]) == ([1.0, 2.0, 3.0], [1.0, 0.0, 1.0])
    assert pieces_of_table(table.slice(0, 0), spec).num_rows == 0


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"keys": "key"}, r"keys='key': expected a list of names, \['key'\]"),
        ({"length": 0}, "length=0: expected a whole number of rows, at least 1"),
        ({"stride": 1.5}, "stride=1.5: expected a whole number"),
        ({"short": "pad"}, "short='pad': expected 'error' or 'skip'"),
        ({"every": timedelta(0)}, "every=.*expected a positive"),
        ({"columns": []}, "expected the columns of numbers"),
        ({"columns": ["value", "time"]}, "column 'time' is named twice"),
        ({"columns": ["valeu"]}, "no column 'valeu'; expected one of 'key', 'time', 'value'"),
        ({"columns": ["key"], "keys": []}, "column 'key' holds string: expected numbers"),
        ({"order_by": "key", "keys": []}, "order_by='key' holds string: expected integers, dates or timestamps"),
        ({"every": timedelta(hours=1)}, "every=.*but 'time' holds int64: expected an integer"),
    ],
)
def test_arguments_that_cannot_be(asked: dict[str, Any], error: str) -> None:
    with pytest.raises(DataError, match=error):
        problems_of(table_of([5]), **asked)


def test_batches_are_made_together_up_to_a_number_of_rows() -> None:
    assert [*sliding._together([4, 4, 1, 9, 9, 2], 8)] == [8, 1, 9, 9, 2]
