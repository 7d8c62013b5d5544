"""Arrow arrays as tensors: the values of every type, and an error that names the types that cannot be converted."""

from __future__ import annotations

import decimal
import warnings
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.tensors import to_tensor

INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
FLOATS = ("float16", "float32", "float64")


@pytest.mark.parametrize("stored", [*INTEGERS, *FLOATS, "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("wanted", [*INTEGERS, *FLOATS, "bfloat16"])
def test_numbers(stored: str, wanted: str) -> None:
    array = pa.array(np.array([9, 0, 1, 100], stored))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns about read-only memory
        tensor = to_tensor(array[1:], Column("x", wanted))
    assert tensor.dtype == getattr(torch, wanted)
    assert tensor.tolist() == [0, 1, 100]


def test_the_same_type_shares_memory() -> None:
    array = pa.array(np.arange(5, dtype=np.float32))
    assert to_tensor(array, Column("x", "float32")).data_ptr() == array.buffers()[1].address


@pytest.mark.parametrize("wanted", ["bool", "int64", "float32"])
def test_booleans(wanted: str) -> None:
    tensor = to_tensor(pa.array([True, True, False, True])[1:], Column("x", wanted))
    assert tensor.tolist() == [1, 0, 1]
    assert tensor.dtype == getattr(torch, wanted)


def test_decimals_and_chunks() -> None:
    array = pa.chunked_array([[decimal.Decimal("1.25")], [decimal.Decimal("-2.50")]])
    assert to_tensor(array, Column("x", "float64")).tolist() == [1.25, -2.5]


def test_special_floats_are_values() -> None:
    tensor = to_tensor(pa.array([float("nan"), float("inf")]), Column("x", "float32"))
    assert tensor.isnan().tolist() == [True, False]
    assert tensor.isinf().tolist() == [False, True]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.large_list(pa.float64()), pa.list_(pa.int16(), 2)], ids=str
)
@pytest.mark.parametrize("shape", [(2,), None])
def test_lists(kind: pa.DataType, shape: tuple[int, ...] | None) -> None:
    array = pa.array([[9, 9], [1, 2], [3, 4]], kind)
    assert to_tensor(array[1:], Column("x", "float32", shape)).tolist() == [[1, 2], [3, 4]]


def test_nested_lists_and_flat_ones_of_a_shape() -> None:
    nested = pa.array([[[1, 2], [3, 4], [5, 6]], [[0, 0], [0, 0], [0, 0]]])
    expected = [[[1, 2], [3, 4], [5, 6]], [[0, 0], [0, 0], [0, 0]]]
    assert to_tensor(nested, Column("x", "int64", (3, 2))).tolist() == expected
    assert to_tensor(nested, Column("x", "int64", None)).tolist() == expected
    flat = pa.array([[1, 2, 3, 4, 5, 6], [0] * 6])
    assert to_tensor(flat, Column("x", "int64", (3, 2))).tolist() == expected
    assert to_tensor(flat.cast(pa.list_(pa.int8(), 6)), Column("x", "bool", (6,))).tolist()[0] == [True] * 6


def test_no_rows() -> None:
    assert to_tensor(pa.array([], pa.float32()), Column("x", "float32")).shape == (0,)
    assert to_tensor(pa.array([], pa.list_(pa.float32())), Column("x", "float32", (2, 3))).shape == (0, 2, 3)
    assert to_tensor(pa.chunked_array([], pa.list_(pa.float32())), Column("x", "float32", (2,))).shape == (0, 2)
    assert to_tensor(pa.array([], SPARSE), Column("x", "float32", (4,), "vector", "sparse")).shape == (0, 4)


def test_empty_lists() -> None:
    assert to_tensor(pa.array([[], []], pa.list_(pa.int64())), Column("x", "int64", None)).shape == (2, 0)


SPARSE = pa.struct({"size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float32())})


def _vector(size: int | None, indices: list[int] | None, values: list[float] | None) -> dict[str, Any]:
    return {"size": size, "indices": indices, "values": values}


@pytest.mark.parametrize("shape", [(4,), (2, 2), None])
def test_sparse_vectors(shape: tuple[int, ...] | None) -> None:
    vectors = [_vector(4, [0], [9]), _vector(4, [1, 3], [1, 2]), _vector(None, None, [1, 2, 3, 4]), _vector(4, [], [])]
    tensor = to_tensor(pa.array(vectors, SPARSE)[1:], Column("x", "float32", shape, "vector", "sparse"))
    assert tensor.shape == (3, *(shape or (4,)))
    assert tensor.flatten(1).tolist() == [[0, 1, 0, 2], [1, 2, 3, 4], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("vectors", "text"),
    [
        ([_vector(4, [1], [1]), None], "1 null"),
        ([_vector(4, [1], [1]), _vector(4, [1], None)], "1 null"),
        ([_vector(4, [1], [1]), _vector(5, [1], [1])], "1 of 2 vectors whose size is not 4: row 1 has 5"),
        ([_vector(4, [4], [1])], "an index outside 0 to 3"),
        ([_vector(4, [-1], [1])], "an index outside 0 to 3"),
        ([_vector(4, [1, 2], [1])], "whose numbers of indices and of values differ"),
    ],
)
def test_broken_sparse_vectors(vectors: list[Any], text: str) -> None:
    with pytest.raises(DataError, match=f"column 'x' in the file .*{text}"):
        to_tensor(pa.array(vectors, SPARSE), Column("x", "float32", (4,), "vector", "sparse"), "the file")


@pytest.mark.parametrize(
    ("array", "column", "text"),
    [
        (pa.array([1, None]), Column("x", "int64"), r"has 1 null\(s\) in 2 rows, the first in row 1: fill or"),
        (pa.array([[1], None]), Column("x", "int64", None), r"has 1 null\(s\) in 2 rows"),
        (pa.array([[1, 2, None]]), Column("x", "int64", (3,)), r"has 1 null\(s\) in 3 values"),
        (pa.array([[1], [1, 2]]), Column("x", "int64", None), "different lengths: row 1 has one of 2, .* first has 1"),
        (pa.array([[[1], [2]], [[1], [2, 3]]]), Column("x", "int64", None), "lengths at depth 2: row 1 has one of 2"),
        (pa.array([[1, 2]]), Column("x", "int64", (3,)), r"has rows of shape \(2,\), expected \(3,\)"),
        (pa.array([[[1, 2, 3]]]), Column("x", "int64", (3, 1)), r"has rows of shape \(1, 3\), expected \(3, 1\)"),
        (pa.array(["a"]), Column("x", "int64"), "holds string: expected numbers"),
        (pa.array([{"a": 1}]), Column("x", "int64"), "holds struct<a: int64>: expected numbers"),
        (pa.array([b"a"]), Column("x", "object"), r"holds binary, which cannot become a tensor: pass a decoder"),
        (pa.array([300]), Column("x", "int8"), "does not fit int8"),
        (pa.array([0.5]), Column("x", "int64"), "does not fit int64"),
    ],
    ids=str,
)
def test_what_cannot_be_a_tensor(array: pa.Array, column: Column, text: str) -> None:
    with pytest.raises(DataError, match=f"^column 'x' in a.parquet, row group 3 .*{text}"):
        to_tensor(array, column, "a.parquet, row group 3")
