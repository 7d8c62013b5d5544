"""One bucket at run time: a flat buffer, the gradients that are views into it, and its all-reduce in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from spark_hvd.collectives.compression import GradientCompressor
from spark_hvd.torch.optimizer.buckets import BucketPlan, ParamSpec
from spark_hvd.torch.optimizer.memory import BucketMemory, GradientViews, dense_stride, fits, lies_in
from spark_hvd.torch.optimizer.participation import Presence, notes_numel, write
from spark_hvd.transport.host.hierarchy import Hierarchy, HostSharing
from spark_hvd.transport.host.shared_memory import MemorySum, in_memory
from spark_hvd.transport.mpi import backend as mpi_backend
from spark_hvd.transport.torch_private import copy_all
from spark_hvd.transport.waits import wait_for

# Above this mean size, one fused copy with scaling per gradient is faster than a batched copy and a second pass.
FUSED_COPY_NUMEL = 16_384


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are reduced.

    Attributes:
        prescale: factor applied before the sum.
        postscale: factor applied after the sum.
        compressor: compresses the flat buffer before the exchange and decompresses it afterwards.
        sparse_as_dense: whether a sparse gradient is written into the buffer as a dense one.
        average: whether the factors turn the sum into an average.
        size: number of ranks.
        rank: this rank's number among them.
        by_nccl: whether NCCL computes a plain average, which then needs no scaling before; see :meth:`scales`.
    """

    prescale: float
    postscale: float
    compressor: GradientCompressor
    sparse_as_dense: bool
    average: bool
    size: int
    rank: int
    by_nccl: bool = False

    def scales(self, flat: torch.Tensor) -> tuple[float, float, Any]:
        """Return the factors before and after the all-reduce of a buffer, and its operation."""
        # NCCL's average divides before adding, so float16 does not overflow. But it cannot use NVLink SHARP, which only
        # sums.
        if not (self.by_nccl and flat.is_cuda):
            return self.prescale, self.postscale, dist.ReduceOp.SUM
        if flat.dtype == torch.float16:
            return 1.0, 1.0, dist.ReduceOp.AVG
        return 1.0, 1.0 / self.size, dist.ReduceOp.SUM


