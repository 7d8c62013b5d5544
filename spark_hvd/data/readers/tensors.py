"""Arrow columns become torch tensors: numbers without a copy, lists with their shape, sparse vectors dense."""

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
    """Return the values of ``array`` as a tensor of shape (rows, then ``column.shape``) and dtype ``column.dtype``.

    Shares memory with ``array`` where the type is the same and a single chunk holds it. Integers that do not fit
    ``column.dtype`` are an error; floating point values are rounded to it.

    Args:
        array: Numbers, booleans, decimals; lists (also large, fixed size and nested) of such; or, where
            ``column.encoding`` is "sparse", structs of size, indices and values. A null in the indices of a struct
            says that its vector is dense, as Spark lays such vectors out.
        column: What a row shall become. A list of all the numbers of a row in C order will do for any shape. Where
            the shape is None the first value decides.
        where: File and row group, for messages.

    Raises:
        DataError: nulls, lists of different lengths, another shape than the column's, or a type without a tensor.
    """
    dtype = getattr(torch, column.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise DataError(
            f"{_at(column, where)} holds {array.type}, which has no tensor: give it a decoder (decoders={{"
            f"{column.name!r}: function}}), convert it in transformation_fn, or leave it out"
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
    """Return a column's values in another dtype: integers and booleans exact, floating-point numbers rounded.

    The tensor is on the CPU.

    Raises:
        DataError: An integer or boolean dtype does not have a value (2.5, NaN, 300 in uint8).
    """
    kind = getattr(torch, dtype)
    if tensor.dtype == kind or kind.is_floating_point or kind.is_complex:
        return tensor.to(kind)
    found = tensor.to(kind)
    if tensor.dtype == torch.bool:
        return found
    limits = torch.iinfo(kind) if kind != torch.bool else None
    low, high = (limits.min, limits.max) if limits else (0, 1)
    if not tensor.is_floating_point():  # a bound that its dtype does not have would be wrapped
        low, high = max(low, torch.iinfo(tensor.dtype).min), min(high, torch.iinfo(tensor.dtype).max)
    if tensor.is_floating_point():
        # 2.0**63 and 2.0**64, to which the largest integers are rounded, are outside; NaN is nowhere.
        inside = (tensor >= low) & (tensor < float(high) + 1) & (tensor == tensor.floor())
    else:
        whole = _signed(tensor)
        inside = (whole >= low) & (whole <= min(high, torch.iinfo(torch.int64).max))
    if not inside.all():
        odd = tensor[~inside]
        was = str(tensor.dtype).removeprefix("torch.")
        raise DataError(
            f"column {name!r} has {len(odd)} of {tensor.numel()} values that {dtype} cannot hold, first the {was} "
            f"{odd[0].item()}: expected whole numbers from {low} to {high}. Round, fill or drop them first, or ask for "
            "another dtype (input_dtypes, label_dtypes)"
        )
    return found


def to_doubles(array: pa.Array, name: str) -> pa.Array:
    """Decimals as the nearest numbers in float64, from which the same decimals come back.

    Raises:
        DataError: float64 has not enough digits for one.
    """
    kind = array.type
    if pa.types.is_decimal128(kind) and 0 <= kind.scale <= 22 and len(array):
        # Whole numbers up to 2**53 and powers of ten up to 10**22 are exact, so that a division rounds once. Arrow's
        # own cast is off in the last bit of every seventh number.
        words = np.frombuffer(array.buffers()[1], np.int64)[2 * array.offset :][: 2 * len(array)]
        low, high = words[::2], words[1::2]
        missing = array.is_null().to_numpy(zero_copy_only=False)
        if (((high == low >> 63) & (low <= 2**53) & (low >= -(2**53))) | missing).all():
            return pa.array(low / 10.0**kind.scale, mask=missing)
    doubles = pc.cast(pc.cast(array, pa.string()), pa.float64())
    try:
        same = pc.all(pc.equal(pc.cast(pc.cast(doubles, pa.string()), kind), array)).as_py() is not False
    except pa.ArrowInvalid:  # one has other digits than the type
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
    """Make sure that a column's integers are the same in the floating point dtype of what they are stacked into.

    Raises:
        DataError: One is not.
    """
    if not dtype.is_floating_point or tensor.is_floating_point() or not tensor.numel():
        return
    exact = int(2 / torch.finfo(dtype).eps)  # beside integers, torch takes a float for a float32
    whole = _signed(tensor)
    large = tensor[(whole > exact) | (whole < (0 if tensor.dtype == torch.uint64 else -exact))]
    odd = [number for number in large.tolist() if int(torch.tensor(number, dtype=dtype, device="cpu").item()) != number]
    if odd:
        was, into = (str(each).removeprefix("torch.") for each in (tensor.dtype, dtype))
        raise DataError(
            f"column {name!r} has the {was} {odd[0]}, which {into}, the dtype of the stacked features, cannot hold. "
            "Next: leave it out of the stack, or ask for float64 (input_dtypes), which holds whole numbers to 2**53"
        )


def _signed(tensor: torch.Tensor) -> torch.Tensor:
    """Integers as int64, because torch compares no unsigned type but uint8; uint64 from 2**63 on becomes negative."""
    return tensor.view(torch.int64) if tensor.dtype == torch.uint64 else tensor.to(torch.int64)


def _at(column: Column, where: str) -> str:
    return f"column {column.name!r}" + (f" in {where}" if where else "")


def _flatten(array: pa.Array, at: _Where) -> tuple[pa.Array, tuple[int, ...]]:
    """Return the numbers of all rows, concatenated, and the shape of each row."""
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
    """Return the length that all lists of ``array`` share."""
    least, most = least_and_most(array)
    if least == most:
        return least
    lengths = pc.list_value_length(array).to_numpy()
    wrong = np.flatnonzero(lengths != lengths[0])
    row = int(wrong[0]) * rows // len(lengths)
    level = f" at depth {depth + 1}" if depth else ""
    raise DataError(
        f"{_at(*at)} has lists of different lengths{level}: row {row} has one of {lengths[wrong[0]]}, where the "
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
    """Structs of size, indices and values as a tensor (rows, size)."""
    at = (column, where)
    _check_nulls(array, len(array), at)
    sizes, indices, values = (array.field(name) for name in ("size", "indices", "values"))
    _check_nulls(values, len(array), at)
    counts = pc.list_value_length(values).to_numpy()
    full = indices.is_null().to_numpy(zero_copy_only=False)
    each_size = np.where(full, counts, sizes.fill_null(0).to_numpy())
    given = pc.list_value_length(indices).fill_null(0).to_numpy()
    size = _size(each_size, column, where)
    where_to = np.empty(int(counts.sum()), np.int64)
    from_full = np.repeat(full, counts)
    if not np.array_equal(np.where(full, 0, counts), given):
        raise DataError(f"{_at(*at)} has sparse vectors with another number of indices than of values")
    where_to[~from_full] = indices.flatten().to_numpy()
    where_to[from_full] = np.tile(np.arange(size), int(full.sum()))
    if len(where_to) and (where_to.min() < 0 or where_to.max() >= size):
        raise DataError(f"{_at(*at)} has a sparse vector with an index outside 0 to {size - 1}")
    where_to += np.repeat(np.arange(len(array)) * size, counts)
    numbers = values.flatten()
    _check_nulls(numbers, len(array), at)
    dense = torch.zeros(len(array) * size, dtype=dtype, device="cpu")
    dense[torch.from_numpy(where_to)] = _numbers(numbers, dtype, at)
    return dense.view(len(array), *(column.shape if column.shape is not None else (size,)))


def _size(sizes: np.ndarray[Any, Any], column: Column, where: str) -> int:
    """Return the size that all sparse vectors share."""
    first = int(sizes[0]) if len(sizes) else 0
    expected = first if column.shape is None else math.prod(column.shape)
    wrong = np.flatnonzero(sizes != expected)
    if len(wrong):
        raise DataError(
            f"{_at(column, where)} has {len(wrong)} of {len(sizes)} vectors of another size than {expected}: row "
            f"{wrong[0]} has {sizes[wrong[0]]}"
        )
    return expected
