"""Converts Arrow columns to torch tensors: numbers without a copy, lists with their shape, sparse vectors as dense."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.utils.dlpack

from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError, refuse_nulls
from spark_hvd.data.readers.measure import is_list, least_and_most

_Where = tuple[Column, str]


def to_tensor(array: pa.Array | pa.ChunkedArray, column: Column, where: str = "") -> torch.Tensor:
    """Return the values of ``array`` as a tensor of shape (rows, *column.shape) and dtype ``column.dtype``.

    The tensor shares memory with ``array`` if the type is the same and there is a single chunk. Integers that do not
    fit ``column.dtype`` raise an error; floating-point values are rounded.

    Args:
        array: Numbers, booleans or decimals; or lists of them (also large, fixed-size and nested); or, if
            ``column.encoding`` is "sparse", structs of size, indices and values. As in Spark, null indices mean that
            the vector is dense.
        column: The column. For any shape, a row may be a flat list of its numbers in C order. If the shape is None, the
            first value determines it.
        where: File and row group, for messages.

    Raises:
        DataError: There are nulls, lists of different lengths or another shape than the column's, or the type cannot
            become a tensor.
    """
    dtype = getattr(torch, column.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise DataError(
            f"{_at(column, where)} holds {array.type}, which cannot become a tensor: pass a decoder (decoders={{"
            f"{column.name!r}: function}}), convert it in transformation_fn, or omit it"
        )
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if column.encoding == "sparse":
        return _dense(array, column, dtype, where)
    rows = len(array)
    values, shape = _flatten(array, (column, where))
    tensor = _numbers(values, dtype, (column, where))
    if column.shape is not None and shape != column.shape:
        fits = len(shape) <= 1 and math.prod(shape) == math.prod(column.shape)
        if rows and not fits:
            raise DataError(f"{_at(column, where)} has rows of shape {shape}, expected {column.shape}")
        shape = column.shape
    return tensor.view(rows, *shape)


def converted(tensor: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    """Convert a column's values to another dtype, exactly for integers and booleans, rounded for floating point.

    ``tensor`` must be on the CPU. ``name`` is the column's, for messages.

    Raises:
        DataError: An integer or boolean dtype cannot hold a value (2.5, NaN, or 300 in uint8).
    """
    kind = getattr(torch, dtype)
    if tensor.dtype == kind or kind.is_floating_point or kind.is_complex:
        return tensor.to(kind)
    result = tensor.to(kind)
    if tensor.dtype == torch.bool:
        return result
    limits = torch.iinfo(kind) if kind != torch.bool else None
    low, high = (limits.min, limits.max) if limits else (0, 1)
    if not tensor.is_floating_point():  # torch would wrap a bound that the dtype of the tensor cannot hold
        low, high = max(low, torch.iinfo(tensor.dtype).min), min(high, torch.iinfo(tensor.dtype).max)
    if tensor.is_floating_point():
        # The largest integers round to 2.0**63 and 2.0**64, which are outside. NaN fails every comparison.
        inside = (tensor >= low) & (tensor < float(high) + 1) & (tensor == tensor.floor())
    else:
        whole = _signed(tensor)
        inside = (whole >= low) & (whole <= min(high, torch.iinfo(torch.int64).max))
    if not inside.all():
        odd = tensor[~inside]
        was = str(tensor.dtype).removeprefix("torch.")
        raise DataError(
            f"column {name!r} has {len(odd)} of {tensor.numel()} values that {dtype} cannot hold, first the {was} "
            f"{odd[0].item()}: expected whole numbers from {low} to {high}. Round, fill or drop them first, or request "
            "another dtype (input_dtypes, label_dtypes)"
        )
    return result


def to_doubles(array: pa.Array, name: str) -> pa.Array:
    """Convert decimals to the nearest float64, from which the same decimals can be recovered.

    Raises:
        DataError: A decimal has more digits than float64 can hold.
    """
    kind = array.type
    if pa.types.is_decimal128(kind) and 0 <= kind.scale <= 22 and len(array):
        # Whole numbers up to 2**53 and powers of ten up to 10**22 are exact in float64, so a division rounds only once.
        # Arrow's own cast has a wrong last bit in every seventh number.
        words = np.frombuffer(array.buffers()[1], np.int64)[2 * array.offset :][: 2 * len(array)]
        low, high = words[::2], words[1::2]
        missing = array.is_null().to_numpy(zero_copy_only=False)
        if (((high == low >> 63) & (low <= 2**53) & (low >= -(2**53))) | missing).all():
            return pa.array(low / 10.0**kind.scale, mask=missing)
    doubles = pc.cast(pc.cast(array, pa.string()), pa.float64())
    try:
        same = pc.all(pc.equal(pc.cast(pc.cast(doubles, pa.string()), kind), array)).as_py() is not False
    except pa.ArrowInvalid:  # a double has more digits than the decimal type
        same = False
    if not same:
        pairs = zip(array.to_pylist(), doubles.to_pylist(), strict=True)
        odd = next(one for one, double in pairs if one is not None and Decimal(repr(double)) != one)
        raise DataError(
            f"column {name!r} of {kind} has {odd}, which float64 cannot hold: cast it to a type that fits its values, "
            "such as bigint, or to double to have it rounded"
        )
    return doubles


def check_stack(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    """Check that a column's integers do not change in a stack of features with the floating-point ``dtype``.

    Raises:
        DataError: An integer would change.
    """
    if not dtype.is_floating_point or tensor.is_floating_point() or not tensor.numel():
        return
    exact = int(2 / torch.finfo(dtype).eps)  # comparing with a float would convert integers to float32
    whole = _signed(tensor)
    large = tensor[(whole > exact) | (whole < (0 if tensor.dtype == torch.uint64 else -exact))]
    odd = [number for number in large.tolist() if int(torch.tensor(number, dtype=dtype, device="cpu").item()) != number]
    if odd:
        was, into = (str(each).removeprefix("torch.") for each in (tensor.dtype, dtype))
        raise DataError(
            f"column {name!r} has the {was} {odd[0]}, which {into}, the dtype of the stacked features, cannot hold. "
            "Next: omit it from the stack, or request float64 (input_dtypes), which holds whole numbers to 2**53"
        )


def _signed(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers as int64, because torch can only compare uint8 of the unsigned types. 2**63 becomes negative."""
    return tensor.view(torch.int64) if tensor.dtype == torch.uint64 else tensor.to(torch.int64)