class FlatBucket:
    """A flat buffer shared by the gradients of some parameters of one dtype and device.

    After the gradients, the buffer has a flag for each parameter, 1 if this rank has a gradient, and the notes of
    :mod:`spark_hvd.torch.optimizer.participation`. The flags are summed with the gradients. So a rank that lacks a
    gradient learns, without a separate message, whether any other rank has it.
    """

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[torch.nn.Parameter],
        specs: Sequence[ParamSpec],
        reduction: Reduction,
        flat: torch.Tensor,
        memory: BucketMemory,
    ) -> None:
        """Use `flat`, zeros, as the buffer: the elements of all gradients, a flag per gradient, and the notes."""
        self.members = plan.members
        self.params = [params[index] for index in plan.members]
        self.names = [specs[index].name for index in plan.members]
        self.reduction = reduction
        self.pending = len(plan.members)
        self._flat = flat
        self._all = memory
        self._memory: MemorySum | None = None
        self._group: dist.ProcessGroup
        self._payload = torch.view_as_real(self._flat) if self._flat.is_complex() else self._flat
        self._body = self._flat[: plan.numel]
        self._tail = self._flat[plan.numel :]
        self._flags, notes = self._tail[: len(plan.members)], self._tail[len(plan.members) :]
        self.notes = torch.view_as_real(notes)[:, 0] if notes.is_complex() else notes
        """This rank's notes; after :meth:`receive`, the sum of all ranks' notes."""
        self._prescale, self._postscale, self._op = reduction.scales(flat)
        # The tail is always summed, whatever happens to the gradients.
        self._one = float(reduction.size) if self._op == dist.ReduceOp.AVG else 1.0
        self._usual_tail = torch.full_like(self._tail, self._one)
        self._usual_tail[len(plan.members) + 1 :] = 0
        # Users get only aliases, because they could give these tensors other memory or strides.
        self._views = [
            torch.as_strided(self._flat, specs[index].shape, dense_stride(specs[index]), offset)
            for index, offset in zip(plan.members, plan.offsets, strict=True)
        ]
        self._gradient_views = GradientViews(flat, self.params, self._views)
        self._held_by_others = False
        self._fused_copy = plan.numel >= FUSED_COPY_NUMEL * len(self.params)
        self._missing: list[int] = []
        self.misfits: list[int] = []
        """Indices of parameters that have changed, so that their gradients no longer fit into their places."""
        self._work: dist.Work | MemorySum | None = None
        self._wire = self._payload
        self._context: Any = None

    @property
    def in_flight(self) -> bool:
        """Whether its all-reduce is in flight."""
        return self._work is not None

    @property
    def holds_gradients(self) -> bool:
        """Whether any parameter's gradient lies in its place."""
        return any(lies_in(param.grad, view) for param, view in zip(self.params, self._views, strict=True))

    @property
    def bounds(self) -> tuple[int, int]:
        """Addresses at which the buffer starts and ends."""
        start = self._flat.data_ptr()
        return start, start + self.nbytes

    @property
    def tells_of_misfits(self) -> bool:
        """Whether a rank found, no later than when it filled the buffer, that parameters need other places."""
        return bool(self.notes[1] > 0.5)

    @property
    def on_gpu(self) -> bool:
        """Whether the host must wait for a device before it reads the buffer."""
        return self._flat.is_cuda

    @property
    def shared(self) -> bool:
        """Whether it is reduced in shared memory."""
        return self._memory is not None

    @property
    def backend(self) -> str:
        """Name of the transport, if the buffer is not reduced in shared memory."""
        return mpi_backend.carrier(self._flat.is_cuda)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self._flat.numel() * self._flat.element_size()

    def when_reduced(self, callback: Callable[[], None]) -> None:
        """Call back when the all-reduce in flight has ended; shared memory does not support this."""
        if isinstance(self._work, dist.Work):
            self._work.get_future().add_done_callback(lambda _: callback())

    def share(self, memory: MemorySum) -> None:
        """Reduce in shared memory from now on."""
        self._memory = memory

    def rearm(self) -> None:
        """Reset after a finished step."""
        self.pending = len(self.params)

    def fill(self, presence: Presence = Presence.HERE) -> None:
        """Copy every gradient into the buffer, scaled and compressed, and make `param.grad` a view of it.

        If the rank has joined, its gradients are zeros.
        """
        self.misfits = []
        if presence >= Presence.JOINED:
            self._gradient_views.release(self._gradient_views.assigned)
            self._flat.zero_()
            self._missing = []
        else:
            self._bring_in()
            if self.misfits and presence is Presence.HERE:
                presence = Presence.HERE_WITH_NEWCOMERS
        if presence is not Presence.HERE:
            write(self.notes, presence, self.reduction.rank, self._one)
        self._wire, self._context = self.reduction.compressor.compress(self._payload)

    def _bring_in(self) -> None:
        fresh, targets = list[torch.Tensor](), list[torch.Tensor]()
        missing = self._missing = []
        empty: list[int] = []
        in_place = 0
        before, assigned = self._gradient_views.assigned, list(self._gradient_views.assigned)
        is_inside = self._all.is_inside
        # For small models this loop is a large part of a step, so each call in it matters.
        for place, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            grad = param.grad
            if grad is None:
                empty.append(place)
                if fits(param, view):
                    missing.append(place)
                else:
                    self.misfits.append(self.members[place])
                continue
            if grad.layout is not torch.strided:
                grad = self._densified(grad, place)
            elif is_inside(grad.data_ptr()):
                if lies_in(grad, view):
                    in_place += 1
                    continue
                grad = grad.clone()  # its memory is about to be overwritten
                self._all.rescue(self)
            try:
                param.grad = alias = view.data
            except RuntimeError:
                self.misfits.append(self.members[place])
                empty.append(place)
            else:
                assigned[place] = ref(alias)
                fresh.append(grad)
                targets.append(view)
        self._gradient_views.assigned = assigned
        self._held_by_others = self._gradient_views.others(in_place + len(fresh))
        if self._held_by_others:
            self._all.rescue(self)
            self._gradient_views.release(before)
            self._held_by_others = self._gradient_views.others(in_place + len(fresh))
        for place in empty:
            self._views[place].zero_()
        self._scale_in(fresh, targets, in_place > 0)
        self._tail.copy_(self._usual_tail)
        for place in empty:
            self._flags[place] = 0

    def rescue(self) -> None:
        """Copy gradients that lie in a bucket, but not in their own places, to separate memory."""
        for param, view in zip(self.params, self._views, strict=True):
            grad = param.grad
            if grad is not None and self._all.has(grad) and not lies_in(grad, view):
                param.grad = grad.clone()

    def adopt(self) -> None:
        """Copy gradients that are already reduced to their places."""
        for place, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            if param.grad is not None and fits(param, view):
                view.copy_(param.grad)
                self._gradient_views.assign(place)

    def was_used(self, index: int) -> bool:
        """Return whether any rank had a gradient of a parameter in the last reduction."""
        return bool(self._flags[self.members.index(index)].abs() > 0.5)

    def held_beside(self, index: int) -> list[bool]:
        """Return, for each gradient in its place except parameter `index`'s, whether it has a nonzero element."""
        return [
            bool(view.any())
            for member, param, view in zip(self.members, self.params, self._views, strict=True)
            if member != index and lies_in(param.grad, view)
        ]

    def _densified(self, grad: torch.Tensor, place: int) -> torch.Tensor:
        if not self.reduction.sparse_as_dense:
            raise ValueError(
                f"parameter {self.names[place]!r} got its first sparse gradient after the first step, when its place "
                f"had been planned as dense; pass sparse_as_dense=True, or let it take part in the first step"
            )
        return grad.to_dense()

    @torch.no_grad()
    def _scale_in(self, fresh: list[torch.Tensor], targets: list[torch.Tensor], in_place: bool) -> None:
        scale = self._prescale
        if scale != 1.0 and self._fused_copy and not in_place:
            for grad, view in zip(fresh, targets, strict=True):
                torch.mul(grad, scale, out=view)
            return
        if fresh:
            copy_all(targets, fresh)
        if scale != 1.0:
            self._body.mul_(scale)

    def launch(self, group: dist.ProcessGroup) -> None:
        """Start the all-reduce; the buffer belongs to the network until `wait` returns."""
        if self._memory is not None:
            self._memory.start()
            self._work = self._memory
        else:
            self._work = dist.all_reduce(self._wire, op=self._op, group=group, async_op=True)
            self._group = group

    def poll(self) -> bool:
        """Do this rank's part of the reduction if it need not wait; otherwise return False."""
        return self._work is not self._memory or self._memory is None or self._memory.poll()

    def advance(self) -> None:
        """Do this rank's part of the reduction, so that no other rank waits for it.

        Raises:
            RuntimeError: A peer or the network failed; the backend raises this.
        """
        if self._memory is not None and self._work is self._memory:
            self._memory.advance()

    def wait(self) -> None:
        """Wait for the all-reduce (on CUDA: let the current stream wait).

        Raises:
            RuntimeError: A peer or the network failed; the backend raises this.
        """
        assert self._work is not None
        work, self._work = self._work, None
        if work is self._memory or self._flat.is_cuda:
            work.wait()
        else:
            wait_for(work, self._group)

    @torch.no_grad()
    def receive(self) -> None:
        """Put the decompressed sum into the buffer."""
        result = self.reduction.compressor.decompress(self._wire, self._context)
        if result is not self._payload:
            self._payload.copy_(result.view_as(self._payload))
        self._wire, self._context = self._payload, None

    @torch.no_grad()
    def complete(self, correction: float | torch.Tensor) -> None:
        """Turn the received sums into gradients, including those that only other ranks had.

        ``correction`` is a further factor, besides the one for the reduction.
        """
        if isinstance(correction, torch.Tensor):  # from the first bucket, which may be on another GPU
            self._body.mul_(self._postscale * correction.to(self._flat.device, non_blocking=True))
        elif (scale := self._postscale * correction) != 1.0:
            self._body.mul_(scale)
        if self._missing:
            used = (self._flags.abs() > 0.5).tolist()
            for place in self._missing:
                if used[place]:
                    self._gradient_views.assign(place)
        if self._held_by_others:  # unknown tensors may write here, so gradients go elsewhere
            self._gradient_views.move_out()

    def abandon(self) -> None:
        """Drop an all-reduce that failed or will never be waited for."""
        self._work = None
        self.rearm()

    def release(self) -> None:
        """Retire the bucket. Gradients that lie here may be half reduced, so they are dropped."""
        self.abandon()
        self.drop()

    def drop(self) -> None:
        """Drop the gradients that lie here."""
        start, end = self.bounds
        for param in self.params:
            if param.grad is not None and param.grad.layout is torch.strided and start <= param.grad.data_ptr() < end:
                param.grad = None


