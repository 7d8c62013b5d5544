"""What ranks tell each other about a tensor before rows of different counts travel, and how the facts are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from spark_hvd.transport.dtypes import dtype_code, dtype_name
from spark_hvd.world.errors import MismatchError

_DIMS = 7
HEADER = _DIMS + 4
"""Numbers in a header: fault, dtype, number of dimensions, the first dimensions, the product of the others."""

_FAULTS = {
    1: "its splits are not one number for each rank",
    2: "its splits contain a negative number",
    3: "its splits do not add up to the tensor's first dimension",
    4: "its first dimension cannot be divided by the number of ranks; pass splits",
    5: "its tensor is 0-dim and has no rows to split",
}


def describe(tensor: torch.Tensor, fault: int = 0) -> list[int]:
    """A tensor's header: numbers that fit into one small exchange. A 0-dim tensor counts as one row."""
    shape = list(tensor.shape) or [1]
    shown = shape[:_DIMS] + [0] * (_DIMS - len(shape))
    return [fault, dtype_code(tensor.dtype), len(shape), *shown, math.prod(shape[_DIMS:])]


def rows_of(header: Sequence[int]) -> int:
    """The first dimension in a header."""
    return header[3]


def split_fault(tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> int:
    """What is wrong with a call of alltoall, as a number that travels in the header; 0: nothing."""
    if tensor.dim() == 0:
        return 5
    if splits is None:
        return 4 if tensor.shape[0] % size else 0
    if len(splits) != size:
        return 1
    if min(splits) < 0:
        return 2
    return 3 if sum(splits) != tensor.shape[0] else 0


def exchange_splits(
    tensor: torch.Tensor,
    splits: Sequence[int] | None,
    received: Sequence[int] | None,
    rank: int,
    size: int,
    gather: Callable[[list[int]], list[list[int]]],
) -> tuple[list[int], list[int]]:
    """How many rows each rank gets from this one in an alltoall, and how many it sends.

    Args:
        tensor: Whose rows are sent.
        splits: The rows for each rank; None: equal shares.
        received: The rows from each rank, where everything is known to fit; else all ranks exchange headers and splits.
        rank: This rank.
        size: Number of ranks.
        gather: Gives every rank the numbers of all ranks.

    Raises:
        MismatchError: See :meth:`spark_hvd.transport.communicator.Communicator.alltoall`.
    """
    if received is not None:
        assert splits is not None
        return list(splits), list(received)
    fault = split_fault(tensor, splits, size)
    if fault:
        sent = [0] * size
    elif splits is None:
        sent = even_rows(tensor.shape[0], size)
    else:
        sent = list(splits)
    facts = gather(describe(tensor, fault) + sent)
    require_same("alltoall", [fact[:HEADER] for fact in facts])
    return sent, [fact[HEADER + rank] for fact in facts]


def split_fault_text(tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> str | None:
    """What is wrong with a call of alltoall, in words; None: nothing."""
    return _FAULTS.get(split_fault(tensor, splits, size))


def require_same(operation: str, headers: Sequence[Sequence[int]]) -> None:
    """Compare the headers of all ranks.

    Raises:
        MismatchError: With the same message on every rank, because every rank has the same headers.
    """
    faults = [f"on rank {rank} {_FAULTS[header[0]]}" for rank, header in enumerate(headers) if header[0]]
    if faults:
        raise MismatchError(f"{operation} cannot run: {'; '.join(faults)}.")
    # All but the rows must agree.
    kinds = [(header[1], header[2], *header[4:]) for header in headers]
    if len(set(kinds)) == 1:
        return
    first = headers[0]
    other = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
    raise MismatchError(
        f"{operation} needs the same dtype and the same dimensions after the first on every rank, but rank 0 has "
        f"{_text(first)} and rank {other} has {_text(headers[other])}."
    )


def _text(header: Sequence[int]) -> str:
    dims = [str(dim) for dim in header[3 : 3 + min(header[2], _DIMS)]]
    if header[2] > _DIMS:
        dims.append(f"... {header[2] - _DIMS} more with {header[-1]} elements")
    return f"{dtype_name(header[1])} of shape ({', '.join(dims)})"


def even_rows(rows: int, size: int) -> list[int]:
    """Share rows among ranks; the first ``rows % size`` ranks get one more."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def require_root(root_rank: int, size: int) -> None:
    """Raise a ValueError unless `root_rank` is a rank."""
    if not 0 <= root_rank < size:
        raise ValueError(f"root_rank={root_rank} is no rank of this world; expected 0 to {size - 1}.")


def require_rows(tensor: torch.Tensor, operation: str) -> None:
    """Raise a ValueError for a 0-dim tensor."""
    if tensor.dim() == 0:
        raise ValueError(f"{operation} shares out rows, and a 0-dim tensor has none; pass tensor.reshape(1).")


def require_dense(tensor: torch.Tensor) -> None:
    """Raise a TypeError for what has no memory to send: sparse tensors, and those on neither a CPU nor a GPU."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {tensor.layout} cannot be sent; pass tensor.to_dense().")
    if type(tensor) is not torch.Tensor and hasattr(tensor, "placements"):
        raise TypeError("a DTensor holds another part on every rank; pass its to_local() or full_tensor().")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"a tensor on device {tensor.device} cannot be sent; move it to the CPU or a CUDA device.")
