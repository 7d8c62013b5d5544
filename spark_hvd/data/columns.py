"""Convert the columns of a batch: numbers to arrays or tensors, other values to lists of Python objects.

======================  ===============================================  ==============================
Spark's type            numpy                                            PyTorch
======================  ===============================================  ==============================
numbers, boolean        (rows,) of that type                             the same
decimal                 (rows,) of float64, if it has the digits         the same
date, timestamp         (rows,) of datetime64; timestamps in UTC         int64: days or microseconds
                                                                         since 1970
string, binary          (rows,) of objects                               a list of str or bytes
array, also nested      (rows, length) of its values                     the same
array of other values   a list of lists                                  the same
vector of Spark ML      (rows, size) of float64                          the same
struct                  a dict by field                                  the same
map                     a list of dicts                                  the same
======================  ===============================================  ==============================

A null becomes NaN in floating-point and decimal columns, NaT in numpy's dates, None in lists and objects. It is an
error in integers, booleans, dates for PyTorch, and arrays. So are arrays of different lengths, unless :func:`padded` or
:func:`ragged` collates the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from spark_hvd.data.packed import PackedRows
from spark_hvd.data.readers.dataset import Column, listed
from spark_hvd.data.readers.errors import DataError, refuse_unfit_nulls
from spark_hvd.data.readers.forms import matrix_of
from spark_hvd.data.readers.measure import is_list, least_and_most
from spark_hvd.data.readers.tensors import check_stack, to_doubles, to_tensor
from spark_hvd.data.schemas.table import plain_type

Features = Sequence[str] | Mapping[str, Sequence[str]]
"""Names of columns to stack as "features", or a dict from names of stacks to such names."""

Values = Any
"""A numpy array, a list, or a dict of these by field."""

Offsets = np.ndarray[Any, np.dtype[np.int64]]
"""The offset of each row's first value, and the end of the last row; shape (rows + 1,)."""

Collate = Callable[[pa.RecordBatch], dict[str, Any]]
_VECTOR = {"type", "size", "indices", "values"}


def numpy_batch(batch: pa.RecordBatch | PackedRows, features: Features | None = None) -> dict[str, Values]:
    """Return a batch as numpy arrays. Arrays that share its memory are read-only.

    Raises:
        DataError: There are nulls, arrays of different lengths, or a stack of columns that are not numbers. The message
            names the column.
    """
    stacks = stacks_of(batch, features)
    stacked = {name for names in stacks.values() for name in names}
    arrays = {name: _stacked(batch, name, names) for name, names in stacks.items()}
    return arrays | {name: _values(batch, name) for name in batch.schema.names if name not in stacked}


def _values(batch: pa.RecordBatch | PackedRows, name: str) -> Values:
    if isinstance(batch, PackedRows) and (numbers := batch.numbers([name])) is not None:
        return numbers[:, 0]
    return values_of(batch.column(name), name)


def torch_batch(batch: pa.RecordBatch | PackedRows, features: Features | None = None) -> dict[str, Any]:
    """Return a batch as tensors that own their memory.

    Args:
        batch: Columns of any types.
        features: Columns of numbers, arrays and vectors to stack side by side into one tensor (rows, numbers), of the
            dtype that holds them all: a list of names for a tensor called "features", or a dict from the names of
            tensors to such lists. Stacked columns do not also appear on their own.

    Raises:
        DataError: As :func:`numpy_batch`.
    """
    return {name: _to_torch(values, name) for name, values in numpy_batch(batch, features).items()}


def padded(value: float = 0, to: int | None = None, features: Features | None = None) -> Collate:
    """Return a ``collate_fn`` for arrays of different lengths: tensors (rows, longest, ...), and the lengths.

    Args:
        value: The value after the end of shorter arrays.
        to: Length of all arrays; longer ones are cut. None for the length of the longest in the batch.
        features: As in :func:`torch_batch`.

    Returns:
        A function of a record batch. For a column "x" of arrays, it returns "x" and "x_lengths", int64 (rows,), the
        lengths after cutting. Arrays may hold numbers, which gives (rows, longest), or arrays of one shape, such as
        boxes of five numbers, which gives (rows, longest, 5). Other columns are as in :func:`torch_batch`.
    """

    def pad(name: str, values: Values, offsets: Offsets) -> dict[str, Any]:
        lengths = np.diff(offsets) if to is None else np.minimum(np.diff(offsets), to)
        longest = int(lengths.max(initial=0)) if to is None else to
        wide = np.full((len(lengths), longest, *values.shape[1:]), value, values.dtype)
        inside = np.arange(wide.shape[1]) < lengths[:, None]
        wide[inside] = values[(offsets[:-1, None] + np.arange(wide.shape[1]))[inside]]
        return {name: torch.from_numpy(wide), f"{name}_lengths": torch.from_numpy(lengths)}

    return _collate(pad, features)


