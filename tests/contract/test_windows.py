"""Windows over series: each once per epoch, cut when its batch is created, for any number of ranks."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest

from spark_hvd import DataError
from spark_hvd.data import Windows
from spark_hvd.runner import RankFailedError, run_elastic_local, run_local

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
LENGTHS = {"a": 100, "b": 57, "c": 24}
ASKED: dict[str, Any] = {"keys": ["key"], "order_by": "time", "columns": ["x", "double"], "length": 24}


def table_of(lengths: dict[str, int]) -> pa.Table:
    """Return a table whose values encode their series and time."""
    rows = [(key, time, 1000.0 * ord(key) + time) for key, each in lengths.items() for time in range(each)]
    mixed = np.random.default_rng(0).permutation(len(rows))
    keys, times, values = ([rows[at][column] for at in mixed] for column in range(3))
    schema = pa.schema({"key": pa.string(), "time": pa.int64(), "x": pa.float64(), "double": pa.float64()})
    return pa.table([keys, times, values, [2 * each for each in values]], schema=schema)


def starts_of(lengths: dict[str, int], stride: int = 1, length: int = 24) -> list[int]:
    """Return the first value of each window."""
    return [1000 * ord(key) + time for key, each in lengths.items() for time in range(0, each - length + 1, stride)]


def read(batch: dict[str, Any]) -> list[int]:
    """Return the first values of a batch, after checking all of its windows."""
    x = np.asarray(batch["x"])
    assert x.dtype == np.float32
    assert x.shape[1] == 24
    assert (np.diff(x, axis=1) == 1).all()
    assert (np.asarray(batch["double"]) == 2 * x).all()
    assert [chr(int(each) // 1000) for each in x[:, 0]] == list(batch["key"])
    return [int(each) for each in x[:, 0]]


def test_every_window_comes_once() -> None:
    def fn() -> Any:
        import spark_hvd.torch as hvd

        hvd.init()
        shard = hvd.get_dataset_shard("train")
        loader = shard.torch_batches(16, shuffle=True)
        epochs = [[read(batch) for batch in loader] for _ in range(2)]
        plain = [each for batch in shard.numpy_batches(16) for each in read(batch)]
        some = next(iter(shard.arrow_batches(4, columns=["double", "key"])))
        strided = hvd.get_dataset_shard("strided").numpy_batches(2)
        return {
            "rows": shard.rows,
            "steps": {len(loader), *map(len, epochs)},
            "epochs": [[each for batch in batches for each in batch] for batches in epochs],
            "plain": plain,
            "some": str(some.schema),
            "strided": [int(each) for batch in strided for each in batch["x"][:, 0]],
        }

    table = table_of(LENGTHS)
    data = {
        "train": Windows(table, **ASKED),
        "strided": Windows(table.to_pandas(), **{**ASKED, "length": 30, "stride": 7, "short": "skip"}),
    }
    one, other = run_local(fn, num_proc=2, data=data)
    expected = starts_of(LENGTHS)
    assert one["rows"] == other["rows"] == len(expected)
    assert one["steps"] == other["steps"]
    assert len(one["steps"]) == 1
    for epoch in range(2):
        assert sorted(one["epochs"][epoch] + other["epochs"][epoch]) == expected
    assert one["epochs"][0] != one["epochs"][1]
    steps = np.abs(np.diff(one["epochs"][0]))
    assert np.median(steps) > 3, "windows that touch come far from each other"
    assert sorted(one["plain"] + other["plain"]) == expected
    assert one["some"].startswith("double: fixed_size_list<item: float>[24]\n")
    assert sorted(one["strided"] + other["strided"]) == starts_of(LENGTHS, 7, 30)


def test_an_epoch_goes_on_with_any_number_of_ranks() -> None:
    def fn(state: Any, batches: int | None) -> Any:
        import spark_hvd.torch as hvd

        hvd.init()
        loader = hvd.get_dataset_shard("train").torch_batches(8, shuffle=True, seed=5)
        if state is not None:
            loader.load_state_dict(state)
        found: list[int] = []
        for number, batch in enumerate(loader, 1):
            found += read(batch)
            if number == batches:
                break
        return found, loader.state_dict()

    data = {"train": Windows(table_of(LENGTHS), **ASKED)}
    (one, state), (other, same) = run_local(fn, (None, 4), num_proc=2, data=data)
    assert state == same
    rest = [found for found, _ in run_local(fn, (state, None), num_proc=3, data=data)]
    assert sorted([*one, *other, *(each for found in rest for each in found)]) == starts_of(LENGTHS)


WRONG = {
    "short": (
        {**LENGTHS, "d": 9, "e": 20},
        {},
        "data set 'short': 2 series have fewer rows than a window of 24, key='[de]' has (9|20). Next: "
        'use shorter windows, or short="skip"',
    ),
    "too short for all": ({"d": 9}, {"short": "skip"}, r"has 0 windows of 24 rows.*1 series have fewer rows.*key='d'"),
    "empty": ({"d": 0}, {}, "has 0 windows of 24 rows for 2 ranks: expected at least one for each"),
    "no key": (LENGTHS, {"keys": []}, "1 series have .* rows with the 'time' of another row"),
}


def test_what_is_wrong_is_said_with_key_and_count() -> None:
    def fn() -> list[str]:
        import spark_hvd.torch as hvd

        hvd.init()
        found = []
        for name in hvd_data:
            with pytest.raises(DataError) as caught:
                hvd.get_dataset_shard(name)
            found.append(str(caught.value))
        return found

    data = {name: Windows(table_of(lengths), **{**ASKED, **asked}) for name, (lengths, asked, _) in WRONG.items()}
    nulls = table_of(LENGTHS).to_pandas()
    nulls.loc[nulls["key"].eq("b") & nulls["time"].lt(3), "double"] = None
    gap = table_of(LENGTHS).filter(pa.compute.field("time") != 5)
    data["nulls"] = Windows(pa.Table.from_pandas(nulls), **ASKED)
    data["gap"] = Windows(gap, **ASKED, every=1, short="skip")
    large = table_of(LENGTHS).to_pandas()
    large["double"] = large["double"].where(large["time"].ne(3), 1e300)
    data["beyond"] = Windows(pa.Table.from_pandas(large), **ASKED)
    large["double"] = 2**24 + large["time"].mod(2)
    data["rounded"] = Windows(pa.Table.from_pandas(large), **ASKED)
    large["double"] = 2**40 * large["time"]
    data["exact"] = Windows(pa.Table.from_pandas(large.iloc[:1]), **ASKED)
    hvd_data = list(data)
    one, other = run_local(fn, num_proc=2, data=data)
    assert one == other
    expected = [
        *(text for *_, text in WRONG.values()),
        r"column 'double' has 3 null\(s\) in 1 series, 3 of them in key='b'. Next: fill them, or drop such rows",
        r"3 series have 3 steps of 'time' other than every=1, 1 of them in key='[abc]'",
        r"column 'double' has 3 number\(s\) in 3 series that float32 cannot hold, 1 of them in key='[abc]'. Next: cast",
        r"column 'double' has \d+ number\(s\) in 3 series that float32 cannot hold",
        r"1 series have fewer rows",
    ]
    for text, pattern in zip(one, expected, strict=True):
        assert re.search(pattern, text), text


def test_series_that_are_left_out_are_counted(capfd: pytest.CaptureFixture[str]) -> None:
    def fn() -> int:
        import spark_hvd.torch as hvd

        hvd.init()
        logging.basicConfig()
        return hvd.get_dataset_shard("train").rows

    windows = Windows(table_of({**LENGTHS, "d": 9}), **ASKED, short="skip")
    assert run_local(fn, num_proc=2, data={"train": windows}) == [len(starts_of(LENGTHS))] * 2
    printed = capfd.readouterr()
    said = "data set 'train': 1 series have fewer rows than a window of 24, key='d' has 9: they are skipped"
    assert (printed.out + printed.err).count(said) == 1


def test_an_error_ends_the_run() -> None:
    def fn() -> None:
        import spark_hvd.torch as hvd

        hvd.init()
        hvd.get_dataset_shard("train")

    with pytest.raises(RankFailedError, match="1 series have fewer rows than a window of 24, key='d' has 9"):
        run_local(fn, num_proc=2, data={"train": Windows(table_of({**LENGTHS, "d": 9}), **ASKED)})


def test_what_windows_cannot_be_over() -> None:
    with pytest.raises(TypeError, match=r"Windows over str: expected a Spark or .*spark.read.parquet\(path\)"):
        run_local(print, data={"train": Windows("/data", **ASKED)})
    with pytest.raises(DataError, match="no column 'key'"):
        run_local(print, data={"train": Windows(pa.table({"time": [1]}), **ASKED)})
    with pytest.raises(ValueError, match=r"join and leave\. Use run"):
        run_elastic_local(print, data={"train": Windows(table_of(LENGTHS), **ASKED)})
