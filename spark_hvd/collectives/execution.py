"""Runs one batch of entries on a rank: packs tensors, starts the collectives, and hands the results to their owners.

It starts every collective without waiting for it. The first thread that waits for the result does the remaining work,
scaling and unpacking, which saves a thread switch. Adasum and all-reduces through shared memory are exceptions: they
take several rounds, and the engine moves them from round to round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spark_hvd.collectives.fusion import Batch, flatten, flatten_into, unflatten_into
from spark_hvd.collectives.members import Members, Staging
from spark_hvd.collectives.messages import Entry, Request, dtype_of, op_of
from spark_hvd.transport.communicator import Communicator, Handle, ReduceOp
from spark_hvd.transport.dtypes import divide, identity_element, is_integer
from spark_hvd.transport.handles import JointHandle
from spark_hvd.transport.host.pages import prefer_huge
from spark_hvd.transport.host.sliced import SlicedStaging
from spark_hvd.world.errors import CollectiveError

Steps = Generator[Handle[Any], None, None]


@dataclass(slots=True)
class Work:
    """One rank's part of an entry.

    Attributes:
        tensors: This rank's contribution; changed in place if `in_place`.
        in_place: Whether the results go into `tensors`.
        results: The output tensors, once the call has ended.
        received: For alltoall: the number of rows received from each rank.
        seals: The seals of all ranks, if the entry has any.
    """

    tensors: Sequence[torch.Tensor]
    in_place: bool
    results: list[torch.Tensor]
    received: list[int] | None = None
    seals: Sequence[str | None] = ()


def all_results(work: Work) -> list[torch.Tensor]:
    """Return all results, for grouped calls."""
    return list(work.tensors if work.in_place else work.results)


def single_result(work: Work) -> torch.Tensor:
    """Return the result of a call that has one."""
    return work.tensors[0] if work.in_place else work.results[0]


class Execution:
    """A batch in flight. ``steps`` starts collectives, and yields each handle that the next step needs."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._lock = threading.Lock()  # the first thread that waits does the remaining work; the others wait for it
        self.finished = False
        self._error: BaseException | None = None
        self.waiting_for: Handle[Any] | None = None
        self.resume()

    def resume(self) -> None:
        """Take the next step, which may raise."""
        with torch.no_grad():
            self.waiting_for = next(self._steps, None)

    def fail(self, error: CollectiveError) -> None:
        """Record that a step has failed; there are no more steps."""
        self._error = error

    def finish(self) -> None:
        """Wait for the last handle and do the remaining work, once, even if several threads call this.

        Raises:
            CollectiveError: A peer or the network failed.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self.finished:
                try:
                    with torch.no_grad():
                        for _ in self._steps:
                            pass
                except BaseException as error:
                    self._error = error
                    raise
                self.finished = True


def rounds(batch: Batch, members: Members) -> bool:
    """Return whether a batch takes several rounds, between which no other batch may run."""
    return batch[0].request.op == ReduceOp.ADASUM.name or members.stages(batch)


_CPU = torch.device("cpu")


def run(batch: Batch, works: Sequence[Work | None], members: Members, device: torch.device = _CPU) -> Steps:
    """Return the steps of a batch.

    Args:
        batch: Entries of one kind; several only if they may be fused.
        works: This rank's part of each entry; None where this rank has joined.
        members: The members of the process set.
        device: Where a rank that has joined creates its contribution.
    """
    communicator = members.communicator
    first = batch[0].request
    parts = [_stand_ins(entry, device) if work is None else work for entry, work in zip(batch, works, strict=True)]
    if batch[0].seals is not None:  # such entries are not fused
        parts[0].seals = batch[0].seals
    if first.op == ReduceOp.ADASUM.name:
        return _adasum(first, parts, communicator)
    if members.staging is not None and members.stages(batch):
        return _staged_allreduce(batch[0], parts, communicator, members.staging)
    if members.sliced is not None and members.slices(batch):
        return _sliced_allreduce(batch[0], parts, communicator, members.sliced)
    if first.kind == "allreduce":
        return _allreduce(batch[0], parts, communicator)
    if first.kind == "broadcast":
        assert first.root is not None
        return _broadcast(parts, communicator, members.ranks.index(first.root))
    (work,) = parts
    if first.kind == "allgather":
        return _allgather(batch[0], work, communicator)
    if first.kind == "alltoall":
        return _alltoall(batch[0], work, communicator)
    if first.kind == "reducescatter":
        return _reducescatter(first, work, communicator)
    assert first.kind == "barrier"
    return _nothing()


def _nothing() -> Steps:
    yield from ()


def _allreduce(entry: Entry, parts: Sequence[Work], communicator: Communicator) -> Steps:
    op, after, widen = _wire(entry, communicator.size)
    handles, unpacks = [], []
    for sources, targets in _by_dtype(parts):
        if len(sources) == 1 and not widen:
            wire = _copied_into(sources[0], targets[0])
        else:
            wire = flatten(sources)
            wire = wire.to(torch.int64) if widen and is_integer(wire.dtype) else wire
            unpacks.append((wire, targets))
        scale_([wire], entry.request.prescale)
        handles.append(communicator.allreduce(wire, op))
    for wire in (yield from _results(handles)):
        scale_([wire], after)
    for wire, targets in unpacks:
        unflatten_into(wire.to(targets[0].dtype), targets)


def _staged_allreduce(entry: Entry, parts: Sequence[Work], communicator: Communicator, staging: Staging) -> Steps:
    op, after, _ = _wire(entry, communicator.size)
    ((sources, targets),) = _by_dtype(parts)
    dtype, numel = sources[0].dtype, sum(source.numel() for source in sources)
    in_one_go = numel <= staging.room(dtype)
    # What does not fit is reduced in pieces, from one flat tensor into the same or another one.
    is_single = len(sources) == 1 and targets[0].is_contiguous()
    ins = None if in_one_go else (sources[0].reshape(-1) if is_single else flatten(sources))
    outs = targets[0].view(-1) if is_single else ins

    finish = _finisher(op, after, communicator.size)
    for low in range(0, numel, staging.room(dtype)):
        high = min(low + staging.room(dtype), numel)
        buffer = staging.mine(dtype, high - low)
        if ins is None:
            flatten_into(buffer, sources)
        else:
            buffer.copy_(ins[low:high])
        scale_([buffer], entry.request.prescale)
        yield from _results([communicator.barrier()])
        staging.sum_share(dtype, high - low, finish)
        yield from _results([communicator.barrier()])
        if in_one_go:
            unflatten_into(buffer, targets)
        else:
            assert outs is not None
            outs[low:high] = buffer
    if ins is not None and not is_single:
        unflatten_into(ins, targets)


def _sliced_allreduce(entry: Entry, parts: Sequence[Work], communicator: Communicator, staging: SlicedStaging) -> Steps:
    op, after, _ = _wire(entry, communicator.size)
    ((sources, targets),) = _by_dtype(parts)

    def prepare(piece: torch.Tensor) -> None:
        scale_([piece], entry.request.prescale)

    finish = _finisher(op, after, communicator.size)
    is_single = len(sources) == 1 and targets[0].is_contiguous()
    ins = sources[0].reshape(-1) if is_single else flatten(sources)
    outs = targets[0].view(-1) if is_single else ins
    yield from _results([staging.allreduce(ins, outs, prepare, finish)])
    if not is_single:
        unflatten_into(ins, targets)


def _finisher(op: ReduceOp, after: float, size: int) -> Callable[[torch.Tensor], None]:
    """Return a function that turns a sum into the result, in place."""

    def finish(total: torch.Tensor) -> None:
        if op is ReduceOp.AVERAGE:
            divide(total, size)
        scale_([total], after)

    return finish


def _adasum(request: Request, parts: Sequence[Work], communicator: Communicator) -> Steps:
    from spark_hvd.collectives.adasum import adasum  # few runs use Adasum

    for sources, targets in _by_dtype(parts):
        layers = [_copied_into(source, target) for source, target in zip(sources, targets, strict=True)]
        scale_(layers, request.prescale)
        yield from adasum(communicator, layers)
        scale_(layers, request.postscale)


def _wire(entry: Entry, size: int) -> tuple[ReduceOp, float, bool]:
    """Return the operation on the wire, the factor to apply after it, and whether integers need a wider sum."""
    op, after = op_of(entry.request), entry.request.postscale
    divisor = entry.divisor or size
    integers = any(is_integer(dtype_of(dtype)) for dtype in entry.request.dtypes)
    if op is ReduceOp.AVERAGE and (divisor != size or (after != 1.0 and integers)):
        return ReduceOp.SUM, after / divisor, integers  # truncated once, not twice
    return op, after, False


def _broadcast(parts: Sequence[Work], communicator: Communicator, root: int) -> Steps:
    handles, unpacks = [], []
    for sources, targets in _by_dtype(parts):
        if len(sources) == 1:
            wire = _copied_into(sources[0], targets[0])
        else:
            wire = flatten(sources)
            unpacks.append((wire, targets))
        handles.append(communicator.broadcast(wire, root))
    if handles:
        yield from _results(handles)
    for wire, targets in unpacks:
        unflatten_into(wire, targets)


def _results(handles: Sequence[Handle[Any]]) -> Generator[Handle[Any], None, list[Any]]:
    """Yield once for all handles, and return their results."""
    yield handles[0] if len(handles) == 1 else JointHandle(handles)
    return [handle.wait() for handle in handles]


def _allgather(entry: Entry, work: Work, communicator: Communicator) -> Steps:
    table = entry.table
    assert table is not None
    handles = [
        communicator.allgather(tensor, rows=[rows[place] for rows in table])
        for place, tensor in enumerate(work.tensors)
    ]
    work.results.extend((yield from _results(handles)))


def _alltoall(entry: Entry, work: Work, communicator: Communicator) -> Steps:
    assert entry.table is not None
    work.received = [splits[communicator.rank] for splits in entry.table]
    handle = communicator.alltoall(work.tensors[0].detach(), entry.table[communicator.rank], work.received)
    work.results.extend((yield from _results([handle])))


def _reducescatter(request: Request, work: Work, communicator: Communicator) -> Steps:
    op, after, integers = op_of(request), request.postscale, False
    if op is ReduceOp.AVERAGE and after != 1.0:
        integers = any(is_integer(dtype_of(dtype)) for dtype in request.dtypes)
        op, after = (ReduceOp.SUM, after / communicator.size) if integers else (op, after)
    handles = []
    for tensor in work.tensors:
        scaled = tensor
        if request.prescale != 1.0:
            scaled = scaled.clone()
            scale_([scaled], request.prescale)
        handles.append(communicator.reducescatter(scaled, op))
    for share in (yield from _results(handles)):
        scale_([share], after)
        work.results.append(share)


def _by_dtype(parts: Sequence[Work]) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Group inputs and outputs by dtype and device, in the same order on all ranks."""
    sources = [tensor for work in parts for tensor in work.tensors]
    targets: list[torch.Tensor] = []
    for work in parts:
        # Allocated now, not by the call, so that a collective that waits for a rank takes no memory.
        work.results = list(work.tensors) if work.in_place else list(map(_empty_like, work.tensors))
        targets += work.results
    if len(parts) > 1 and not sources[0].is_cuda:
        return [(sources, targets)]  # only collectives of one dtype are fused
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for source, target in zip(sources, targets, strict=True):
        ins, outs = groups.setdefault((source.dtype, source.device), ([], []))
        ins.append(source)
        outs.append(target)
    return list(groups.values())


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return prefer_huge(torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False))


def _copied_into(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return target if target is source else target.copy_(source)


def _stand_ins(entry: Entry, device: torch.device) -> Work:
    """Return the contribution of a rank that has joined: neutral elements, or no rows."""
    request = entry.request
    tensors = []
    for dtype, shape in zip(map(dtype_of, request.dtypes), request.shapes, strict=True):
        if request.kind == "allgather":
            tensors.append(torch.empty([0, *shape[1:]], dtype=dtype, device=device))
        elif request.kind == "broadcast":
            tensors.append(torch.empty(shape, dtype=dtype, device=device))
        else:
            element = 0 if entry.zeros else identity_element(dtype, op_of(request))
            tensors.append(torch.full(shape, element, dtype=dtype, device=device))
    return Work(tensors, in_place=True, results=[])


def scale_(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply in place; integers are truncated toward zero."""
    if factor == 1.0:
        return
    for tensor in tensors:
        if is_integer(tensor.dtype):
            tensor.copy_((tensor.double() * factor).trunc_())
        elif tensor.element_size() == 1:  # 8-bit floats cannot be multiplied
            tensor.copy_(tensor.float() * factor)
        else:
            tensor.mul_(factor)