def ragged(features: Features | None = None) -> Collate:
    """Return a ``collate_fn`` for arrays of different lengths: all values concatenated, and the offset of each row.

    Returns:
        A function of a record batch. For a column "x" of arrays, it returns "x", (values, ...), and "x_offsets", int64
        (rows + 1,), for ``torch.nn.EmbeddingBag`` and nested tensors. Arrays may hold numbers, or arrays of one shape.
        Other columns are as in :func:`torch_batch`.
    """

    def concatenate(name: str, values: Values, offsets: Offsets) -> dict[str, Any]:
        return {name: _to_torch(values, name), f"{name}_offsets": torch.from_numpy(offsets)}

    return _collate(concatenate, features)


def _collate(convert: Callable[[str, Values, Offsets], dict[str, Any]], features: Features | None) -> Collate:
    """Return a ``collate_fn`` that uses ``convert`` for arrays of numbers, and :func:`torch_batch` for the rest."""
    shapes: dict[str, tuple[int, ...]] = {}

    def collate(batch: pa.RecordBatch) -> dict[str, Any]:
        names = [field.name for field in batch.schema if is_list(field.type) and _is_number(_leaf_of(field.type))]
        tensors = torch_batch(batch.drop_columns(names), features) if len(names) < batch.num_columns else {}
        for name in names:
            added = convert(name, *_flat(batch.column(name), name, shapes))
            if twice := tensors.keys() & added.keys() or added.keys() & set(names) - {name}:
                raise DataError(
                    f"column {name!r} of arrays adds {min(twice)!r} to the batch, which is also a column: expected "
                    "distinct names. Next: rename that column"
                )
            tensors |= added
        return tensors

    return collate


def values_of(array: pa.Array, name: str) -> Values:
    """Return the values of a column; see the module's description.

    Raises:
        DataError: As :func:`numpy_batch`.
    """
    kind = array.type
    if pa.types.is_dictionary(kind):
        return values_of(array.dictionary_decode(), name)
    if pa.types.is_decimal(kind):
        array, kind = to_doubles(array, name), pa.float64()
    if pa.types.is_timestamp(kind) and kind.unit != "us":
        array, kind = _in_micros(array, pa.timestamp("us", kind.tz), name), pa.timestamp("us", kind.tz)
    if pa.types.is_time64(kind):
        array = _in_micros(array, pa.time64("us"), name)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        _check_nulls(array, name)
        return array.to_numpy(zero_copy_only=False)
    if pa.types.is_floating(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return array.to_numpy(zero_copy_only=False)
    if pa.types.is_struct(kind):
        if {field.name for field in kind} == _VECTOR:
            return to_tensor(array, Column(name, "float64", None, "vector", "sparse")).numpy()
        return {
            field.name: values_of(values, f"{name}.{field.name}")
            for field, values in zip(kind, array.flatten(), strict=True)
        }
    if is_list(kind):
        return _arrays(array, name)
    if pa.types.is_nested(kind):
        return _listed(array, name)
    objects = np.empty(len(array), object)
    objects[:] = array.to_pylist()
    return objects


def _in_micros(array: pa.Array, kind: pa.DataType, name: str) -> pa.Array:
    """Return times in microseconds, as in Spark and Python."""
    try:
        return array.cast(kind)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"column {name!r} of {array.type} has a time that {kind} cannot hold: {error}. Next: round it to "
            "microseconds where the column is made, or use arrow_batches"
        ) from error


def _listed(array: pa.Array, name: str) -> list[Any]:
    """Return values as Python objects; maps are dicts, at any depth."""
    listed: list[Any] = array.to_pylist()  # its maps_as_pydicts needs PyArrow 20
    with_dicts = _dicts_for(plain_type(array.type))
    if with_dicts is None:
        return listed
    try:
        return [value if value is None else with_dicts(value) for value in listed]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"column {name!r} of {array.type} has a map that cannot become a dict: expected distinct keys that "
            f"are neither arrays nor maps. Next: use arrow_batches, or a collate_fn ({error})"
        ) from error


