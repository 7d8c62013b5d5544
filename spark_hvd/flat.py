"""One bucket at run time: a flat buffer, the gradients that are views into it, and the all-reduce in flight on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from spark_hvd.buckets import BucketPlan, ParamSpec
from spark_hvd.torch_private import copy_all

# Above this mean size one fused "scale into the buffer" a gradient beats one batched copy and a second pass to scale.
FUSED_COPY_NUMEL = 16_384


class Compressor(Protocol):
    """What `compression=` accepts: a class or object with these two methods."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is to travel, and whatever `decompress` needs."""
        ...

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Undo `compress` on the reduced tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients become their reduced selves.

    Attributes:
        prescale: factor applied before the sum.
        postscale: factor applied after it.
        compressor: applied to the flat buffer on its way out and back.
        sparse_as_dense: whether a sparse gradient is written out into the buffer.
    """

    prescale: float
    postscale: float
    compressor: Compressor
    sparse_as_dense: bool


class FlatBucket:
    """A flat buffer shared by the gradients of some parameters of one dtype and device.

    The buffer ends in one flag a parameter, 1 where this rank has a gradient. The flags are summed with the gradients,
    so that a rank which lacks one learns, without a message of its own, whether any other rank had it.
    """

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[torch.nn.Parameter],
        specs: Sequence[ParamSpec],
        reduction: Reduction,
    ) -> None:
        self.members = plan.members
        self.params = [params[index] for index in plan.members]
        self.names = [specs[index].name for index in plan.members]
        self.reduction = reduction
        self.pending = len(plan.members)
        lead = self.params[0]
        self._flat = torch.zeros(plan.numel + len(self.params), dtype=lead.dtype, device=lead.device)
        self._payload = torch.view_as_real(self._flat) if self._flat.is_complex() else self._flat
        self._body = self._flat[: plan.numel]
        self._flags = self._flat[plan.numel :]
        # `.data` gives each view a version counter of its own, so that a change to one gradient is seen as such.
        self.views = [
            torch.as_strided(self._flat, param.shape, _dense_stride(param), offset).data
            for param, offset in zip(self.params, plan.offsets, strict=True)
        ]
        self._fused_copy = plan.numel >= FUSED_COPY_NUMEL * len(self.params)
        self._missing: list[int] = []
        self._work: dist.Work | None = None
        self._wire = self._payload
        self._context: Any = None

    @property
    def in_flight(self) -> bool:
        """Whether its all-reduce was started and not yet waited for."""
        return self._work is not None

    def rearm(self) -> None:
        """Forget the finished step."""
        self.pending = len(self.params)

    def fill(self) -> None:
        """Bring every gradient into the buffer, scaled and compressed, and let `param.grad` be the view of it."""
        fresh: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        missing = self._missing = []
        in_place = False
        for place, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            grad = param.grad
            if grad is view:
                in_place = True
            elif grad is None:
                view.zero_()
                missing.append(place)
            else:
                if grad.layout is not torch.strided:
                    grad = self._densified(grad, place)
                fresh.append(grad)
                targets.append(view)
                param.grad = view
        self._scale_in(fresh, targets, in_place)
        self._flags.fill_(1)
        for place in missing:
            self._flags[place] = 0
        self._wire, self._context = self.reduction.compressor.compress(self._payload)

    def _densified(self, grad: torch.Tensor, place: int) -> torch.Tensor:
        if not self.reduction.sparse_as_dense:
            raise ValueError(
                f"parameter {self.names[place]!r} has a sparse gradient for the first time after the first step, when "
                f"its place was planned as dense; pass sparse_as_dense=True, or let it take part in the first step"
            )
        return grad.to_dense()

    @torch.no_grad()
    def _scale_in(self, fresh: list[torch.Tensor], targets: list[torch.Tensor], in_place: bool) -> None:
        scale = self.reduction.prescale
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
        self._work = dist.all_reduce(self._wire, group=group, async_op=True)

    def wait(self) -> None:
        """Wait for the all-reduce (on CUDA: let the current stream wait).

        Raises:
            RuntimeError: as the backend raises it when a peer or the network failed.
        """
        assert self._work is not None
        work, self._work = self._work, None
        work.wait()

    @torch.no_grad()
    def complete(self) -> None:
        """Make the result the gradients, those included that this rank lacked but others had."""
        result = self.reduction.compressor.decompress(self._wire, self._context)
        if result is not self._payload:
            self._payload.copy_(result.view_as(self._payload))
        self._wire, self._context = self._payload, None
        if self.reduction.postscale != 1.0:
            self._body.mul_(self.reduction.postscale)
        if self._missing:
            used = (self._flags.abs() > 0.5).tolist()
            for place in self._missing:
                if used[place]:
                    self.params[place].grad = self.views[place]

    def abandon(self) -> None:
        """Drop an all-reduce that failed or will never be waited for."""
        self._work = None
        self.rearm()


def _dense_stride(param: torch.Tensor) -> tuple[int, ...]:
    """The parameter's own strides if they fill memory without a gap (channels_last does), else a fresh tensor's."""
    dims = sorted((dim for dim in range(param.dim()) if param.shape[dim] > 1), key=lambda dim: param.stride(dim))
    expected = 1
    for dim in dims:
        if param.stride(dim) != expected:
            return torch.empty(param.shape, device="meta").stride()
        expected *= param.shape[dim]
    return param.stride()
