"""The form in which elements are sent: what Gloo and NCCL cannot carry or reduce is viewed or widened."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.world.errors import UnsupportedDtypeError

_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
# A sum of small integers can leave their range, though the average never does.
_WIDER_FOR_AVERAGE = {torch.int8: torch.int32, torch.uint8: torch.int32, torch.int32: torch.int64}

_UNCHANGED = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.uint64,
    torch.bool,
}

_WITH_INFINITY = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2}

_INTEGER_OF = {torch.float32: torch.int32, torch.float64: torch.int64}
_SIGN_BIT = torch.iinfo(torch.int64).min

Restore = Callable[[torch.Tensor], torch.Tensor]


def is_integer(dtype: torch.dtype) -> bool:
    """Return whether the elements are whole numbers; bool does not count."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


@functools.cache
def check_op(dtype: torch.dtype, op: ReduceOp) -> None:
    """Raise an UnsupportedDtypeError if this reduction does not support this dtype."""
    if dtype not in _UNCHANGED and dtype not in _WIDER:
        raise UnsupportedDtypeError(f"tensors of {dtype} cannot be reduced; convert to another dtype first.")
    if op is ReduceOp.AVERAGE and dtype == torch.bool:
        raise UnsupportedDtypeError(
            "op=Average does not support torch.bool; use Max (any), Min (all), or convert the tensor."
        )
    if op is ReduceOp.ADASUM and not dtype.is_floating_point:
        raise UnsupportedDtypeError(f"op=Adasum does not support {dtype}: it needs floating-point gradients.")
    if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise UnsupportedDtypeError(f"op={op.name.title()} does not support {dtype}: complex numbers have no order.")


def to_wire(tensor: torch.Tensor, op: ReduceOp) -> tuple[torch.Tensor, ReduceOp, Restore]:
    """Convert a contiguous tensor to a form that a backend can reduce.

    Returns:
        The tensor to reduce, which shares memory with the argument if possible; the reduction to run on it, which is
        SUM for AVERAGE (see :func:`divide`); and a function that restores the original dtype.
    """
    dtype = tensor.dtype
    wire_op = ReduceOp.SUM if op is ReduceOp.AVERAGE else op
    if dtype == torch.bool:
        anyone = op in (ReduceOp.SUM, ReduceOp.MAX)
        return tensor.view(torch.uint8), ReduceOp.MAX if anyone else ReduceOp.MIN, lambda t: t.view(torch.bool)
    if dtype == torch.uint64:
        # Two's complement: sums and products have the same bits; to keep the order, the sign bit is flipped.
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            flipped = tensor.view(torch.int64) ^ _SIGN_BIT
            return flipped, wire_op, lambda t: (t ^ _SIGN_BIT).view(torch.uint64)
        return tensor.view(torch.int64), wire_op, lambda t: t.view(torch.uint64)
    if dtype.is_floating_point and op in (ReduceOp.MIN, ReduceOp.MAX):
        return _ordered(tensor, op), wire_op, lambda t: _unordered(t).to(dtype)
    wider = _WIDER.get(dtype) or (_WIDER_FOR_AVERAGE.get(dtype) if op is ReduceOp.AVERAGE else None)
    if wider is not None:
        return tensor.to(wider), wire_op, lambda t: t.to(dtype)
    return tensor, wire_op, lambda t: t


def _ordered(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Map floats to integers in the same order, with NaN as the extreme: no backend's own comparison keeps NaN."""
    wide = tensor if tensor.itemsize >= 4 else tensor.float()
    numbers = _mirrored(wide.view(_INTEGER_OF[wide.dtype]))
    limits = torch.iinfo(numbers.dtype)  # both limits are integers of a NaN
    return numbers.masked_fill_(wide.isnan(), limits.max if op is ReduceOp.MAX else limits.min)


def _unordered(numbers: torch.Tensor) -> torch.Tensor:
    return _mirrored(numbers).view(torch.float32 if numbers.itemsize == 4 else torch.float64)


def _mirrored(numbers: torch.Tensor) -> torch.Tensor:
    """Reverse the order of negative numbers, because floats descend where integers ascend. It is its own inverse."""
    limits = torch.iinfo(numbers.dtype)
    return numbers ^ ((numbers >> limits.bits - 1) & limits.max)


def identity_element(dtype: torch.dtype, op: ReduceOp) -> float | int | bool:
    """Return the neutral element of a reduction."""
    if op is ReduceOp.PRODUCT:
        return 1
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return 0
    if dtype == torch.bool:
        return op is ReduceOp.MIN
    if is_integer(dtype):
        limits = torch.iinfo(dtype)
        return limits.max if op is ReduceOp.MIN else limits.min
    infinity = float("inf") if dtype in _WITH_INFINITY else torch.finfo(dtype).max
    return infinity if op is ReduceOp.MIN else -infinity


def divide(tensor: torch.Tensor, size: int, dtype: torch.dtype | None = None) -> None:
    """Turn a sum into an average, in place; integers are truncated toward zero, as in Horovod.

    ``dtype`` is the dtype of the summands, if the sum has another one, as from :func:`to_wire`.
    """
    if dtype == torch.uint64:  # int64 has the same bits; half of it is not negative
        half = ((tensor >> 1) & torch.iinfo(torch.int64).max).div_(size, rounding_mode="trunc").mul_(2)
        tensor.sub_(half * size).div_(size, rounding_mode="trunc").add_(half)
    elif is_integer(tensor.dtype):
        tensor.div_(size, rounding_mode="trunc")
    else:
        tensor.div_(size)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a contiguous tensor as a flat uint8 tensor: every backend can move bytes."""
    # view(uint8) refuses 0-dim tensors, and strides other than 1 even where there are fewer than two elements.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def to_dense(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor without its gradient, and the same or a copy in plain contiguous memory."""
    mine = tensor.detach()
    dense = mine.resolve_conj().resolve_neg() if mine.is_complex() or mine.is_neg() else mine
    return mine, dense.contiguous()


def copy_unless_shared(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into another, unless they share memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
