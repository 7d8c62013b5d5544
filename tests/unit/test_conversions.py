"""From a column's values to the dtype that is asked for: the number itself, or an error that names it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.tensors import converted
from spark_hvd.estimators.data.columns import widened
from spark_hvd.estimators.params import checks
from spark_hvd.estimators.training.inputs import TensorSpec


def given(values: Any, own: torch.dtype, asked: str) -> torch.Tensor:
    return TensorSpec(Column("x", str(own)[6:]), asked).of(torch.tensor(values, dtype=own))


@pytest.mark.parametrize(
    ("own", "value", "asked"),
    [
        (torch.float32, 2.5, "int64"),
        (torch.float32, 1.7, "int32"),
        (torch.float32, math.nan, "int64"),
        (torch.float64, math.inf, "int64"),
        (torch.float64, 2.0**63, "int64"),
        (torch.int64, 390, "uint8"),
        (torch.int64, -1, "uint8"),
        (torch.int32, 2, "bool"),
        (torch.float64, 300.0, "int8"),
    ],
)
def test_what_a_dtype_cannot_hold(own: torch.dtype, value: float, asked: str) -> None:
    with pytest.raises(DataError, match=f"column 'x' has 1 of 2 values that {asked} cannot hold.* {str(own)[6:]} "):
        given([1, value], own, asked)


def test_what_a_dtype_holds() -> None:
    assert given([16777217.0, -(2.0**63)], torch.float64, "int64").tolist() == [16777217, -(2**63)]
    assert given([255, 0], torch.int64, "uint8").tolist() == [255, 0]
    assert given([1.0, 0.0], torch.float32, "bool").tolist() == [True, False]
    assert given([True], torch.bool, "int64").tolist() == [1]


def test_a_shape_of_one_row_is_that_of_all() -> None:
    assert checks.shapes("input_shapes", [[2], [-1, 3], None]) == [(-1, 2), (-1, 3), None]


def test_columns_keep_the_digits_that_a_dtype_needs() -> None:
    columns = [Column(name, "float32", (), "double") for name in "abcd"] + [Column("n", "int64", (), "bigint")]
    asked = [("a", "int64"), ("b", "float64"), ("c", "float32"), ("c", None), ("n", "int32")]
    found = {each.name: each.dtype for each in widened(columns, asked)}
    assert found == {"a": "float64", "b": "float64", "c": "float32", "d": "float32", "n": "int64"}


@pytest.mark.parametrize("wide", ["int16", "int32", "int64"])
@pytest.mark.parametrize("narrow", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_an_integer_fits_into_a_wider_one(narrow: torch.dtype, wide: str) -> None:
    values = torch.tensor([0, 3, 127], dtype=narrow)
    assert converted(values, wide, "x").tolist() == [0, 3, 127]
