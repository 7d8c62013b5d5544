"""Batch normalisation with the statistics of all ranks' batches together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.autograd.function import once_differentiable

from spark_hvd.collectives.process_set import ProcessSet, global_process_set, queue_of
from spark_hvd.context import basics
from spark_hvd.context.global_state import in_world, ordinal
from spark_hvd.torch.reduce import allreduce
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.transport.torch_private import BatchNormBase, children

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SyncBatchNorm(BatchNormBase):
    """BatchNorm1d, 2d and 3d in one, over the joined batch of all ranks; the signature is Horovod's.

    In training mode, every rank must call it, and run backward through it, equally often and in the same order. Forward
    and backward each cost one small all-reduce. Batches may differ in size, and may be empty on some ranks. In eval
    mode, in a world of one, and before init(), nothing is sent and the module behaves like torch's BatchNorm. Modules
    of different ranks match by the order in which each rank made its SyncBatchNorms, over all its models.

    As with torch's SyncBatchNorm, the input's gradient is that of the sum of all ranks' losses. The gradients of weight
    and bias are this rank's share, which DistributedOptimizer reduces as usual. Double backward is not supported.

    Args:
        num_features: Channels C of an input of shape (N, C), (N, C, L), (N, C, H, W) or (N, C, D, H, W): float16,
            bfloat16, float32 or float64, in any memory format. Statistics are float32, or float64 if the input is.
        eps: Added to the variance.
        momentum: Share of the new batch in the running statistics; None: all batches have the same weight.
        affine: Whether there are a weight and a bias, of shape (C,).
        track_running_stats: Whether there are running statistics. Without them, eval mode uses those of the rank's own
            batch.
        process_set: The ranks that share statistics; None: all.

    Raises:
        ValueError: From calls: the input does not have 2 to 5 dimensions or C channels, the joined batch has only one
            value per channel (on every rank), or this rank is not in the process set.
        TypeError: From calls: the input has another dtype.
        CollectiveError: From calls in training mode and their backward: a peer or the network failed.
    """

    __module__ = "spark_hvd.torch"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set
        # Ranks build the same models, so the n-th module here is the n-th on every rank.
        self._number = ordinal("sync_batch_norm")

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_set: ProcessSet | None = None) -> torch.nn.Module:
        """Replace every batch normalisation in a model, in place, as torch's function of this name does.

        The new modules share parameters and buffers with the old ones, so existing optimizers stay valid. Hooks on the
        old ones are lost.

        Args:
            module: The model.
            process_set: The process set of the new modules.

        Returns:
            The model, or its replacement if it is itself a batch normalisation.

        Raises:
            ValueError: A lazy module has not seen its first input.
        """
        if _is_local(module):
            return cls._like(module, process_set)
        made: dict[BatchNormBase, SyncBatchNorm] = {}  # a module in two places stays one module
        for parent in list(module.modules()):
            for name, child in children(parent):
                if _is_local(child):
                    if child not in made:
                        made[child] = cls._like(child, process_set)
                    parent.add_module(name, made[child])
        return module

    @classmethod
    def _like(cls, norm: BatchNormBase, process_set: ProcessSet | None) -> SyncBatchNorm:
        if isinstance(norm, torch.nn.modules.lazy.LazyModuleMixin) and norm.has_uninitialized_params():
            raise ValueError(f"{type(norm).__name__} has no parameters yet; run the model once before converting it.")
        like = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        like.process_set = process_set
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(like, name, getattr(norm, name))
        return like.train(norm.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize this rank's part of the joined batch; shape, dtype and memory format stay."""
        link = _Link(f"sync_batch_norm.{self._number}", self.process_set or global_process_set)
        if not (self.training and in_world()) or link.size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        output: torch.Tensor
        output, mean, var, count = _Normalize.apply(input, self.weight, self.bias, self.eps, link)  # type: ignore[no-untyped-call]
        # Reading the count means waiting for a GPU. With two values of its own, a rank knows that there are enough.
        at_least = int(count) if _values(input) < 2 else 2
        if at_least == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)} here and "
                f"no second value on the other {link.size - 1} ranks; use larger batches, or eval() the module."
            )
        if self.track_running_stats:
            self._track(mean, var, count, empty=at_least == 0)
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor, *, empty: bool) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)  # torch counts empty batches too
        if empty:
            return
        factor = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, var * (count / (count - 1)))):
            assert running is not None
            running.copy_(torch.lerp(running.to(new.dtype), new, factor))

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if not 2 <= input.dim() <= 5:
            raise ValueError(f"expected an input of 2 to 5 dimensions, got shape {tuple(input.shape)}.")
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels in dimension 1, got shape {tuple(input.shape)}.")
        if input.dtype not in _DTYPES:
            raise TypeError(f"expected float16, bfloat16, float32 or float64, got {input.dtype}.")