def make_buckets(
    plans: Sequence[BucketPlan],
    params: Sequence[torch.nn.Parameter],
    specs: Sequence[ParamSpec],
    reduction: Reduction,
    pipes: HostSharing | None,
    exchange: Callable[[Any], list[Any]],
    memory: BucketMemory,
) -> list[FlatBucket]:
    """Make the buckets for some plans; collective.

    The plans are the same on every rank. With ``pipes``, buckets are reduced in shared memory.
    """
    leads = [specs[plan.members[0]] for plan in plans]
    notes = notes_numel(reduction.size)
    kinds = [(plan.numel + len(plan.members) + notes, lead.dtype) for plan, lead in zip(plans, leads, strict=True)]
    on_cpu = all(lead.device == "cpu" for lead in leads)
    sums: Sequence[tuple[torch.Tensor, MemorySum]] | None = None
    if plans and on_cpu and pipes is not None:
        sums = pipes.sums(kinds, exchange) if isinstance(pipes, Hierarchy) else in_memory(kinds, pipes, exchange)
    if sums is not None:
        flats = [flat for flat, _ in sums]
    else:
        flats = [torch.zeros(n, dtype=dtype, device=at.device) for (n, dtype), at in zip(kinds, leads, strict=True)]
    buckets = [
        FlatBucket(plan, params, specs, reduction, flat, memory) for plan, flat in zip(plans, flats, strict=True)
    ]
    if sums is not None:
        for bucket, (_, summing) in zip(buckets, sums, strict=True):
            bucket.share(summing)
    return buckets
