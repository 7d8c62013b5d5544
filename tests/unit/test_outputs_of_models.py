"""From a model's outputs to columns: the numbers that they are, or an error that names column, value and type."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.training.head import Head, head_of, heads_of
from spark_hvd.estimators.transform.outputs import Output, label_output, to_arrow


def column(values: Any, dtype: torch.dtype, element: str) -> list[Any]:
    array = to_arrow([torch.tensor(values, dtype=dtype)], [Output("p", 0, "value", element, element)])
    return [row["c0"] for row in array.to_pylist()]


@pytest.mark.parametrize(
    ("dtype", "value", "element"),
    [
        (torch.int64, 3_000_000_000, "int"),
        (torch.int64, -3_000_000_000, "int"),
        (torch.int64, 300, "tinyint"),
        (torch.int32, -40_000, "smallint"),
        (torch.uint8, 200, "tinyint"),
        (torch.uint64, 2**63, "bigint"),
        (torch.int64, 16_777_217, "float"),
        (torch.int64, 2**53 + 1, "double"),
        (torch.int64, 2**63 - 1, "double"),
        (torch.float64, 1e300, "float"),
    ],
)
def test_what_a_column_cannot_hold(dtype: torch.dtype, value: float, element: str) -> None:
    with pytest.raises(ModelError, match=rf"output 'p' .* {str(dtype)[6:]} {re.escape(str(value))}, .* {element} "):
        column([1, value], dtype, element)


def test_what_a_column_holds() -> None:
    assert column([2**31 - 1, -(2**31)], torch.int64, "int") == [2**31 - 1, -(2**31)]
    assert column([255, 0], torch.uint8, "smallint") == [255, 0]
    assert column([2**62, -(2**63)], torch.int64, "double") == [2.0**62, -(2.0**63)]
    assert column([True, False], torch.bool, "float") == [1.0, 0.0]
    # Floating point numbers are rounded, to the nearest that there is.
    assert column([2.5e9, -1e20, 1.4, math.nan], torch.float64, "int") == [2**31 - 1, -(2**31), 1, None]
    assert column([math.inf, 0.5], torch.float64, "float") == [math.inf, 0.5]


class Own(nn.BCEWithLogitsLoss):
    pass


LOGITS = Head("binary", "logits")


@pytest.mark.parametrize(
    "loss",
    [nn.BCEWithLogitsLoss(), Own(), partial(nn.functional.binary_cross_entropy_with_logits, reduction="sum")],
)
def test_the_head_of_a_loss(loss: Any) -> None:
    assert head_of([loss]) == LOGITS
    assert heads_of([loss], 2) == (LOGITS, LOGITS)
    assert heads_of([nn.MSELoss(), loss], 2) == (Head("regression"), LOGITS)
    assert head_of([loss, loss]) == Head("other")


def test_booleans_of_logits() -> None:
    """Each output has the threshold of its own loss."""
    heads = heads_of([Own(), nn.BCELoss()], 2)
    plan = [label_output(f"p{i}", i, "boolean", (), head) for i, head in enumerate(heads)]
    scores = torch.tensor([-0.1, 0.1, 0.45, 0.6])
    rows = to_arrow([scores, scores], plan).to_pylist()
    assert [row["c0"] for row in rows] == [False, True, True, True]
    assert [row["c1"] for row in rows] == [False, False, False, True]