@dataclass(frozen=True, slots=True)
class _Link:
    """The communication between ranks, by the two methods below."""

    name: str
    process_set: ProcessSet

    @property
    def size(self) -> int:
        return len(queue_of(self.process_set).ranks)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return every rank's row, shape (ranks, len(row)).

        This is a sum in which each rank fills its own row: an allgather would exchange shapes first, for which the host
        would wait. A rank that has called join() leaves zeros, including a count of zero.
        """
        table = row.new_zeros((self.size, len(row)))
        table[queue_of(self.process_set).ranks.index(basics.rank())] = row
        return self._sum(table, "forward")

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        return self._sum(sums, "backward")

    def _sum(self, tensor: torch.Tensor, moment: str) -> torch.Tensor:
        return allreduce(tensor, op=ReduceOp.SUM, name=f"{self.name}.{moment}", process_set=self.process_set)


class _Normalize(torch.autograd.Function):
    """Computes the output and, for the running statistics, the joined mean and variance (C,) and count (), float64."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, link: _Link
    ) -> tuple[torch.Tensor, ...]:
        channels, values = x.shape[1], _values(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        deviations = None
        if _has_kernels(x):
            x = _dense(x)
            here, invstd = torch.batch_norm_stats(x, 0.0)  # these kernels return 0 if there is no variance
            squares = torch.where(invstd == 0, invstd, values / invstd.square())
        else:
            here = x.mean(_dims(x), dtype=wide) if values else x.new_zeros(channels, dtype=wide)
            # Two passes instead of torch.var_mean, which takes ten times as long on a CPU.
            deviations = x - _along(here, x)
            squares = deviations.square().sum(_dims(x))

        # Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979),
        # for any number of parts at once: nothing cancels, however large the mean. These few numbers are float64.
        row = torch.cat([here, squares, here.new_full((1,), values)])
        means, squares, counts = torch.split(link.all_gather(row).double(), [channels, channels, 1], dim=1)
        count = counts.sum()
        divisor = count.clamp(min=1)
        mean = (counts * means).sum(0) / divisor
        var = (squares + counts * (means - mean).square()).sum(0) / divisor

        invstd = (var + eps).rsqrt()
        if deviations is None:
            elemt: Any = torch.batch_norm_elemt  # whose stub lacks two arguments
            affine = [None if each is None else each.to(wide) for each in (weight, bias)]
            output = elemt(x, *affine, mean.to(wide), invstd.to(wide), eps)
        else:
            scale = invstd if weight is None else invstd * weight
            shift = (here - mean) * scale  # the deviations are from this rank's mean
            if bias is not None:
                shift = shift + bias
            output = deviations.mul_(_along(scale.to(wide), x)).add_(_along(shift.to(wide), x)).to(x.dtype)

        ctx.save_for_backward(x, weight, mean.to(wide), invstd.to(wide), divisor)
        ctx.link = link
        ctx.mark_non_differentiable(mean, var, count)
        return output, mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, invstd, divisor = ctx.saved_tensors
        deviations = None
        if _has_kernels(x):
            grad = _dense(grad)
            of_two = torch.batch_norm_backward_reduce(grad, x, mean, invstd, None, True, False, False)[:2]
            sums = torch.stack(of_two)
        else:
            deviations = x - _along(mean, x)
            sums = torch.stack([grad.sum(_dims(x), dtype=mean.dtype), (grad * deviations).sum(_dims(x))])
        grad_x = grad_weight = grad_bias = None
        # Whether the input needs a gradient depends on the model, so all ranks take the same branch.
        if ctx.needs_input_grad[0]:
            grad_mean, slope = (ctx.link.total(sums) / divisor).unbind()
            if deviations is None:
                wide_weight = None if weight is None else weight.to(mean.dtype)
                one = torch.ones(1, dtype=torch.int32, device=x.device)  # the sums are divided already
                means = grad_mean.contiguous(), slope.contiguous()
                grad_x = torch.batch_norm_backward_elemt(grad, x, mean, invstd, wide_weight, *means, one)
            else:
                scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
                deviations.mul_(_along(-slope * invstd.square(), x)).add_(grad).sub_(_along(grad_mean, x))
                grad_x = deviations.mul_(_along(scale, x)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = sums[1] * invstd  # autograd rounds it to the parameter's dtype if that is narrower
        if ctx.needs_input_grad[2]:
            grad_bias = sums[0]
        return grad_x, grad_weight, grad_bias, None, None


def _is_local(module: torch.nn.Module | None) -> TypeGuard[BatchNormBase]:
    return isinstance(module, BatchNormBase) and not isinstance(module, SyncBatchNorm)


def _has_kernels(x: torch.Tensor) -> bool:
    """Return whether torch's kernels for its own SyncBatchNorm apply: one pass each, where the formulas take several.

    They need CUDA and at least one value. We exchange and join the statistics ourselves:
    batch_norm_gather_stats_with_counts divides by zero for ranks without values, unless the host looks for them.
    """
    return x.is_cuda and x.numel() > 0


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor in one of the memory formats of those kernels."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x if x.is_contiguous(memory_format=formats.get(x.dim(), torch.contiguous_format)) else x.contiguous()


def _values(x: torch.Tensor) -> int:
    """Return how many values each channel has on this rank."""
    return math.prod(x.shape[:1] + x.shape[2:])


def _dims(x: torch.Tensor) -> list[int]:
    """Return all dimensions except the channels'."""
    return [0, *range(2, x.dim())]


def _along(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reshape a vector (C,) so that it broadcasts along the channels of x."""
    return vector.view(-1, *[1] * (x.dim() - 2))
