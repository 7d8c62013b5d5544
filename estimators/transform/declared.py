"""Outputs whose names and types the caller declares: plans columns, and takes their values from a model's results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spark_hvd.data.readers.dataset import listed
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.transform.outputs import ARROW, Output, Values
from spark_hvd.world.words import count

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

DEFAULT = "prediction"
_ALIASES = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint", "real": "float"}


def declared_outputs(outputs: str | DataType | Mapping[str, str | DataType]) -> tuple[Output, ...]:
    """Return the columns for ``outputs``: a type for a column "prediction", or types by names.

    Raises:
        TypeError, ValueError: No output is named, or a type is not supported.
    """
    declared = outputs if isinstance(outputs, Mapping) else {DEFAULT: outputs}
    if not declared:
        raise ValueError("outputs={}: expected a type, or types by names, such as {'embedding': 'array<float>'}")
    return tuple(_declared(name, index, kind) for index, (name, kind) in enumerate(declared.items()))


def _declared(name: str, index: int, kind: str | DataType) -> Output:
    text = kind if isinstance(kind, str) else getattr(kind, "simpleString", lambda: None)()
    if not isinstance(name, str) or not isinstance(text, str):
        raise TypeError(f"outputs has {name!r}: {kind!r}, expected a name and a Spark type")
    inner = text.replace(" ", "").lower()
    depth = inner.count("array<")
    inner = inner.removeprefix("array<" * depth).removesuffix(">" * depth)
    inner = _ALIASES.get(inner, inner)
    if inner == "vector" and not depth:
        return Output(name, index, "value", "vector", depth=1)
    decimal = inner == "decimal" or inner.startswith("decimal(")
    if inner not in ARROW and not decimal:
        raise ValueError(
            f"outputs declares {name!r} as {text!r}: expected one of {', '.join(ARROW)}, decimal(p,s), arrays of "
            "these, or vector"
        )
    return Output(name, index, "value", "array<" * depth + inner + ">" * depth, "double" if decimal else inner, depth)


def taken(result: Any, plan: Sequence[Output], rows: int) -> list[Values]:
    """Return the values of each declared output in a model's result for ``rows`` rows, on the CPU.

    Args:
        result: A mapping by the names of the outputs; a sequence of outputs in order; a list of mappings, one for each
            row; or a single output. An output is a tensor, an array, or a list of values.
        plan: The declared outputs, in order.
        rows: Number of rows.

    Raises:
        ModelError: An output is missing, has another number of rows, or a shape that does not match its type.
    """
    results = [_values(each) for each in _each(result, plan, rows)]
    for values, output in zip(results, plan, strict=True):
        found_rows = len(values) if isinstance(values, list) or values.ndim else None
        if found_rows != rows:
            got = f"{found_rows} values" if isinstance(values, list) else f"the shape {tuple(values.shape)}"
            raise ModelError(
                f"output {output.name!r} of the model has {got} for {count(rows, 'row')}: expected one for each row, "
                f"in their order{squeezed(rows)}"
            )
        if isinstance(values, torch.Tensor):
            _check_shape(values, output)
    return results


def squeezed(rows: int) -> str:
    """Return a hint, for messages, at what may have removed the dimension of the rows from an output for one row."""
    return ". squeeze() also removes the dimension of a single row: name it, as in squeeze(-1)" if rows == 1 else ""


def _each(result: Any, plan: Sequence[Output], rows: int) -> list[Any]:
    names = [output.name for output in plan]
    if isinstance(result, list) and len(result) == rows and rows and all(isinstance(row, Mapping) for row in result):
        incomplete = next((row for row in result if not all(name in row for name in names)), None)
        if incomplete is None:
            return [[row[name] for row in result] for name in names]
        if rows > 1:
            raise ModelError(
                f"the model returns {listed(incomplete)} for a row, but outputs declares {listed(names)}: name outputs "
                "as the model does"
            )
        result = incomplete
    if isinstance(result, Mapping):
        if all(name in result for name in names):
            return [result[name] for name in names]
        if len(names) == len(result) == 1:
            return list(result.values())
        raise ModelError(
            f"the model returns {listed(result)}, but outputs declares {listed(names)}: name outputs as the model does"
        )
    if len(plan) == 1:
        single = (
            isinstance(result, list | tuple)
            and len(result) == 1
            and bool(getattr(result[0], "ndim", False))
            and len(result[0]) == rows
        )
        return [result[0] if single else result]
    if not isinstance(result, list | tuple) or len(result) != len(plan):
        what = f"{len(result)} outputs" if isinstance(result, list | tuple) else f"one {type(result).__name__}"
        raise ModelError(f"the model returns {what}, but outputs declares {len(plan)}: {listed(names)}")
    return list(result)


def _values(value: Any) -> Values:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if not isinstance(value, np.ndarray) and hasattr(value, "numpy"):
        value = value.numpy()  # a TensorFlow tensor
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(np.ascontiguousarray(value))
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ModelError(f"the model returned {type(value).__name__}: expected a tensor, an array or a list of values")
    return [each.tolist() if hasattr(each, "tolist") else each for each in value]


def _check_shape(tensor: torch.Tensor, output: Output) -> None:
    shape, text = tuple(tensor.shape[1:]), output.element in ("string", "binary")
    if not text and (len(shape) == output.depth if output.depth else math.prod(shape) == 1):
        return
    expected = "(rows" + "".join(f", n{i}" for i in range(1, output.depth + 1)) + ")"
    matching = "array<" * len(shape) + "float" + ">" * len(shape)
    raise ModelError(
        f"output {output.name!r} of the model is {str(tensor.dtype).removeprefix('torch.')} of shape "
        f"{tuple(tensor.shape)}, but was declared as {output.spark_type}: expected "
        + (f"a list of {output.element}" if text else f"the shape {expected}")
        + f". Pool or reshape it in the model, or declare it as {matching!r}"
    )
