"""How tensors look to MPI: an address, a count and a datatype; and which of them MPI reduces in a wider type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.transport.dtypes import Restore, to_wire
from spark_hvd.transport.mpi.library import MPI

Buffer = list[Any]
"""Memory, a count or counts with displacements, and a datatype: what mpi4py's methods take."""

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

# MPI has no standard names for them. A sum in the wider type is also the better one.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}

OPS: dict[ReduceOp, MPI.Op] = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PRODUCT: MPI.PROD,
}

# Those that to_mpi leaves as they are.
_SUMMED = {dtype: _DATATYPES[dtype] for dtype in (torch.float32, torch.float64, torch.int32, torch.int64)}
_ORDINARY = {torch.Tensor, torch.nn.Parameter}

_address = MPI.buffer.fromaddress


def to_mpi(tensor: torch.Tensor, op: ReduceOp) -> tuple[torch.Tensor, MPI.Op, Restore]:
    """Give a contiguous tensor the form in which MPI can reduce it; as :func:`spark_hvd.transport.dtypes.to_wire`."""
    dtype = tensor.dtype
    wider = _WIDER.get(dtype)
    if wider is not None and op not in (ReduceOp.MIN, ReduceOp.MAX):
        return tensor.to(wider), OPS[ReduceOp.SUM if op is ReduceOp.AVERAGE else op], lambda t: t.to(dtype)
    wire, wire_op, restore = to_wire(tensor, op)
    return wire, OPS[wire_op], restore


def elements(tensor: torch.Tensor) -> Buffer:
    """The memory of a contiguous tensor, to be reduced."""
    count = tensor.numel()
    return [_address(tensor.data_ptr(), count * tensor.itemsize), count, _DATATYPES[tensor.dtype]]


def ready(tensor: torch.Tensor) -> Buffer | None:
    """As :func:`elements`, if the tensor is an ordinary one that MPI can sum where it is; else None.

    This is the way of most gradients. All that it asks takes a microsecond together, as a small all-reduce takes few.
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
    """The memory of a contiguous tensor, to be moved."""
    nbytes = tensor.numel() * tensor.itemsize
    return [_address(tensor.data_ptr(), nbytes), nbytes, MPI.BYTE]


def in_blocks(tensor: torch.Tensor, size: int) -> Buffer:
    """The memory of a contiguous tensor that is filled by `size` ranks in equal parts; MPI counts one part."""
    nbytes = tensor.numel() * tensor.itemsize
    return [_address(tensor.data_ptr(), nbytes), nbytes // size, MPI.BYTE]


def in_parts(tensor: torch.Tensor, rows: Sequence[int]) -> Buffer:
    """The memory of a contiguous tensor whose rows, in rank order, go to several ranks or come from them.

    ``rows`` has how many are each rank's.
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