def _at(column: Column, where: str) -> str:
    return f"column {column.name!r}" + (f" in {where}" if where else "")


def _flatten(array: pa.Array, at: _Where) -> tuple[pa.Array, tuple[int, ...]]:
    """Return the concatenated numbers of all rows, and the shape of a row."""
    rows, shape = len(array), list[int]()
    _check_nulls(array, rows, at)
    while is_list(array.type):
        shape.append(_one_length(array, rows, len(shape), at))
        array = array.flatten()
        _check_nulls(array, rows, at)
    return array, tuple(shape)


def _check_nulls(array: pa.Array, rows: int, at: _Where) -> None:
    if array.null_count:
        inside = len(array) != rows
        of = f"{len(array)} {'values' if inside else 'rows'}"
        first = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False))) * rows // len(array)
        refuse_nulls(at[0].name, array.null_count, of, at[1], first=first, inside=inside)


def _one_length(array: pa.Array, rows: int, depth: int, at: _Where) -> int:
    """Return the common length of the lists in ``array``."""
    least, most = least_and_most(array)
    if least == most:
        return least
    lengths = pc.list_value_length(array).to_numpy()
    wrong = np.flatnonzero(lengths != lengths[0])
    row = int(wrong[0]) * rows // len(lengths)
    level = f" at depth {depth + 1}" if depth else ""
    raise DataError(
        f"{_at(*at)} has lists of different lengths{level}: row {row} has one of {lengths[wrong[0]]}, but the "
        f"first has {lengths[0]} ({len(wrong)} of {len(lengths)} differ): pad or cut them to one length"
    )


def _numbers(array: pa.Array, dtype: torch.dtype, at: _Where) -> torch.Tensor:
    """Return a flat array without nulls as a tensor of ``dtype``."""
    kind = array.type
    if pa.types.is_decimal(kind):
        array = pc.cast(array, pa.float64()) if dtype == torch.float32 else to_doubles(array, at[0].name)
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        if not (pa.types.is_null(kind) and not len(array)):
            raise DataError(f"{_at(*at)} holds {kind}: expected numbers, booleans or lists of them")
        array = array.cast(pa.float32())
    if not dtype.is_floating_point and str(array.type) != _arrow_name(dtype):
        try:
            array = pc.cast(array, _arrow_name(dtype))
        except pa.ArrowInvalid as error:
            raise DataError(f"{_at(*at)} does not fit {at[0].dtype}: {error}") from error
    if pa.types.is_boolean(array.type):  # one bit a value in Arrow, one byte in torch
        return torch.from_numpy(array.to_numpy(zero_copy_only=False)).to(dtype)
    return torch.utils.dlpack.from_dlpack(array).to(dtype)


def _arrow_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dense(array: pa.Array, column: Column, dtype: torch.dtype, where: str) -> torch.Tensor:
    """Return structs of size, indices and values as a tensor (rows, size)."""
    at = (column, where)
    _check_nulls(array, len(array), at)
    sizes, indices, values = (array.field(name) for name in ("size", "indices", "values"))
    _check_nulls(values, len(array), at)
    counts = pc.list_value_length(values).to_numpy()
    full = indices.is_null().to_numpy(zero_copy_only=False)
    each_size = np.where(full, counts, sizes.fill_null(0).to_numpy())
    index_counts = pc.list_value_length(indices).fill_null(0).to_numpy()
    size = _size(each_size, column, where)
    targets = np.empty(int(counts.sum()), np.int64)
    from_full = np.repeat(full, counts)
    if not np.array_equal(np.where(full, 0, counts), index_counts):
        raise DataError(f"{_at(*at)} has sparse vectors whose numbers of indices and of values differ")
    targets[~from_full] = indices.flatten().to_numpy()
    targets[from_full] = np.tile(np.arange(size), int(full.sum()))
    if len(targets) and (targets.min() < 0 or targets.max() >= size):
        raise DataError(f"{_at(*at)} has a sparse vector with an index outside 0 to {size - 1}")
    targets += np.repeat(np.arange(len(array)) * size, counts)
    numbers = values.flatten()
    _check_nulls(numbers, len(array), at)
    dense = torch.zeros(len(array) * size, dtype=dtype, device="cpu")
    dense[torch.from_numpy(targets)] = _numbers(numbers, dtype, at)
    return dense.view(len(array), *(column.shape if column.shape is not None else (size,)))


def _size(sizes: np.ndarray[Any, Any], column: Column, where: str) -> int:
    """Return the common size of the sparse vectors."""
    first = int(sizes[0]) if len(sizes) else 0
    expected = first if column.shape is None else math.prod(column.shape)
    wrong = np.flatnonzero(sizes != expected)
    if len(wrong):
        raise DataError(
            f"{_at(column, where)} has {len(wrong)} of {len(sizes)} vectors whose size is not {expected}: row "
            f"{wrong[0]} has {sizes[wrong[0]]}"
        )
    return expected
