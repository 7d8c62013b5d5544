"""The synchronous collectives with Horovod's signatures, on the communicator of the current world."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from spark_hvd.communicator import Communicator, ReduceOp
from spark_hvd.compression import Compression
from spark_hvd.context import current
from spark_hvd.dtypes import check_op, is_integer
from spark_hvd.fusion import batches, flatten, unflatten_into
from spark_hvd.shapes import require_dense, require_rows


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks into a new tensor.

    Args:
        tensor: The same shape and dtype on every rank; any stride. The result carries no gradient.
        average: Deprecated: use `op`.
        name: Accepted for Horovod's sake. Calls are matched by their order, which must be the same on every rank.
        compression: Compression.none, .fp16, .bf16, or anything with their two methods.
        op: Average (default), Sum, Min, Max or Product. An integer Average truncates toward zero. On bool, Sum and Max
            are any, Min and Product are all.
        prescale_factor: Multiplies each rank's tensor before the reduction; integers are truncated toward zero.
        postscale_factor: Multiplies the result.

    Raises:
        NotInitializedError: Before init().
        TypeError: The dtype has no such reduction.
        ValueError: `op` and `average` are both given.
        CollectiveError: A peer or the network failed.
    """
    communicator, op = current().communicator, _chosen(op, average)
    require_tensor(tensor)
    compressed, ctx = compression.compress(tensor.detach())
    reduced = _own(compressed, tensor)
    _reduce(communicator, reduced, op, prescale_factor, postscale_factor)
    result: torch.Tensor = compression.decompress(reduced, ctx)
    return result


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks in place, and return it. See :func:`allreduce`."""
    communicator, op = current().communicator, _chosen(op, average)
    require_tensor(tensor)
    _reduce(communicator, tensor, op, prescale_factor, postscale_factor)
    return tensor


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors, fused by dtype and device, into new ones. See :func:`allreduce`."""
    communicator, op = current().communicator, _chosen(op, average)
    require_tensors(tensors)
    pairs = [compression.compress(tensor.detach()) for tensor in tensors]
    reduced = [_own(compressed, tensor) for (compressed, _), tensor in zip(pairs, tensors, strict=True)]
    _reduce_fused(communicator, reduced, op, prescale_factor, postscale_factor)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors, fused by dtype and device, in place, and return them. See :func:`allreduce`."""
    communicator, op = current().communicator, _chosen(op, average)
    require_tensors(tensors)
    _reduce_fused(communicator, tensors, op, prescale_factor, postscale_factor)
    return list(tensors)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks and return my share of its rows.

    The rows are shared out in rank order; the first ``rows % size`` ranks get one more than the others. The arguments
    and errors are those of :func:`allreduce`; a 0-dim tensor is a ValueError.
    """
    communicator = current().communicator
    op = _chosen(op, None)
    require_tensor(tensor)
    require_rows(tensor, "reducescatter")
    compressed, ctx = compression.compress(tensor.detach())
    op, postscale_factor = _checked(compressed, op, prescale_factor, postscale_factor, communicator.size)
    if prescale_factor != 1.0:
        compressed = _own(compressed, tensor)
        _scale_(compressed, prescale_factor)
    share = communicator.reducescatter(compressed, op).wait()
    _scale_(share, postscale_factor)
    result: torch.Tensor = compression.decompress(share, ctx)
    return result


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Apply :func:`reducescatter` to each of several tensors."""
    require_tensors(tensors)
    return [reducescatter(tensor, name, compression, op, prescale_factor, postscale_factor) for tensor in tensors]


def require_tensor(tensor: object) -> None:
    """Raise a TypeError for anything but a dense tensor on a CPU or a GPU."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(tensor).__name__}; objects go by broadcast_object.")
    require_dense(tensor)


def require_tensors(tensors: object) -> None:
    """Raise a TypeError for anything but a sequence of tensors."""
    if not isinstance(tensors, Sequence):
        raise TypeError(f"expected a list of tensors, got {type(tensors).__name__}.")
    for tensor in tensors:
        require_tensor(tensor)


def _chosen(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    if average is not None:
        if op is not None:
            raise ValueError(f"op={op} and average={average} are both given; pass op alone.")
        warnings.warn("average= is deprecated; pass op=Average or op=Sum.", DeprecationWarning, stacklevel=3)
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return ReduceOp.AVERAGE
    if not isinstance(op, ReduceOp):
        raise ValueError(f"op={op!r} is no reduction; pass Average, Sum, Min, Max or Product of spark_hvd.torch.")
    return op


def _own(compressed: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """What may be reduced in place without the caller's tensor changing."""
    if compressed.untyped_storage().data_ptr() == original.untyped_storage().data_ptr():
        return compressed.detach().clone(memory_format=torch.contiguous_format)
    return compressed


def _reduce(communicator: Communicator, tensor: torch.Tensor, op: ReduceOp, before: float, after: float) -> None:
    op, after = _checked(tensor, op, before, after, communicator.size)
    _scale_(tensor, before)
    communicator.allreduce(tensor, op).wait()
    _scale_(tensor, after)


def _reduce_fused(
    communicator: Communicator, tensors: Sequence[torch.Tensor], op: ReduceOp, before: float, after: float
) -> None:
    for tensor in tensors:
        _checked(tensor, op, before, after, communicator.size)
    for members in batches(tensors):
        if len(members) == 1:
            _reduce(communicator, tensors[members[0]], op, before, after)
        else:
            batch = [tensors[index] for index in members]
            flat = flatten(batch)
            _reduce(communicator, flat, op, before, after)
            unflatten_into(flat, batch)


def _checked(tensor: torch.Tensor, op: ReduceOp, before: float, after: float, size: int) -> tuple[ReduceOp, float]:
    """Raise what this rank can see is wrong, before anything is sent; give the reduction and the scale to apply."""
    check_op(tensor.dtype, op)
    if tensor.dtype == torch.bool and (before != 1.0 or after != 1.0):
        raise TypeError("prescale_factor and postscale_factor do not exist for torch.bool; convert the tensor first.")
    if op is ReduceOp.AVERAGE and after != 1.0 and is_integer(tensor.dtype):
        return ReduceOp.SUM, after / size  # truncated once, not twice
    return op, after


def _scale_(tensor: torch.Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    values = tensor.detach()
    if is_integer(tensor.dtype):
        values.copy_((values.double() * factor).trunc_())
    elif tensor.element_size() == 1:  # 8-bit floats cannot be multiplied
        values.copy_(values.float() * factor)
    else:
        values.mul_(factor)
