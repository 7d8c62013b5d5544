"""A model's outputs as columns: the exact numbers, or an error that names column, value and type."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.training.head import Head, head_of, heads_of
from spark_hvd.estimators.transform.declared import declared_outputs, taken
from spark_hvd.estimators.transform.outputs import Output, label_output, to_arrow
from spark_hvd.estimators.transform.predict import run
from spark_hvd.estimators.transform.scoring import ScoredModel, scores_of


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
    # Floating point numbers are rounded to the nearest value.
    assert column([2.5e9, -1e20, 1.4, math.nan], torch.float64, "int") == [2**31 - 1, -(2**31), 1, None]
    assert column([math.inf, 0.5], torch.float64, "float") == [math.inf, 0.5]
    assert column([math.nan, 0.6, -math.inf], torch.float32, "boolean") == [None, True, False]


@pytest.mark.parametrize("element", ["float", "double", "bigint", "boolean"])
def test_complex_numbers_are_refused(element: str) -> None:
    """Their imaginary part would be lost."""
    with pytest.raises(ModelError, match="output 'p' of the model is complex64, and columns hold real numbers"):
        column([1 + 2j], torch.complex64, element)
    with pytest.raises(ValueError, match="is complex64"):
        scores_of(torch.tensor([1 + 2j]), "regression", "logits")


@pytest.mark.parametrize(("element", "first"), [("boolean", False), ("int", 0)])
def test_a_pyfunc_has_no_value_for_nan_where_spark_has_null(element: str, first: Any) -> None:
    output = {"name": "p", "element": element, "digits": None, "threshold": 0.5}
    model = ScoredModel(nn.Identity(), {})
    values = torch.tensor([[0.0, math.nan], [1.0, 1.0]])
    assert model._column(values, output | {"depth": 1}) == [[first, None], [1, 1]]
    flat = pd.Series(model._column(values.reshape(-1), output | {"depth": 0}))
    assert flat.isna().tolist() == [False, True, False, False]
    assert flat[0] == first


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


@pytest.mark.parametrize(
    ("kind", "greatest"),
    [("decimal(3,2)", 9.99), ("decimal", 9999999999.0), ("decimal(38,0)", 1e38), ("array<decimal(17,2)>", 1e15)],
)
def test_decimals_are_the_nearest_that_there_is(kind: str, greatest: float) -> None:
    """Integers are exact; Spark fails if a number has more digits than its column."""
    depth = kind.count("array<")
    output = Output("p", 0, "value", kind, "double", depth)
    values = torch.tensor([math.inf, 1e300, -1e300, 1.5], dtype=torch.float64)
    array = to_arrow([values.reshape(4, *[1] * depth)], [output]).field("c0")
    found = (array.flatten() if depth else array).to_pylist()
    assert found[0] == found[1] == -found[2] == pytest.approx(greatest)
    assert found[0] <= greatest
    assert found[3] == 1.5
    whole = {"name": "p", "index": 0, "role": "value", "element": "double", "depth": 0, "threshold": 0.5}
    plan = {"inputs": [], "outputs": [], "kind": "other", "scores": "", "decoders": {}, "batch_size": 9}
    scored = ScoredModel(nn.Identity(), plan)._column(values, {**whole, "digits": output.digits})
    assert scored[3] == (2.0 if output.digits and not output.digits[1] else 1.5)  # a whole number at scale 0
    assert scored[0] == pytest.approx(greatest)
    halves = torch.tensor([0.125, 2.675], dtype=torch.float64)
    rounded = ScoredModel(nn.Identity(), plan)._column(halves, {**whole, "digits": (3, 2)})
    assert rounded.tolist() == [0.13, 2.68]  # Spark rounds the digits that it shows


def test_a_rate_is_predicted_where_its_logarithm_is_trained() -> None:
    assert (
        head_of([nn.PoissonNLLLoss()]) == head_of([nn.functional.poisson_nll_loss]) == Head("regression", "logarithm")
    )
    for loss in (nn.PoissonNLLLoss(log_input=False), partial(nn.functional.poisson_nll_loss, log_input=False)):
        assert head_of([loss]) == Head("regression")
    found = scores_of(torch.tensor([[0.0], [2.0]]), "regression", "logarithm")["prediction"]
    assert found.flatten().tolist() == pytest.approx([1.0, math.e**2])


def test_outputs_by_name_in_another_order_are_refused() -> None:
    """They are taken in order, so labels would belong to other outputs."""

    def model(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"b": 2 * x, "a": x}

    inputs = [torch.ones(2, 1)]
    assert len(run(model, inputs, ["b", "a"])) == len(run(model, inputs, ["x", "y"])) == 2
    with pytest.raises(ModelError, match="a dict with 'b', 'a', but the labels are 'a', 'b'"):
        run(model, inputs, ["a", "b"])


def listed_column(values: list[Any], kind: str) -> list[Any]:
    output = Output("p", 0, "value", kind, kind.removeprefix("array<").removesuffix(">"), kind.count("array<"))
    return [row["c0"] for row in to_arrow([values], [output]).to_pylist()]


def test_lists_become_what_tensors_become() -> None:
    """Arrow would truncate decimals, and turn values that are too large into infinity."""
    assert listed_column([1.7, None, -1.7, math.nan, 3e9], "int") == [2, None, -2, None, 2**31 - 1]
    assert listed_column([[1.7, 0.2], None, []], "array<bigint>") == [[2, 0], None, []]
    assert listed_column([Decimal("1.7"), None], "tinyint") == [2, None]
    assert listed_column([Decimal("0.1")], "double") == [0.1]
    assert listed_column([0.7, 0.2], "boolean") == [True, False]
    assert listed_column([1, 2], "int") == [1, 2]
    # Arrow infers no type for these, and the declared one holds them.
    assert listed_column([True, 0.5], "double") == [1.0, 0.5]
    assert listed_column([2.0**53, 2**53 + 1], "bigint") == [2**53, 2**53 + 1]
    assert listed_column([[], [2**53 + 1, 1.0]], "array<bigint>") == [[], [2**53 + 1, 1]]
    with pytest.raises(ModelError, match="output 'p' of the model was declared as double"):
        listed_column([2**63, 2**70], "double")
    with pytest.raises(ModelError, match=r"output 'p' of the model has the float64 1e\+300"):
        listed_column([1e300], "float")
    with pytest.raises(ModelError, match="not all of its 1 values have this type"):
        listed_column([Decimal("12345678901234567.89")], "double")


def test_rows_that_lack_an_output_are_told() -> None:
    plan = declared_outputs({"p": "float"})
    with pytest.raises(ModelError, match="returns 'q' for a row, but outputs declares 'p'"):
        taken([{"p": 1.0}, {"q": 1.0}], plan, 2)


def test_a_pyfunc_takes_nested_lists_as_spark_gives_them() -> None:
    plan = {
        "inputs": [{"name": "x", "dtype": "float32", "to": None, "shape": None, "stacked": False}],
        "outputs": [],
        "decoders": {},
    }
    cells = [np.array([np.array([1.0, 2.0]), np.array([3.0, each])], object) for each in (4.0, 5.0)]
    found = ScoredModel(nn.Identity(), plan)._input(pd.Series(cells), plan["inputs"][0])  # type: ignore[index] # above
    assert found.tolist() == [[[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 5.0]]]