def _dicts_for(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return a function that turns the maps in a value from lists of pairs into dicts; None for a type without maps.

    The function raises KeyError if a key comes twice, and TypeError if a key cannot be hashed.
    """
    if pa.types.is_map(kind):
        items = _dicts_for(kind.item_type)

        def of_map(pairs: Any) -> Any:
            by_key = dict(pairs)
            if len(by_key) < len(pairs):
                raise KeyError("a key comes twice")
            if items is None:
                return by_key
            return {key: value if value is None else items(value) for key, value in by_key.items()}

        return of_map
    if pa.types.is_struct(kind):
        fields = {field.name: make for field in kind if (make := _dicts_for(field.type)) is not None}
        if not fields:
            return None
        return lambda value: (
            value | {name: make(value[name]) for name, make in fields.items() if value[name] is not None}
        )
    inner = _dicts_for(kind.value_type) if hasattr(kind, "value_type") else None
    return inner and (lambda values: [value if value is None else inner(value) for value in values])


def is_array_like(kind: pa.DataType) -> bool:
    """Return whether values of this type become one array with a row for each value."""
    if is_list(kind):
        return _is_number(_leaf_of(kind))
    if pa.types.is_struct(kind):
        return {field.name for field in kind} == _VECTOR
    return _is_number(kind) or pa.types.is_date(kind) or bool(pa.types.is_timestamp(kind))


ONE_LENGTH = (
    "expected one. Next: pass torch_batches a collate_fn, spark_hvd.data.padded() or spark_hvd.data.ragged(), or make "
    "them equally long in the DataFrame"
)
"""The end of the error for arrays of different lengths."""

_ONE_SHAPE = (
    "expected one for the arrays inside a row's array; only their number may differ. Next: pad them to one length in "
    "the DataFrame, or convert the batch in your own collate_fn"
)


def _arrays(array: pa.Array, name: str, expected: str = ONE_LENGTH) -> Values:
    """Return arrays of numbers, also nested, as one array. If lengths differ, the error ends with ``expected``."""
    if not _is_number(_leaf_of(array.type)):
        return _listed(array, name)
    shape = [len(array)]
    while is_list(array.type):
        _check_nulls(array, name)
        least, most = least_and_most(array)
        if least != most:
            lengths = len(pc.list_value_length(array).unique())
            raise DataError(
                f"column {name!r} has arrays of {lengths} different lengths, from {least} to {most}: {expected}"
            )
        shape.append(least)
        array = array.flatten()
    return values_of(array, name).reshape(shape)


def _leaf_of(kind: pa.DataType) -> pa.DataType:
    while is_list(kind):
        kind = kind.value_type
    return kind


def _is_number(kind: pa.DataType) -> bool:
    tests = pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal
    return any(test(kind) for test in tests)


def _check_nulls(array: pa.Array, name: str) -> None:
    if array.null_count:
        among = f"{len(array)} values of type {array.type}, which has no value for it"
        refuse_unfit_nulls(name, array.null_count, among)


def _flat(array: pa.Array, name: str, shapes: dict[str, tuple[int, ...]]) -> tuple[Values, Offsets]:
    """Return the values of all arrays, with the offset of each array and the end of the last.

    For nested arrays, ``shapes`` keeps the shape of a value for later batches in which all arrays are empty.
    """
    _check_nulls(array, name)
    lengths = pc.list_value_length(array).to_numpy().astype(np.int64)
    inner = array.flatten()
    values = _arrays(inner, name, _ONE_SHAPE) if is_list(inner.type) else values_of(inner, name)
    if len(values):
        shapes[name] = values.shape[1:]
    else:
        values = values.reshape(0, *shapes.get(name, values.shape[1:]))
    return values, np.concatenate([[0], np.cumsum(lengths)])


def stacks_of(batch: pa.RecordBatch | PackedRows, features: Features | None) -> Mapping[str, Sequence[str]]:
    """Return the columns that make up each stack, by its name.

    Raises:
        DataError: A column is not in the batch.
    """
    if features is None:
        return {}
    if isinstance(features, str):
        raise DataError(f"features={features!r}: expected a list of names of columns, or a dict of such lists")
    stacks = features if isinstance(features, Mapping) else {"features": features}
    present = set(batch.schema.names)
    stacked = {column for columns in stacks.values() for column in columns}
    if same := [name for name in stacks if name in present - stacked]:
        raise DataError(
            f"features: {same[0]!r} is the name of a stack and of another column. Next: give the stack another "
            f"name, features={{'stack': [...]}}, or omit the column with columns="
        )
    for name, columns in stacks.items():
        missing = [column for column in columns if column not in present]
        if missing or not columns:
            raise DataError(
                f"features: {name!r} is stacked from {listed(columns)}; expected some of {listed(batch.schema.names)}"
            )
    return stacks


def _stacked(batch: pa.RecordBatch | PackedRows, name: str, columns: Sequence[str]) -> Values:
    """Return columns side by side, (rows, numbers)."""
    if isinstance(batch, PackedRows) and (numbers := batch.numbers(columns)) is not None:
        return numbers
    chosen = batch.select(list(columns))
    if not isinstance(chosen, PackedRows) and (numbers := matrix_of(chosen)) is not None:
        return numbers
    parts = []
    for column in columns:
        values = _values(chosen, column)
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
            raise DataError(
                f"features: column {column!r} of {name!r} holds {chosen.schema.field(column).type}: expected numbers"
            )
        parts.append(values.reshape(len(values), -1))
    stack = np.concatenate(parts, axis=1)
    for column, part in zip(columns, parts, strict=True):
        if stack.dtype.kind == "f" and part.dtype in (np.int64, np.uint64):
            check_stack(torch.from_numpy(part.copy()), getattr(torch, stack.dtype.name), column)
    return stack


def _to_torch(values: Values, name: str) -> Any:
    if isinstance(values, dict):
        return {field: _to_torch(inner, f"{name}.{field}") for field, inner in values.items()}
    if isinstance(values, list) or values.dtype == object:
        return values if isinstance(values, list) else values.tolist()
    if values.dtype.kind == "M":
        refuse_unfit_nulls(name, int(np.isnat(values).sum()), "its dates, which no tensor can hold")
        values = values.view(np.int64)
    return torch.from_numpy(values if values.flags.writeable else values.copy())  # Arrow's memory is read-only
