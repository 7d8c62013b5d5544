"""Converts values to a model's inputs, and its outputs to predictions; also serves a model as MLflow's pyfunc.

This file is copied into models logged to MLflow, for environments without spark_hvd, so it must not import spark_hvd.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import torch

ELEMENTS = {
    "tinyint": torch.int8,
    "smallint": torch.int16,
    "int": torch.int32,
    "bigint": torch.int64,
    "float": torch.float32,
    "double": torch.float64,
    "boolean": torch.bool,
}


def scores_of(output: torch.Tensor, kind: str, given: str) -> dict[str, torch.Tensor]:
    """Return Spark ML's columns for an output.

    Args:
        output: Scores (rows, classes), (rows, 1) or (rows,).
        kind: "multiclass", "binary" or "regression".
        given: Kind of the scores: "logits", "log_probabilities", "probabilities"; "logarithm" for a regression whose
            predictions are the exponentials of the outputs.

    Returns:
        "raw" and "probability" (rows, classes), "prediction" (rows,), float64; for a regression only the last.

    Raises:
        ValueError: The scores are complex numbers.
    """
    _require_real(output, "output")
    scores = output.double().unsqueeze(-1).flatten(1)  # also for (rows,)
    if kind == "regression":
        return {"prediction": scores.exp() if given == "logarithm" else scores}
    if kind == "binary":
        positive = torch.logit(scores) if given == "probabilities" else scores
        scores = torch.cat((-positive, positive), 1)
        probability = torch.sigmoid(scores)
    else:
        scores = scores.log() if given == "probabilities" else scores
        probability = torch.softmax(scores, 1)
    # of equal scores, the first class wins, as in Spark ML
    return {"raw": scores, "probability": probability, "prediction": scores.argmax(1)}


def _require_real(tensor: torch.Tensor, what: str) -> None:
    if tensor.is_complex():
        raise ValueError(
            f"{what} of the model is {str(tensor.dtype).removeprefix('torch.')}, and columns hold real numbers: have "
            "the model return its abs(), its real part, or torch.view_as_real(...)"
        )


def within_digits(flat: torch.Tensor, precision: int, scale: int) -> torch.Tensor:
    """Clamp numbers to a decimal's range; NaN stays."""
    limit = Fraction(10**precision - 1, 10**scale)
    high = float(limit)
    high = high if high <= limit else math.nextafter(high, 0)
    return flat.double().clamp(-high, high)


def _nested(value: Any) -> Any:
    """Return a value of a column as one array; Spark gives pandas nested lists as arrays of arrays."""
    array = np.asarray(value)
    return np.stack([_nested(each) for each in array]) if array.dtype == object and array.ndim else array


def _rounded(number: float, scale: int) -> float:
    """Round a number to this many decimal places, as Spark does."""
    if not math.isfinite(number):
        return number
    return float(Decimal(repr(number)).quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP, Context(prec=60)))


