"""What columns of any type become in a batch: their values."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from spark_hvd import DataError
from spark_hvd.data.columns import numpy_batch, padded, ragged, torch_batch

VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)
NAN, NAT = float("nan"), np.datetime64("NaT")
DAY = datetime.date(1970, 1, 3)
MOMENT = datetime.datetime(1970, 1, 1, 1, tzinfo=datetime.timezone.utc)


def alike(found: Any, expected: Any) -> None:
    """Check that values, dtypes and types are equal, down to the last field."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            alike(found[name], expected[name])
    elif isinstance(expected, np.ndarray | torch.Tensor):
        assert (found.dtype, tuple(found.shape)) == (expected.dtype, tuple(expected.shape))
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    else:
        assert found == expected


CASES: dict[str, tuple[pa.Array, Any, Any]] = {
    "int16": (pa.array([1, -2], pa.int16()), np.array([1, -2], np.int16), torch.tensor([1, -2], dtype=torch.int16)),
    "float32": (pa.array([0.5, None], pa.float32()), np.array([0.5, NAN], np.float32), torch.tensor([0.5, NAN])),
    "boolean": (pa.array([True, False]), np.array([True, False]), torch.tensor([True, False])),
    "decimal": (
        pa.array([decimal.Decimal("1.5"), None]),
        np.array([1.5, NAN]),
        torch.tensor([1.5, NAN], dtype=torch.float64),
    ),
    "string": (pa.array(["a", None]), np.array(["a", None], object), ["a", None]),
    "binary": (pa.array([b"a", b"\0"]), np.array([b"a", b"\0"], object), [b"a", b"\0"]),
    "date": (pa.array([DAY, DAY]), np.array([2, 2], "datetime64[D]"), torch.tensor([2, 2])),
    "timestamp": (
        pa.array([MOMENT, MOMENT], pa.timestamp("us", "Europe/Paris")),
        np.array([3_600_000_000] * 2, "datetime64[us]"),
        torch.tensor([3_600_000_000] * 2),
    ),
    "arrays": (pa.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 4]])),
    "fixed arrays": (
        pa.array([[1, 2], [3, 4]], pa.list_(pa.float32(), 2)),
        np.array([[1, 2], [3, 4]], np.float32),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    ),
    "arrays of arrays": (
        pa.array([[[1.0], [2.0]], [[3.0], [None]]]),
        np.array([[[1.0], [2.0]], [[3.0], [NAN]]]),
        torch.tensor([[[1.0], [2.0]], [[3.0], [NAN]]], dtype=torch.float64),
    ),
    "arrays of strings": (pa.array([["a"], None]), [["a"], None], [["a"], None]),
    "vectors": (
        pa.array(
            [
                {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]},
                {"type": 0, "size": 2, "indices": [1], "values": [5.0]},
            ],
            VECTOR,
        ),
        np.array([[1.0, 2.0], [0.0, 5.0]]),
        torch.tensor([[1.0, 2.0], [0.0, 5.0]], dtype=torch.float64),
    ),
    "structs": (
        pa.array([{"a": 1, "b": {"c": "x"}}, {"a": 2, "b": {"c": None}}]),
        {"a": np.array([1, 2]), "b": {"c": np.array(["x", None], object)}},
        {"a": torch.tensor([1, 2]), "b": {"c": ["x", None]}},
    ),
    "maps": (
        pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int32())),
        [{"a": 1}, None],
        [{"a": 1}, None],
    ),
    "maps in maps and arrays": (
        pa.array([[[("a", [("b", 1)])]], None], pa.list_(pa.map_(pa.string(), pa.map_(pa.string(), pa.int32())))),
        [[{"a": {"b": 1}}], None],
        [[{"a": {"b": 1}}], None],
    ),
    "maps in structs in maps": (
        pa.array(
            [[("a", [{"b": [(1, "c")]}, {"b": None}, None]), ("b", None)], None],
            pa.map_(pa.string(), pa.list_(pa.struct([("b", pa.map_(pa.int8(), pa.string()))]))),
        ),
        [{"a": [{"b": {1: "c"}}, {"b": None}, None], "b": None}, None],
        [{"a": [{"b": {1: "c"}}, {"b": None}, None], "b": None}, None],
    ),
    "arrays of dates": (pa.array([[DAY], [DAY, None]]), [[DAY], [DAY, None]], [[DAY], [DAY, None]]),
    "arrays of vectors": (
        pa.array([[{"type": 1, "size": None, "indices": None, "values": [1.0]}]] * 2, pa.list_(VECTOR)),
        [[{"type": 1, "size": None, "indices": None, "values": [1.0]}]] * 2,
        [[{"type": 1, "size": None, "indices": None, "values": [1.0]}]] * 2,
    ),
    "nanoseconds": (
        pa.array([1000, -1000], pa.timestamp("ns")),
        np.array([1, -1], "datetime64[us]"),
        torch.tensor([1, -1]),
    ),
    "dictionaries": (
        pa.array(["a", "b"]).dictionary_encode(),
        np.array(["a", "b"], object),
        ["a", "b"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_by_value(name: str) -> None:
    array, arrays, tensors = CASES[name]
    batch = pa.RecordBatch.from_arrays([array], ["x"])
    alike(numpy_batch(batch), {"x": arrays})
    alike(torch_batch(batch), {"x": tensors})
    rows = pa.RecordBatch.from_arrays([pa.concat_arrays([array, array])], ["x"]).slice(len(array))
    alike(torch_batch(rows), {"x": tensors})
    assert len(numpy_batch(batch.slice(0, 0))) == 1


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (pa.array([1, None]), r"column 'x' has 1 null\(s\) among 2 values of type int64.*Next: fill or drop"),
        (pa.array([True, None]), r"column 'x' has 1 null\(s\)"),
        (pa.array([[1], None]), r"column 'x' has 1 null\(s\) among 2 values of type list"),
        (pa.array([{"a": 1}, None]), r"column 'x.a' has 1 null\(s\)"),
        (pa.array([1001], pa.timestamp("ns")), r"column 'x' of timestamp\[ns\] .*1001.*Next: round it"),
        (pa.array([2**60], pa.timestamp("s")), r"column 'x' of timestamp\[s\] .*Next: round it"),
        (pa.array([1001], pa.time64("ns")), r"column 'x' of time64\[ns\] .*1001.*Next: round it"),
        (pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int8())), r"column 'x' of map.*distinct keys"),
        (
            pa.array([[([1], 1)]], pa.map_(pa.list_(pa.int8()), pa.int8())),
            r"column 'x' of map.*neither arrays nor maps",
        ),
        (pa.array([[1], [1, 2], []]), r"column 'x' has arrays of 3 different lengths, from 0 to 2.*padded"),
    ],
)
def test_what_no_array_can_hold(array: pa.Array, text: str) -> None:
    for convert in (numpy_batch, torch_batch):
        with pytest.raises(DataError, match=text):
            convert(pa.RecordBatch.from_arrays([array], ["x"]))


