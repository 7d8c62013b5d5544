"""Tensors as MPI sees them (address, count, datatype), and which of them it reduces in a wider type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.transport.dtypes import Restore, to_wire
from spark_hvd.transport.mpi.library import MPI

Buffer = list[Any]
"""Memory, a count or counts with displacements, and a datatype, as mpi4py's methods take them."""

_DATATYPES: dict[torch.dtype, MPI.Datatype] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}

# MPI has no standard names for these. Summing in the wider type is also more accurate.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}

OPS: dict[ReduceOp, MPI.Op] = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PRODUCT: MPI.PROD,
}

# Dtypes that to_mpi leaves unchanged.
_SUMMED = {dtype: _DATATYPES[dtype] for dtype in (torch.float32, torch.float64, torch.int32, torch.int64)}
_ORDINARY = {torch.Tensor, torch.nn.Parameter}

_address = MPI.buffer.fromaddress


def to_mpi(tensor: torch.Tensor, op: ReduceOp) -> tuple[torch.Tensor, MPI.Op, Restore]:
    """Convert a contiguous tensor to a form that MPI can reduce; see :func:`spark_hvd.transport.dtypes.to_wire`."""
    dtype = tensor.dtype
    wider = _WIDER.get(dtype)
    if wider is not None and op not in (ReduceOp.MIN, ReduceOp.MAX):
        return tensor.to(wider), OPS[ReduceOp.SUM if op is ReduceOp.AVERAGE else op], lambda t: t.to(dtype)
    wire, wire_op, restore = to_wire(tensor, op)
    return wire, OPS[wire_op], restore


def elements(tensor: torch.Tensor) -> Buffer:
    """Describe the memory of a contiguous tensor that is to be reduced."""
    count = tensor.numel()
    return [_address(tensor.data_ptr(), count * tensor.itemsize), count, _DATATYPES[tensor.dtype]]


def ready(tensor: torch.Tensor) -> Buffer | None:
    """Do :func:`elements` if the tensor is an ordinary one that MPI can sum in place; else return None.

    Most gradients take this path. Its checks take a microsecond in total, because a small all-reduce takes only a few.
    """
    datatype = _SUMMED.get(tensor.dtype)
    if (
        datatype is None
        or type(tensor) not in _ORDINARY
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or not tensor.is_contiguous()
        or tensor.is_neg()
    ):
        return None
    count = tensor.numel()
    return [_address(tensor.data_ptr(), count * tensor.itemsize), count, datatype]


def in_bytes(tensor: torch.Tensor) -> Buffer:
    """Describe the memory of a contiguous tensor that is to be moved."""
    nbytes = tensor.numel() * tensor.itemsize
    return [_address(tensor.data_ptr(), nbytes), nbytes, MPI.BYTE]


def in_blocks(tensor: torch.Tensor, size: int) -> Buffer:
    """Describe a contiguous tensor that `size` ranks fill in equal parts; MPI counts one part."""
    nbytes = tensor.numel() * tensor.itemsize
    return [_address(tensor.data_ptr(), nbytes), nbytes // size, MPI.BYTE]


def in_parts(tensor: torch.Tensor, rows: Sequence[int]) -> Buffer:
    """Describe a contiguous tensor whose rows go to several ranks or come from them, in rank order.

    ``rows`` has the number of rows of each rank.
    """
    total = sum(rows)
    nbytes = tensor.numel() * tensor.itemsize
    row_bytes = nbytes // total if total else 0
    counts, starts, start = [], [], 0
    for count in rows:
        counts.append(count * row_bytes)
        starts.append(start)
        start += count * row_bytes
    return [_address(tensor.data_ptr(), nbytes), (counts, starts), MPI.BYTE]
