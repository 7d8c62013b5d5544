"""Named collectives on tensors: each function describes one call and passes it to the queue of its process set.

A call that repeats an earlier one takes a shorter path, `queue.again`, which skips the checks and the description. It
returns None for any other call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

import torch

from spark_hvd.collectives.execution import Work, all_results
from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.messages import Request, dtype_text
from spark_hvd.collectives.process_set import ProcessSet, queue_of
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.transport.dtypes import check_op
from spark_hvd.transport.shapes import even_rows, require_dense, require_places, require_rows, split_fault

T = TypeVar("T")
Tensors = list[torch.Tensor]


class Reducing(NamedTuple):
    """The computation of an allreduce or a reducescatter."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise a TypeError if these tensors cannot be reduced this way."""
        for tensor in tensors:
            check_op(tensor.dtype, self.op)
            if tensor.dtype == torch.bool and (self.prescale != 1.0 or self.postscale != 1.0):
                raise TypeError(
                    "prescale_factor and postscale_factor do not apply to torch.bool; convert the tensor first."
                )


def start_allreduce(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    reducing: Reducing,
    process_set: ProcessSet,
    result: Callable[[Work], T],
    *,
    in_place: bool,
    urgent: bool = False,
) -> NamedHandle[T]:
    """Reduce tensors over all ranks of a process set, as one unit.

    Args:
        tensors: At least one.
        name: The call's name; None: calls match by their order.
        reducing: The computation.
        process_set: The ranks that take part.
        result: `all_results` or `single_result`.
        in_place: Whether the results go into `tensors`.
        urgent: Whether the caller is about to wait.

    Raises:
        TypeError: The reduction or scaling does not support the dtype.
        ValueError: This rank is not in the process set, the tensors are on several devices, or one is not writable.
    """
    queue = queue_of(process_set)
    if len(tensors) == 1:
        handle = queue.again("allreduce", name, tensors[0], reducing, result, in_place=in_place, urgent=urgent)
        if handle is not None:
            return handle
    reducing.check(tensors)
    if in_place:
        require_places(tensors)
    request = _request("allreduce", tensors, reducing)
    return queue.submit(name, request, Work(tensors, in_place, []), result, urgent=urgent)


def start_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    result: Callable[[Work], T],
    *,
    urgent: bool = False,
    seal: str | None = None,
) -> NamedHandle[T]:
    """Concatenate tensors over all ranks of a process set; see :func:`start_allreduce`."""
    queue = queue_of(process_set)
    if len(tensors) == 1 and seal is None:
        handle = queue.again("allgather", name, tensors[0], ("allgather", None), result, in_place=False, urgent=urgent)
        if handle is not None:
            return handle
    request = _request("allgather", tensors)._replace(seal=seal)
    return queue.submit(name, request, Work(tensors, False, []), result, urgent=urgent)


def start_broadcast(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    result: Callable[[Work], T],
    *,
    in_place: bool,
    urgent: bool = False,
) -> NamedHandle[T]:
    """Send one rank's tensors to all ranks of a process set; `root_rank` is its rank in the world."""
    process_set.require_root(root_rank)
    queue = queue_of(process_set)
    if len(tensors) == 1:
        how = "broadcast", int(root_rank)
        handle = queue.again("broadcast", name, tensors[0], how, result, in_place=in_place, urgent=urgent)
        if handle is not None:
            return handle
    if in_place:
        require_places(tensors)
    request = _request("broadcast", tensors)._replace(root=int(root_rank))
    return queue.submit(name, request, Work(tensors, in_place, []), result, urgent=urgent)


def start_sealing(seal: str | None, root_rank: int, name: str | None, process_set: ProcessSet) -> NamedHandle[str]:
    """Send one rank's seal to all ranks of a process set; :mod:`spark_hvd.collectives.objects` says what a seal is.

    It goes through the coordinator alone, whose channel is authenticated.
    """
    process_set.require_root(root_rank)
    queue = queue_of(process_set)
    root = list(queue.ranks).index(root_rank)
    request = Request("broadcast", [], [], "", root=int(root_rank), seal=seal)
    return queue.submit(name, request, Work([], True, []), lambda work: work.seals[root] or "", urgent=True)


def start_alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None,
    name: str | None,
    process_set: ProcessSet,
    *,
    urgent: bool = False,
) -> NamedHandle[tuple[torch.Tensor, torch.Tensor]]:
    """Send rows to each rank of a process set; the result holds the received rows and their number per rank."""
    queue = queue_of(process_set)
    size = len(queue.ranks)
    counts = _counts(splits)
    fault = split_fault(tensor, counts, size)
    if fault is not None:  # sent anyway, so that every rank raises the error and none waits for this one
        counts = []
    elif counts is None:
        counts = even_rows(tensor.shape[0], size)
    request = _request("alltoall", [tensor])._replace(splits=counts, fault=fault)
    return queue.submit(name, request, Work([tensor], False, []), _with_splits, urgent=urgent)