def test_a_date_that_is_missing() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([DAY, None])], ["x"])
    alike(numpy_batch(batch), {"x": np.array([np.datetime64(2, "D"), NAT])})
    with pytest.raises(DataError, match=r"column 'x' has 1 null\(s\) among its dates.*df.na.drop"):
        torch_batch(batch)


def test_tensors_have_memory_of_their_own() -> None:
    array = pa.array(np.arange(4.0))
    batch = pa.RecordBatch.from_arrays([array, array], ["x", "y"])
    torch_batch(batch)["x"].zero_()
    torch_batch(batch, ["x", "y"])["features"].zero_()
    assert array.to_pylist() == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [2**53 + 1, 2**63 + 1, 2**64 - 1])
def test_a_stack_rounds_no_integer(number: int) -> None:
    for values in (pa.array([number, 1], pa.uint64()), pa.array([[number], [1]], pa.list_(pa.uint64()))):
        batch = pa.RecordBatch.from_arrays([values, pa.array([1, 2])], ["x", "y"])
        with pytest.raises(DataError, match=f"column 'x' has the uint64 {number}, which float64"):
            torch_batch(batch, ["x", "y"])


def test_what_is_made_of_columns_takes_the_place_of_none() -> None:
    batch = pa.RecordBatch.from_pydict(
        {"a": [1.0], "features": [2.0], "x": [[1]], "x_lengths": [3], "x_offsets": [[4]]}
    )
    for convert in (numpy_batch, torch_batch):
        with pytest.raises(DataError, match="features: 'features' is the name of a stack and of another column"):
            convert(batch, ["a"])
        assert convert(batch, {"features": ["a", "features"]})["features"].tolist() == [[1.0, 2.0]]
    for collate, other in ((padded(), "x_lengths"), (ragged(), "x_offsets")):
        with pytest.raises(DataError, match=f"column 'x' of arrays adds '{other}'"):
            collate(batch)


