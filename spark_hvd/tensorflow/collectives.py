"""The collectives with Horovod's signatures for TensorFlow: eager, and in a ``tf.function``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.collectives.start import Reducing, Tensors
from spark_hvd.tensorflow.rank_ops import size_op
from spark_hvd.tensorflow.tensors import apply, unconverted
from spark_hvd.torch.gradients import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Call,
    Derivable,
    ReduceScatter,
    gradients_by,
    reduced_alike,
)
from spark_hvd.torch.reduce import chosen_op
from spark_hvd.transport.communicator import ReduceOp

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]

_JOINED_BYTES = 4 << 20
"""A graph's tensors that are smaller than this in total are passed on as one."""
_LINEAR = (ReduceOp.SUM, ReduceOp.AVERAGE)


@unconverted
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor over all ranks into a new tensor.

    Args:
        tensor: A tensor, a variable, or anything that TensorFlow converts to a tensor: the same shape and dtype on
            every rank. For ``tf.IndexedSlices``, whose rows may differ between ranks, all ranks' rows are gathered.
        average: Deprecated: use `op`.
        device_dense: Accepted for Horovod's sake; has no effect.
        device_sparse: Accepted for Horovod's sake; has no effect.
        compression: Compression.none, .fp16, .bf16, or an object with their two methods, which get torch tensors.
        op: Average (default), Sum, Min, Max, Product or Adasum.
        prescale_factor: Multiplies each rank's tensor before the reduction; integers are truncated toward zero.
        postscale_factor: Multiplies the result.
        name: Ranks match calls by name, in any order. None: in a graph, the name of the operation; otherwise such calls
            match by their order.
        process_set: The ranks to reduce over.

    Raises:
        NotInitializedError: Before init().
        TypeError: The reduction does not support this dtype.
        ValueError: `op` and `average` are both given, or this rank is not in the process set.
        NotImplementedError: Another op than Sum or Average for IndexedSlices.
        MismatchError: Ranks made different calls under this name. Raised on every rank; the world stays usable.
        StalledError: Some ranks did not call it within the stall timeout.
        CollectiveError: A peer or the network failed.
    """
    return grouped_allreduce(
        [tensor], average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor, name,
        process_set,
    )[0]  # fmt: skip


@unconverted
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several tensors as one unit, fused by dtype. See :func:`allreduce`."""
    chosen = chosen_op(op, average)
    if chosen not in _LINEAR and any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise NotImplementedError(f"op={chosen} of IndexedSlices: expected Sum or Average; tf.convert_to_tensor")
    call = Call(
        name_of("allreduce", name), process_set, Reducing(chosen, prescale_factor, postscale_factor), compression
    )
    results: list[Any] = list(tensors)
    dense = [place for place, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    if dense:
        converted = [tf.convert_to_tensor(tensors[place]) for place in dense]
        for place, result in zip(dense, _reduced(converted, call), strict=True):
            results[place] = result
    sparse = [place for place in range(len(results)) if place not in dense]
    for place, result in zip(sparse, _gathered([tensors[place] for place in sparse], call), strict=True):
        results[place] = result
    return results


def _reduced(tensors: Sequence[Any], call: Call) -> list[Any]:
    if not _joinable(tensors, call):
        return apply(Allreduce, tensors, call, kept=() if reduced_alike(call) else [each.dtype for each in tensors])
    shapes = [each.shape for each in tensors]
    joined = tf.concat([tf.reshape(each, [-1]) for each in tensors], 0)
    (reduced,) = apply(_allreduce_of(shapes), [joined], call)
    parts = tf.split(reduced, [shape.num_elements() for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def _joinable(tensors: Sequence[Any], call: Call) -> bool:
    """Return whether to pass tensors on as one: a py_function costs 20 us or more per tensor, and a copy less."""
    return (
        not tf.executing_eagerly()
        and len(tensors) > 1
        and reduced_alike(call)
        and len({each.dtype for each in tensors}) == 1
        and all(each.shape.is_fully_defined() for each in tensors)
        and sum(each.shape.num_elements() for each in tensors) * tensors[0].dtype.size <= _JOINED_BYTES
    )


def _allreduce_of(shapes: Sequence[Any]) -> type[Derivable]:
    """Return the all-reduce of several tensors that arrive as one; other ranks see several."""

    def several(joined: torch.Tensor, reduced: Callable[[list[torch.Tensor]], Tensors]) -> Tensors:
        parts = torch.split(joined, [shape.num_elements() for shape in shapes])
        results = reduced([part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)])
        return [torch.cat([each.reshape(-1) for each in results])]

    class AllreduceOfOne:
        @staticmethod
        def forward(call: Call, tensors: Sequence[torch.Tensor], *, keep: bool) -> tuple[Tensors, Tensors]:
            return several(tensors[0], lambda each: Allreduce.forward(call, each, keep=keep)[0]), []

        @staticmethod
        def backward(call: Call, kept: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Tensors:
            return several(grads[0], lambda each: Allreduce.backward(call, kept, each))

    return AllreduceOfOne


def _gathered(slices: Sequence[Any], call: Call) -> list[Any]:
    """Gather the rows of all ranks, without merging equal ones."""
    reducing = call.reducing
    name = None if call.name is None else f"{call.name}.slices"
    rows = grouped_allgather([part for each in slices for part in (each.values, each.indices)], name, call.process_set)
    results = []
    for values, indices, own in zip(rows[::2], rows[1::2], slices, strict=True):
        if (factor := reducing.prescale * reducing.postscale) != 1.0:
            values = values * tf.cast(factor, values.dtype)
        if reducing.op is ReduceOp.AVERAGE:
            values = values / tf.cast(size_op(call.process_set), values.dtype)
        results.append(tf.IndexedSlices(values, indices, own.dense_shape))
    return results


@unconverted
def allgather(
    tensor: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    grad_op: ReduceOp | None = None,
) -> Any:
    """Concatenate all ranks' tensors along the first dimension, which may differ in size, in rank order.

    Args:
        tensor: A 0-dim tensor counts as one row.
        name: As for :func:`allreduce`.
        process_set: The ranks that take part.
        grad_op: How gradients are reduced: Sum, or Average as in Horovod.

    Raises:
        MismatchError: Dtypes, or dimensions after the first, differ. Raised on every rank; the world stays usable.
        NotInitializedError, ValueError, StalledError, CollectiveError: See :func:`allreduce`.
    """
    return grouped_allgather([tensor], name, process_set, grad_op=grad_op)[0]


@unconverted
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    grad_op: ReduceOp | None = None,
) -> list[Any]:
    """Apply :func:`allgather` to several tensors, as one unit."""
    call = Call(name_of("allgather", name), process_set, gradients_by(grad_op))
    converted = [tf.convert_to_tensor(tensor) for tensor in tensors]
    return apply(Allgather, converted, call, kept=[tf.int64], rows=True) if converted else []


@unconverted
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    grad_op: ReduceOp | None = None,
) -> Any:
    """Return a new tensor with the elements of the root's tensor; the same shape and dtype on every rank.

    Args:
        tensor: Only the root's elements count.
        root_rank: The root, as a rank of the world, even with a process set.
        name: As for :func:`allreduce`.
        process_set: The ranks that take part.
        grad_op: How gradients are reduced to the root's: Sum, or Average as in Horovod.

    Raises:
        ValueError: `root_rank` or this rank is not in the process set.
        NotInitializedError, MismatchError, StalledError, CollectiveError: See :func:`allreduce`.
    """
    call = Call(name_of("broadcast", name), process_set, gradients_by(grad_op), root_rank=root_rank)
    return apply(Broadcast, [tf.convert_to_tensor(tensor)], call)[0]


@unconverted
def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send rows to every rank, and receive rows from every rank.

    Args:
        tensor: Its rows go to the ranks in rank order; dimensions after the first are the same on every rank.
        splits: Number of rows for each rank; None for equal shares.
        name: As for :func:`allreduce`.
        process_set: The ranks that take part.

    Returns:
        The rows received, in rank order. If `splits` is given, also the number from each rank (int32).

    Raises:
        NotInitializedError, ValueError, MismatchError, StalledError, CollectiveError: See :func:`allreduce`.
    """
    call = Call(name_of("alltoall", name), process_set)
    rows, counts = tf.convert_to_tensor(tensor), None if splits is None else tf.convert_to_tensor(splits)
    results = apply(Alltoall, [rows], call, kept=[tf.int32], more=[tf.int32], splits=counts, rows=True)
    return results[0] if splits is None else tuple(results)


@unconverted
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over all ranks and return this rank's share of its rows; the first ranks may get one more row.

    The arguments and errors are those of :func:`allreduce`; a 0-dim tensor or Adasum raises a ValueError.
    """
    return grouped_reducescatter(
        [tensor], device_dense, compression, op, name, process_set, prescale_factor, postscale_factor
    )[0]


@unconverted
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Apply :func:`reducescatter` to several tensors, as one unit."""
    call = Call(
        name_of("reducescatter", name), process_set, Reducing(op, prescale_factor, postscale_factor), compression
    )
    converted = [tf.convert_to_tensor(tensor) for tensor in tensors]
    kept = () if reduced_alike(call) else [each.dtype for each in converted]
    return apply(ReduceScatter, converted, call, kept=kept, rows=True) if converted else []


def name_of(collective: str, name: str | None) -> str | None:
    """Return the name by which ranks match a call. In a graph, where calls have no order, this is the operation's."""
    if name is not None or tf.executing_eagerly():
        return name
    return f"tensorflow.{tf.compat.v1.get_default_graph().unique_name(f'spark_hvd_{collective}')}"