def start_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    reducing: Reducing,
    process_set: ProcessSet,
    result: Callable[[Work], T],
    *,
    urgent: bool = False,
) -> NamedHandle[T]:
    """Reduce tensors over all ranks of a process set and keep this rank's rows; see :func:`start_allreduce`."""
    if reducing.op is ReduceOp.ADASUM:
        raise NotImplementedError("reducescatter does not support op=Adasum; pass Average, Sum, Min, Max or Product.")
    for tensor in tensors:
        require_rows(tensor)
    reducing.check(tensors)
    request = _request("reducescatter", tensors, reducing)
    return queue_of(process_set).submit(name, request, Work(tensors, False, []), result, urgent=urgent)


def start_barrier(process_set: ProcessSet) -> NamedHandle[None]:
    """Complete when all ranks of a process set have called it."""
    queue = queue_of(process_set)
    handle = queue.again("barrier", None, None, ("barrier", None), _none, in_place=True, urgent=True)
    return handle or queue.submit(None, Request("barrier", [], [], ""), Work([], True, []), _none, urgent=True)


def compressed_allreduce(
    tensors: Sequence[torch.Tensor], name: str | None, reducing: Reducing, process_set: ProcessSet, compression: Any
) -> Tensors:
    """Reduce tensors into new ones, and wait for the result."""
    pairs = [compression.compress(tensor.detach()) for tensor in tensors]
    compressed = [each for each, _ in pairs]
    # Tensors that the compressor has created may be reduced in place.
    new = all(_storage(each) != _storage(tensor) for each, tensor in zip(compressed, tensors, strict=True))
    results = start_allreduce(compressed, name, reducing, process_set, all_results, in_place=new, urgent=True).wait()
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]


def compressed_reducescatter(
    tensors: Sequence[torch.Tensor], name: str | None, reducing: Reducing, process_set: ProcessSet, compression: Any
) -> Tensors:
    """Reduce tensors, keep this rank's rows, and wait for the result."""
    pairs = [compression.compress(tensor.detach()) for tensor in tensors]
    compressed = [each for each, _ in pairs]
    results = start_reducescatter(compressed, name, reducing, process_set, all_results, urgent=True).wait()
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]


def require_tensor(tensor: object) -> None:
    """Raise a TypeError for anything but a dense tensor on a CPU or a GPU."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(tensor).__name__}; use broadcast_object for objects.")
    require_dense(tensor)


def require_tensors(tensors: object) -> None:
    """Raise a TypeError for anything but a sequence of tensors."""
    if not isinstance(tensors, Sequence):
        raise TypeError(f"expected a list of tensors, got {type(tensors).__name__}.")
    for tensor in tensors:
        require_tensor(tensor)


def _none(work: Work) -> None:
    """Return a barrier's result."""


def _with_splits(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    return work.results[0], torch.tensor(work.received, dtype=torch.int32, device="cpu")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _request(kind: str, tensors: Sequence[torch.Tensor], reducing: Reducing | None = None) -> Request:
    device = tensors[0].device
    if len(tensors) > 1:
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ValueError(
                f"the tensors of one group are on {', '.join(sorted(map(str, devices)))}; use a separate call for "
                "each device."
            )
    # With its index, so that tensors on two GPUs of one rank are not fused.
    where = str(device) if device.type == "cuda" else device.type
    dtypes = [dtype_text(tensor.dtype) for tensor in tensors]
    shapes = [list(tensor.shape) for tensor in tensors]
    if reducing is None:
        return Request(kind, dtypes, shapes, where)
    op, prescale, postscale = reducing
    return Request(kind, dtypes, shapes, where, op.name, float(prescale), float(postscale))


def _counts(splits: Sequence[int] | torch.Tensor | None) -> list[int] | None:
    if splits is None:
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1 or splits.is_floating_point() or splits.is_complex() or splits.dtype == torch.bool:
            raise ValueError(
                f"splits is a tensor of {splits.dtype} and shape {tuple(splits.shape)}; expected whole numbers of rows "
                "in one dimension."
            )
        return [int(count) for count in splits.tolist()]
    counts = list(splits)
    if not all(isinstance(count, Integral) for count in counts):
        raise ValueError(f"splits={counts}: expected whole numbers of rows.")
    return [int(count) for count in counts]