def test_features_are_stacked() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1.0, 2.0], "b": [3, 4], "c": [[5, 6], [7, 8]], "d": ["x", "y"]})
    found = torch_batch(batch, ["b", "a", "c"])
    alike(found, {"features": torch.tensor([[3.0, 1, 5, 6], [4, 2, 7, 8]], dtype=torch.float64), "d": ["x", "y"]})
    two = numpy_batch(batch, {"wide": ["a", "b"], "deep": ["c"]})
    assert {name: values.shape for name, values in two.items()} == {"wide": (2, 2), "deep": (2, 2), "d": (2,)}
    alike(torch_batch(batch.select(["a"]), ["a"]), {"features": torch.tensor([[1.0], [2.0]], dtype=torch.float64)})
    ints = pa.RecordBatch.from_pydict({"a": pa.array([1, None], pa.int32()), "b": pa.array([1, 2], pa.int32())})
    for features, text in [
        (["a", "nope"], "'features' is stacked from 'a', 'nope'; expected some of 'a', 'b', 'c', 'd'"),
        (["a", "d"], "column 'd' of 'features' holds string: expected numbers"),
        ([], "'features' is stacked from no columns"),
        ("a", "features='a': expected a list of names"),
    ]:
        with pytest.raises(DataError, match=text):
            torch_batch(batch, features)
    with pytest.raises(DataError, match=r"column 'a' has 1 null\(s\)"):
        torch_batch(ints, ["a", "b"])


def test_arrays_of_different_lengths() -> None:
    batch = pa.RecordBatch.from_pydict({"x": [[1, 2, 3], [4], []], "y": [1.0, 2.0, 3.0], "z": [["a"], [], []]})
    x, lengths = torch.tensor([[1, 2, 3], [4, -1, -1], [-1, -1, -1]]), torch.tensor([3, 1, 0])
    rest = {"features": torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64), "z": [["a"], [], []]}
    alike(padded(-1, features=["y"])(batch), rest | {"x": x, "x_lengths": lengths})
    alike(padded(to=2)(batch.select(["x"]))["x"], torch.tensor([[1, 2], [4, 0], [0, 0]]))
    offsets = torch.tensor([0, 3, 4, 4])
    alike(ragged(features=["y"])(batch), rest | {"x": torch.tensor([1, 2, 3, 4]), "x_offsets": offsets})
    alike(ragged()(batch.slice(1).select(["x"])), {"x": torch.tensor([4]), "x_offsets": torch.tensor([0, 1, 1])})
    with pytest.raises(DataError, match=r"column 'x' has 1 null\(s\)"):
        padded()(pa.RecordBatch.from_pydict({"x": [[1], None]}))


@pytest.mark.parametrize("inner", [pa.list_(pa.float32()), pa.list_(pa.float32(), 2), pa.large_list(pa.float32())])
def test_rows_of_several_arrays(inner: pa.DataType) -> None:
    def batch(*rows: list[list[float]]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.array(rows, pa.list_(inner))], ["boxes"])

    assert padded()(batch([], []))["boxes"].shape[:2] == (*ragged()(batch([], []))["boxes_offsets"][1:].shape, 0)
    boxes = torch.tensor([[[1.0, 2], [3, 4]], [[0, 0], [0, 0]], [[5, 6], [0, 0]]])
    collate, lengths = padded(), torch.tensor([2, 0, 1])
    alike(collate(batch([[1, 2], [3, 4]], [], [[5, 6]])), {"boxes": boxes, "boxes_lengths": lengths})
    assert collate(batch([], []))["boxes"].shape == (2, 0, 2)
    alike(padded(to=1)(batch([[1, 2], [3, 4]], [[5, 6]]))["boxes"], torch.tensor([[[1.0, 2]], [[5, 6]]]))
    flat = {"boxes": torch.tensor([[1.0, 2], [3, 4], [5, 6]]), "boxes_offsets": torch.tensor([0, 2, 2, 3])}
    alike(ragged()(batch([[1, 2], [3, 4]], [], [[5, 6]])), flat)
    alike(ragged()(batch([[9, 9]], [[1, 2], [3, 4]], [], [[5, 6]]).slice(1)), flat)


@pytest.mark.parametrize("collate", [padded(), ragged()])
def test_rows_of_several_arrays_that_differ(collate: Any) -> None:
    with pytest.raises(
        DataError, match="'x' has arrays of 2 different lengths, from 1 to 2: expected one for the arrays"
    ):
        collate(pa.RecordBatch.from_pydict({"x": [[[1, 2]], [[3]]]}))
    deep = collate(pa.RecordBatch.from_pydict({"x": [[[[1], [2]]], [[[3], [4]], [[5], [6]]]]}))
    assert deep["x"].shape in ((2, 2, 2, 1), (3, 2, 1))
    with pytest.raises(DataError, match=r"column 'x' has 1 null\(s\)"):
        collate(pa.RecordBatch.from_pydict({"x": [[[1, 2], None]]}))
