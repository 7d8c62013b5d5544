"""The inputs and outputs of a model: recorded by fit, or derived from a DataFrame and two rows of zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spark_hvd.data.readers.dataset import Column, listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators.data.columns import check_columns, columns_of, widened
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.training.head import Head
from spark_hvd.estimators.training.inputs import TensorSpec, stacked
from spark_hvd.estimators.training.packing import PackedModule, unpack
from spark_hvd.estimators.transform.outputs import Shape
from spark_hvd.estimators.transform.predict import called, check_order
from spark_hvd.runner.spark.names import job_named
from spark_hvd.runner.spark.series import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

Decoders = Mapping[str, Callable[[bytes], Any]]


@dataclass(frozen=True, slots=True)
class ModelMeta:
    """Facts about a model's inputs and outputs, recorded by fit.

    Attributes:
        inputs: The inputs, with their columns and shapes as in training.
        labels: The columns of the labels, in the order of the outputs.
        head: Meaning of the output.
        heads: Meaning of each output, if known.
        shapes: Shape of each output for one row; None to find it with two rows of zeros when transform is called.
        epoch: Epoch of the history, from 1, after which the model had these weights; 0 if unknown.
    """

    inputs: tuple[TensorSpec, ...]
    labels: tuple[Column, ...]
    head: Head
    shapes: tuple[Shape, ...] | None = None
    heads: tuple[Head, ...] = ()
    epoch: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return JSON-serializable dicts and lists."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelMeta:
        """Invert :meth:`to_json`."""
        return cls(
            tuple(
                TensorSpec(
                    Column.from_json(i["column"]),
                    i["dtype"],
                    None if i["shape"] is None else tuple(i["shape"]),
                    i.get("stacked", False),  # models saved before this field existed lack it
                )
                for i in data["inputs"]
            ),
            tuple(map(Column.from_json, data["labels"])),
            Head(**data["head"]),
            None if data["shapes"] is None else tuple(tuple(shape) for shape in data["shapes"]),
            tuple(Head(**each) for each in data.get("heads", ())),
            data.get("epoch", 0),
        )


def inputs_of(
    schema: StructType,
    names: Sequence[str],
    decoders: Decoders,
    shapes: Sequence[tuple[int, ...] | None] | None = None,
    dtypes: Sequence[str | None] | None = None,
    text: bool = False,
) -> tuple[TensorSpec, ...]:
    """Return a model's inputs from a DataFrame's columns; without a dtype, float32, as in Horovod, or ``text``.

    Raises:
        ValueError: The number of shapes or dtypes is not that of the columns.
        DataError: A column is missing, or cannot become a tensor.
    """
    check_columns(schema, names, "feature_columns")
    _check_numbers(names, shapes, dtypes)
    columns = columns_of(schema, names, decoders=decoders, text=names if text else ())
    columns = widened(columns, zip(names, dtypes or [None] * len(names), strict=True))
    return tuple(
        TensorSpec(
            column,
            dtypes[i] if dtypes and dtypes[i] else None if _is_text(column, decoders) else "float32",
            shapes[i] if shapes else None,
        )
        for i, column in enumerate(columns)
    )


def _check_numbers(
    names: Sequence[str], shapes: Sequence[tuple[int, ...] | None] | None, dtypes: Sequence[str | None] | None
) -> None:
    for name, values in (("input_shapes", shapes), ("input_dtypes", dtypes)):
        if values is not None and len(values) != len(names):
            raise ValueError(f"{name}={list(values)!r}: expected {len(names)}, one for each of {listed(names)}")


def inputs_as_trained(
    schema: StructType,
    names: Sequence[str],
    decoders: Decoders,
    trained: Sequence[TensorSpec],
    shapes: Sequence[tuple[int, ...] | None] | None = None,
    dtypes: Sequence[str | None] | None = None,
) -> tuple[TensorSpec, ...]:
    """Return a model's inputs from a DataFrame's columns, if they are known from training.

    Numbers may be wider or narrower than in training, and vectors and arrays of numbers may replace each other. Shapes
    and dtypes are those of training unless others are given.

    Raises:
        ValueError: The number of columns differs from training, or from that of the shapes or dtypes.
        DataError: A column is missing, or of another type than in training.
    """
    if len(names) != len(trained):
        expected = listed(spec.column.name for spec in trained)
        raise ValueError(f"feature_columns={list(names)!r}: the model was trained with {expected}, expected as many")
    check_columns(schema, names, "feature_columns")
    _check_numbers(names, shapes, dtypes)
    text = [name for name, spec in zip(names, trained, strict=True) if _is_text(spec.column, decoders)]
    specs, columns = [], columns_of(schema, names, decoders=decoders, text=text)
    for number, (column, spec) in enumerate(zip(columns, trained, strict=True)):
        before = spec.column
        decoded = column.name in decoders  # in training, its dtype was that of the decoder's result
        if before.spark_type and not decoded and _family(column) != _family(before):
            raise DataError(
                f"column {column.name!r} is of type {column.spark_type}, but the model was trained with "
                f"{before.spark_type}: cast it, or name the intended column in feature_columns"
            )
        encoding = before.encoding if column.spark_type == "vector" else "plain"
        column = replace(column, dtype=before.dtype, shape=before.shape, encoding=encoding)
        if dtypes and dtypes[number]:
            (column,), spec = widened([column], [(column.name, dtypes[number])]), replace(spec, dtype=dtypes[number])
        if shapes and shapes[number]:
            spec = replace(spec, shape=shapes[number])
        specs.append(replace(spec, column=column))
    return tuple(specs)


def _is_text(column: Column, decoders: Decoders) -> bool:
    return column.dtype == "object" and column.name not in decoders


def _family(column: Column) -> tuple[str, int]:
    kind = column.dtype.rstrip("0123456789")
    return kind, 1 if column.spark_type == "vector" else column.spark_type.count("array<")


def probed_shapes(
    dataset: DataFrame,
    packed: PackedModule,
    specs: Sequence[TensorSpec],
    decoders: Decoders,
    labels: Sequence[str] = (),
) -> tuple[Shape, ...] | None:
    """Return the outputs' shapes for one row, from two rows of zeros through a copy of the model; None without rows.

    ``labels`` are the targets of the outputs, in order. In these rows, text is empty. Spark is asked for a row only if
    neither ``specs`` nor a column's metadata has the shape.

    Raises:
        ModelError: The model fails on them, or returns outputs by name in another order than ``labels``.
    """
    shapes = [_batch_shape(dataset, spec, decoders) for spec in specs]
    if any(shape is None for shape in shapes):
        return None
    zeros: list[Any] = [
        np.full(shape, "", object)
        if _is_text(spec.column, decoders)
        else torch.zeros(shape, dtype=getattr(torch, spec.dtype or _own_dtype(spec)), device="cpu")
        for shape, spec in zip(shapes, specs, strict=True)
        if shape is not None
    ]
    try:
        result, outputs = called(unpack(packed).eval(), stacked(specs, zeros))
    except Exception as error:
        called_with = ", ".join(
            f"{spec.column.name!r}: {zero.dtype} {tuple(zero.shape)}" for spec, zero in zip(specs, zeros, strict=True)
        )
        raise ModelError(
            f"the model does not run on two rows of zeros ({called_with}): {error}\nIt is called with one tensor "
            "for each of feature_columns. If the model needs another shape or dtype, pass input_shapes or input_dtypes."
        ) from error
    check_order(result, labels)
    return tuple(tuple(output.shape[1:]) for output in outputs)


def _own_dtype(spec: TensorSpec) -> str:
    return "float32" if spec.column.dtype == "object" else spec.column.dtype


def _batch_shape(dataset: DataFrame, spec: TensorSpec, decoders: Decoders) -> tuple[int, ...] | None:
    """Return the shape of two rows of an input; None if that takes a row and there is none."""
    column = spec.column
    if spec.shape is not None:
        each = spec.shape[1:] if spec.shape[0] == -1 else spec.shape
        if -1 not in each:
            return (2, *each)
    shape = column.shape if column.shape is not None else _measured(dataset, column, decoders)
    if shape is None or spec.shape is None:
        return None if shape is None else (2, *shape)
    return tuple(torch.empty(2, *shape, device="cpu").reshape(spec.shape).shape)


def _measured(dataset: DataFrame, column: Column, decoders: Decoders) -> tuple[int, ...] | None:
    declared = dataset.schema[column.name].metadata.get("ml_attr", {}).get("num_attrs")
    if declared:
        return (int(declared),)
    if dataset.isStreaming:
        return None
    rows = dataset.select(quoted(column.name)).where(f"{quoted(column.name)} is not null")
    with job_named(rows, f"spark_hvd: transform looks at a row, for the shape of {column.name!r}"):
        row = rows.head()
    if row is None:
        return None
    value = decoders[column.name](bytes(row[0])) if column.name in decoders else row[0]
    if column.spark_type == "vector":
        return (int(value.size),)
    return tuple(np.shape(value))