def numbers_of(flat: torch.Tensor, element: str, threshold: float, name: str) -> tuple[Any, Any]:
    """Convert an output's numbers to the type of its column.

    Integers are converted exactly. Floating point numbers are rounded to the nearest integer of the type, or to
    narrower floating point; booleans follow from a threshold. NaN is not an integer, and neither true nor false.

    Args:
        flat: The numbers, (n,).
        element: The type, a key of :data:`ELEMENTS`.
        threshold: Value above which numbers are true.
        name: Name of the column, for messages.

    Returns:
        An array (n,), and a mask of the values that the type cannot represent (NaN), or None.

    Raises:
        ValueError: The type cannot represent an integer, or is too narrow for a number; or numbers are complex.
    """
    _require_real(flat, f"output {name!r}")
    dtype = ELEMENTS[element]
    if flat.dtype == dtype:
        return flat.numpy(), None
    if dtype == torch.bool:
        return (flat > threshold).numpy(), flat.double().isnan().numpy()
    if flat.dtype.is_floating_point and not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        # the largest double below 2**63 is 2**63 - 1024
        high = limits.max if dtype != torch.int64 else limits.max - 1023
        rounded = flat.double().round()
        missing = rounded.isnan()
        integers = rounded.nan_to_num(0.0).clamp(limits.min, high).to(dtype)
        return integers.numpy(), missing.numpy()
    converted = flat.to(dtype)
    if flat.dtype.is_floating_point:
        wrong = converted.isinf() & ~flat.isinf()
    elif flat.dtype == torch.bool:
        return converted.numpy(), None
    else:
        wrong = torch.from_numpy(_changed(flat.numpy(), converted.numpy()))
    if wrong.any():
        kind = str(flat.dtype).removeprefix("torch.")
        raise ValueError(
            f"output {name!r} of the model has the {kind} {flat[wrong][0].item()}, which its column of type {element} "
            "cannot hold. Declare a wider type (bigint, double), or make the model return numbers that fit"
        )
    return converted.numpy(), None


def _changed(before: Any, after: Any) -> Any:
    """Return a mask of integers that a conversion has changed."""
    if after.dtype.kind == "f":  # all integers below 2**24 and 2**53 are exact; 2**63 would not come back
        exact = 2 ** (24 if after.itemsize == 4 else 53)
        large = (before > exact) | (before < -exact)
        large[large] = [int(one) != int(two) for one, two in zip(before[large], after[large], strict=True)]
        return large
    limits = np.iinfo(after.dtype)
    high = before > limits.max if np.iinfo(before.dtype).max > limits.max else np.zeros(len(before), bool)
    return high | (before < limits.min) if np.iinfo(before.dtype).min < limits.min else high


