"""A column's values in the requested dtype: the number itself, or an error that names it."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn

from spark_hvd.data.columns import torch_batch
from spark_hvd.data.readers.dataset import Column, DatasetMeta
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.tensors import check_stack, converted
from spark_hvd.estimators.data.columns import widened
from spark_hvd.estimators.params import checks
from spark_hvd.estimators.torch.trial import try_batch
from spark_hvd.estimators.training.inputs import TensorSpec, tensors_of
from spark_hvd.estimators.training.spec import Objects, TrainSpec
from spark_hvd.store import Store


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


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_integers_that_torch_does_not_compare(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max
    assert converted(torch.tensor([0, 127], dtype=dtype), "int8", "x").tolist() == [0, 127]
    for wrong in (128, most):
        with pytest.raises(DataError, match=f"int8 cannot hold, first the {str(dtype)[6:]} {wrong}: .* 0 to 127"):
            converted(torch.tensor([1, wrong], dtype=dtype), "int8", "x")
    check_stack(torch.tensor([0, 2048], dtype=dtype), torch.float16, "x")
    with pytest.raises(DataError, match=f"column 'x' has the {str(dtype)[6:]} 2049, which float16"):
        check_stack(torch.tensor([1, 2049], dtype=dtype), torch.float16, "x")


@pytest.mark.parametrize(
    ("dtypes", "value", "stack"),
    [
        ((torch.int64, torch.float32), 2**24 + 1, "float32"),
        ((torch.int32, torch.float32), -(2**24) - 1, "float32"),
        ((torch.int64, torch.float64), 2**53 + 1, "float64"),
        ((torch.int64, torch.float32), 2**63 - 1, "float32"),
        ((torch.int16, torch.float16), 2049, "float16"),
    ],
)
def test_integers_that_the_dtype_of_a_stack_cannot_hold(
    dtypes: tuple[torch.dtype, torch.dtype], value: int, stack: str
) -> None:
    specs = [TensorSpec(Column(name, str(own)[6:]), stacked=True) for name, own in zip("ab", dtypes, strict=True)]
    batch = {"a": torch.tensor([1, value], dtype=dtypes[0]), "b": torch.ones(2, dtype=dtypes[1])}
    with pytest.raises(
        DataError, match=rf"column 'a' has the int\d\d {value}, which {stack}, the dtype of the stacked"
    ):
        tensors_of(specs, batch)
    batch["a"] = torch.tensor([[value - value % 2] * 2] * 2, dtype=torch.int64)
    if value < 2**60:
        (found,) = tensors_of(specs, batch)
        assert found[:, 0].tolist() == [value - value % 2] * 2


def training(*inputs: TensorSpec, label: str = "y", **fields: Any) -> TrainSpec:
    no_rows, labels = DatasetMeta("", (), ()), (TensorSpec(Column(label, "float32")),)
    sizes: dict[str, Any] = {"batch_size": 1, "val_batch_size": 1, "epochs": 1}
    return TrainSpec(
        inputs=inputs, labels=labels, columns=(), train=no_rows, validation=None, store=Store.create("memory://"),
        run_id="", **sizes, **fields,
    )  # fmt: skip


def test_which_inputs_batches_may_have_side_by_side() -> None:
    a, b = (TensorSpec(Column(name, "float64"), "float32", stacked=True) for name in "ab")
    assert training(b, a, sample_weight_col="w").stack == ("b", "a")
    whole = [replace(each, dtype=None) for each in (a, b)]
    assert training(*whole).stack == ("a", "b")
    refused = [replace(each, dtype="int64") for each in (a, b)]  # the error names the column
    wide = replace(a, column=Column("a", "float64", (2,)))
    apart = [replace(each, stacked=False) for each in (a, b)]
    for inputs in ((), apart, (a, a), (a, whole[1]), refused, (a, replace(b, shape=[-1, 1])), (wide, b)):
        assert training(*inputs).stack == ()
    assert training(a, b, label="b").stack == training(a, b, sample_weight_col="a").stack == ()


@pytest.mark.parametrize(
    ("loss", "alike"),
    [
        (nn.L1Loss(reduction="sum"), True),
        (lambda output, label: (output - label).square().sum(), True),
        (nn.L1Loss(), False),
        (lambda output, label: (output - label).square().mean(), False),
    ],
)
def test_sums_are_validated_in_the_batches_of_one_process(loss: Any, alike: bool) -> None:
    batch = {"a": torch.arange(6.0), "y": torch.ones(6)}
    objects = Objects(nn.Linear(1, 1), lambda params: torch.optim.SGD(params, 0.1), loss=[loss])
    spec = training(TensorSpec(Column("a", "float32"), shape=(-1, 1)))
    assert try_batch(spec, objects, batch).validation_depends_on_batches is alike


def test_the_rest_of_a_run_has_the_seed_that_was_drawn() -> None:
    assert [training(seed=1, draws_seed=drawn).for_rest({"seed": 5}).seed for drawn in (True, False)] == [5, 1]


def test_a_column_that_is_not_finite_is_named_wherever_it_lies() -> None:
    spec = training(*(TensorSpec(Column(name, "float64", spark_type="double"), stacked=True) for name in "ab"))
    columns = {"a": torch.tensor([1.0, 2, 3]), "b": torch.tensor([1.0, math.nan, math.inf]), "y": torch.ones(3)}
    whole = {"y": columns["y"], "features": torch.stack([columns["a"], columns["b"]], 1)}
    found = spec.not_finite(columns)
    assert found.startswith("column 'b' has 2 values NaN or infinite, the first, nan, in row 1 of the batch. ")
    assert spec.not_finite(whole) == found
    renamed = {"y": columns["y"], "x": whole["features"]}  # as a hook of a LightningModule may rename them
    assert spec.not_finite(renamed).startswith("column 'x' has 2 values NaN or infinite")
    assert spec.not_finite({"y": columns["y"]}) == ""
    for changed in (whole["features"].unsqueeze(2), whole["features"][:, 1]):
        assert spec.not_finite({"features": changed}).startswith("column 'features' has 2 values NaN or infinite")


def test_integers_beside_floats_in_features() -> None:
    batch = pa.RecordBatch.from_pydict({"a": pa.array([1, 2**53 + 1]), "b": pa.array([0.5, 1.5], pa.float32())})
    with pytest.raises(DataError, match="column 'a' has the int64 9007199254740993, which float64"):
        torch_batch(batch, ["a", "b"])
    assert torch_batch(batch.slice(0, 1), ["a", "b"])["features"].tolist() == [[1.0, 0.5]]


@pytest.mark.parametrize(("digits", "places"), [(20, 2), (38, 2), (18, 17), (17, 0)])
def test_decimals_come_as_doubles_or_not_at_all(digits: int, places: int) -> None:
    kind = pa.decimal128(digits, places)

    def found(*values: str | None) -> Any:
        return torch_batch(pa.RecordBatch.from_arrays([pa.array(map(_decimal, values), kind)], ["x"]))["x"].tolist()

    assert found("0.10" if places else "1", "-2", "0") == [0.1 if places else 1, -2, 0]
    cents = [f"{number / 100:.2f}" for number in range(0, 700, 7)] if places else []
    assert found("0", None, *cents)[2:] == list(map(float, cents))
    assert math.isnan(found(None)[0])
    lost = "1" * (digits - places) + ("." + "3" * places if places else "")
    with pytest.raises(DataError, match=rf"column 'x' of decimal128\({digits}, {places}\) has {lost}, which float64"):
        found("1", lost, None)


def _decimal(value: str | None) -> Decimal | None:
    return None if value is None else Decimal(value)
