"""Columns to append to a DataFrame: planned from the labels' types, then created from a model's outputs in Arrow."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from spark_hvd.data.readers.tensors import to_doubles
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.training.head import Head, threshold_of
from spark_hvd.estimators.transform.scoring import ELEMENTS, numbers_of, scores_of, within_digits

ARROW = {
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
}
_ODD = Head("other")
Shape = tuple[int, ...]
Values = torch.Tensor | list[Any]
"""An output for some rows: (rows, *shape of a row), or a value for each row."""


@dataclass(frozen=True, slots=True)
class Output:
    """One column that transform appends.

    Attributes:
        name: Name of the column.
        index: Index of the model's output from which it is created.
        role: "value" (the output itself, in the label's type), "raw", "probability" or "prediction".
        spark_type: The column's type: "vector", or one that Spark parses.
        element: Type of the numbers that Python passes to Spark: "double", "bigint", "boolean" ...
        depth: Number of lists around a number: 0 for scalars.
        threshold: Value above which a number is true, if ``element`` is "boolean".
    """

    name: str
    index: int
    role: str
    spark_type: str
    element: str = "double"
    depth: int = 0
    threshold: float = 0.5

    @property
    def arrow_ddl(self) -> str:
        """The type in which Python passes it, as DDL."""
        return "array<" * self.depth + self.element + ">" * self.depth

    @property
    def digits(self) -> tuple[int, int] | None:
        """Precision and scale if numbers become decimals."""
        match = re.search(r"decimal(?:\((\d+)(?:,(\d+))?\))?", self.spark_type)
        return (int(match[1] or 10), int(match[2] or 0)) if match else None

    @property
    def arrow_type(self) -> pa.DataType:
        """The type in which Python passes it, as Arrow's."""
        kind = ARROW[self.element]
        for _ in range(self.depth):
            kind = pa.list_(kind)
        return kind


def label_output(name: str, index: int, label_type: str, shape: Shape, head: Head = _ODD) -> Output:
    """Return the column of output ``index`` in the type of its label, "" if unknown; ``shape`` is that of a row.

    ``head`` is the meaning of the output, on which booleans depend.

    Returns:
        For a scalar label, a scalar of its type, or a vector if the output has several numbers. Vectors and arrays are
        unchanged. For an unknown type: double or vector.
    """
    depth = label_type.count("array<")
    inner = label_type.removeprefix("array<" * depth).removesuffix(">" * depth)
    element = inner if inner in ELEMENTS else "double"
    if depth:
        depth = depth if depth == len(shape) else 1
        known = inner in ELEMENTS or inner.startswith("decimal")
        kind = "array<" * depth + (inner if known else "double") + ">" * depth
        return Output(name, index, "value", kind, element, depth, threshold_of(head))
    if label_type == "vector" or math.prod(shape) != 1:
        return Output(name, index, "value", "vector", depth=1)
    known = inner in ELEMENTS or inner.startswith("decimal")
    return Output(name, index, "value", inner if known else "double", element, 0, threshold_of(head))


def head_outputs(head: Head, shape: Shape, raw: str, probability: str, prediction: str) -> tuple[Output, ...]:
    """Return Spark ML's columns, by these names ("" omits one), for a model with one output of ``shape`` per row.

    Returns:
        No columns if the head is "other" or ``shape`` does not match its kind: (classes,) or one number.
    """
    classes = head.kind == "multiclass" and len(shape) == 1 and shape[0] > 1
    single = head.kind in ("binary", "regression") and math.prod(shape) == 1
    if not (classes or single):
        return ()
    columns = [Output(prediction, 0, "prediction", "double")] if prediction else []
    if head.kind != "regression":
        vectors = (("raw", raw), ("probability", probability))
        columns = [Output(name, 0, role, "vector", depth=1) for role, name in vectors if name] + columns
    return tuple(columns)


def to_arrow(outputs: Sequence[Values], plan: Sequence[Output], head: Head = _ODD) -> pa.StructArray:
    """Return the columns of some rows.

    ``outputs`` are the model's, on the CPU; the first is a tensor if ``plan`` has columns of Spark ML.

    Returns:
        A struct with the fields "c0", "c1" ... of ``plan``. NaN is null in integer columns.

    Raises:
        ModelError: An output has several numbers per row instead of one, or values that its type cannot hold.
    """
    scored: dict[str, torch.Tensor] = {}
    if any(output.role != "value" for output in plan):
        assert isinstance(outputs[0], torch.Tensor)
        scored = scores_of(outputs[0], head.kind, head.scores)
    arrays = [
        _array(outputs[output.index] if output.role == "value" else scored[output.role], output) for output in plan
    ]
    return pa.StructArray.from_arrays(arrays, names=[f"c{i}" for i in range(len(plan))])


def _array(tensor: Values, output: Output) -> pa.Array:
    if isinstance(tensor, list):
        try:
            found = _inferred(tensor) if output.element in ELEMENTS else None
            floats = None if found is None else _floats(found, output)
            return pa.array(tensor, output.arrow_type) if floats is None else floats
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise ModelError(
                f"output {output.name!r} of the model was declared as {output.spark_type}, but not all of its "
                f"{len(tensor)} values have this type: {error}"
            ) from error
    rows, shape = len(tensor), tuple(tensor.shape[1:])
    if not output.depth and rows and math.prod(shape) != 1:
        raise ModelError(
            f"the model returns {math.prod(shape)} numbers per row for {output.name!r}, expected one. Its "
            "output's shape was unknown when transform was called, because there were no rows: call transform again."
        )
    array = _numbers(tensor.reshape(-1), output)
    lists = (math.prod(shape),) if output.depth == 1 else shape[: output.depth]
    for level in range(len(lists) if output.depth else 0, 0, -1):
        count = rows * math.prod(lists[: level - 1])
        array = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * lists[level - 1]), array)
    return array


def _inferred(values: list[Any]) -> pa.Array | None:
    """Return the values in the type that Arrow infers; None if it infers none for all of them."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return None


def _floats(array: pa.Array, output: Output) -> pa.Array | None:
    """Convert floating point numbers and decimals, in lists or not, as those of tensors; None if there are others.

    Arrow itself would truncate them.

    Raises:
        DataError, ModelError: A type cannot represent a number.
    """
    if pa.types.is_list(array.type):
        inner = _floats(array.values, output)
        return None if inner is None else pa.ListArray.from_arrays(array.offsets, inner, mask=array.is_null())
    if pa.types.is_decimal(array.type):
        array = to_doubles(array, output.name)
    if not pa.types.is_floating(array.type):
        return None
    known = array.is_valid().to_numpy(zero_copy_only=False)
    numbers = _numbers(torch.from_numpy(array.fill_null(0.0).to_numpy().copy()), output)
    return pc.if_else(pa.array(known), numbers, None)


def _numbers(flat: torch.Tensor, output: Output) -> pa.Array:
    if output.digits and flat.is_floating_point():
        flat = within_digits(flat, *output.digits)
    try:
        values, missing = numbers_of(flat, output.element, output.threshold, output.name)
    except ValueError as error:
        raise ModelError(str(error)) from error
    return pa.array(values, mask=missing)