def _converted(tensor: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    """Convert values to another dtype: integers and booleans exactly, as in training; floating point is rounded."""
    kind = getattr(torch, dtype)
    converted = tensor.to(kind)
    if not kind.is_floating_point and tensor.dtype not in (kind, torch.bool):
        same = converted.to(tensor.dtype) == tensor
        if tensor.is_floating_point():
            same &= tensor < 2.0**63
        if not same.all():
            raise ValueError(f"column {name!r} has {tensor[~same][0].item()}, which {dtype} cannot hold")
    return converted


class ScoredModel:
    """The object that MLflow calls: it takes a pandas DataFrame and returns one with the columns of ``transform``.

    Args:
        model: A ``torch.nn.Module``.
        plan: "inputs", each with "name", "dtype", "to", "shape" and "stacked"; "outputs", each with "name", "index",
            "role", "element", "depth", "threshold" and "digits" (of a decimal, or None); "kind" and "scores" of the
            head; "decoders"; "batch_size".
    """

    def __init__(self, model: torch.nn.Module, plan: Mapping[str, Any]) -> None:
        self.model, self.plan = model.eval(), plan

    def predict(self, model_input: pd.DataFrame, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Return predictions for each row, with the rows' index.

        Vectors and arrays are lists or numpy arrays; ``params`` is not used.

        Raises:
            ValueError: A column is missing, or has values of the wrong kind or of different lengths.
        """
        wanted = [each["name"] for each in self.plan["inputs"]]
        if missing := [name for name in wanted if name not in model_input.columns]:
            raise ValueError(f"the rows have no column {missing[0]!r}, which the model needs: expected {wanted}")
        size, frames = self.plan["batch_size"], []
        for at in range(0, len(model_input), size):
            frames.append(self._predicted(model_input.iloc[at : at + size]))
        return pd.concat(frames) if frames else pd.DataFrame(columns=[each["name"] for each in self.plan["outputs"]])

    def _predicted(self, rows: pd.DataFrame) -> pd.DataFrame:
        plan = self.plan
        inputs = [self._input(rows[each["name"]], each) for each in plan["inputs"]]
        if plan["inputs"][0]["stacked"]:
            stack = torch.cat([each.flatten(1) if each.dim() > 1 else each.unsqueeze(1) for each in inputs], 1)
            for each, tensor in zip(plan["inputs"], inputs, strict=True):
                if stack.dtype in (torch.float32, torch.float64) and not (
                    tensor.is_floating_point() or tensor.dtype == torch.bool
                ):
                    wrong = _changed(tensor.numpy(), tensor.to(stack.dtype).numpy())
                    if wrong.any():
                        kind = str(stack.dtype).removeprefix("torch.")
                        raise ValueError(
                            f"column {each['name']!r} has {tensor.numpy()[wrong][0]}, which {kind} cannot hold"
                        )
            inputs = [stack]
        with torch.inference_mode():
            result = self.model(*inputs)
        result = list(result.values()) if isinstance(result, Mapping) else result
        outputs: Sequence[torch.Tensor] = [result] if isinstance(result, torch.Tensor) else list(result)
        ml = any(each["role"] != "value" for each in plan["outputs"])
        scored = scores_of(outputs[0], plan["kind"], plan["scores"]) if ml else {}
        columns = {
            each["name"]: self._column(
                outputs[each["index"]] if each["role"] == "value" else scored[each["role"]], each
            )
            for each in plan["outputs"]
        }
        frame: pd.DataFrame = pd.DataFrame(
            {name: pd.Series(values, index=rows.index) for name, values in columns.items()}
        )
        return frame

    def _input(self, column: pd.Series[Any], spec: Mapping[str, Any]) -> torch.Tensor:
        decode, name = self.plan["decoders"].get(spec["name"]), spec["name"]
        try:
            if decode is not None:
                array = np.stack([np.asarray(decode(bytes(value))) for value in column])
            elif column.dtype == object:
                array = np.stack([_nested(value) for value in column])
            else:
                array = column.to_numpy()
            if decode is None and array.dtype.kind not in "biuf":  # decimals
                array = array.astype(spec["dtype"])
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            tensor = tensor if decode is not None else _converted(tensor, spec["dtype"], name)
            tensor = tensor if spec["shape"] is None else tensor.reshape(spec["shape"])
        except (TypeError, ValueError, RuntimeError) as error:
            expected = f"expected {spec['dtype']}" if decode is None else "expected what its decoder takes"
            raise ValueError(f"column {name!r}: {expected}, the same number in each row: {error}") from error
        if len(tensor) != len(column):
            raise ValueError(f"column {name!r}: its values do not fit into the shape {spec['shape']} of a batch")
        return _converted(tensor, spec["to"], name) if spec["to"] else tensor

    def _column(self, tensor: torch.Tensor, output: Mapping[str, Any]) -> Any:
        flat, digits = tensor.reshape(-1), output["digits"]
        if digits and flat.is_floating_point():
            flat = within_digits(flat, *digits)
        values, missing = numbers_of(flat, output["element"], output["threshold"], output["name"])
        if digits:
            values = np.array([_rounded(each, digits[1]) for each in values.tolist()], np.float64)
        if output["depth"]:
            shape = tensor.shape[1:] if output["depth"] > 1 else (-1,)
            if missing is not None and missing.any():
                values = np.where(missing, None, values.astype(object))
            return list(values.reshape(len(tensor), *shape).tolist())
        if missing is None or not missing.any():
            return values
        return (pd.arrays.BooleanArray if values.dtype == bool else pd.arrays.IntegerArray)(values, missing)


def _load_pyfunc(path: str) -> ScoredModel:
    """Load the model from its folder, for MLflow. This runs the code in its pickle: only load what you trust."""
    with open(os.path.join(path, "plan.pkl"), "rb") as file:
        plan = pickle.load(file)
    model = torch.load(os.path.join(path, "model.pt"), map_location="cpu", weights_only=False)
    return ScoredModel(model, plan)
