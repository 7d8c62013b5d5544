"""Kernels that torch has for CUDA alone, for simulated devices; as strict about their arguments."""

from __future__ import annotations

import torch

_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_library = torch.library.Library("aten", "IMPL")


def _wide(x: torch.Tensor) -> torch.dtype:
    """The dtype in which the kernels compute."""
    return torch.promote_types(x.dtype, torch.float32)


def _check(x: torch.Tensor, *vectors: torch.Tensor | None) -> list[int]:
    """Check the input, and return all dimensions but the channels'."""
    ranks = {torch.channels_last: 4, torch.channels_last_3d: 5}
    assert any(x.is_contiguous(memory_format=each) for each in _FORMATS if ranks.get(each, x.dim()) == x.dim())
    assert x.numel(), "a mean of no values"
    for vector in vectors:
        if vector is not None:
            assert vector.is_contiguous()
            assert vector.dtype == _wide(x), (vector.dtype, x.dtype)
    return [0, *range(2, x.dim())]


def _along(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return vector.view(-1, *[1] * (x.dim() - 2))


def _stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    dims = _check(x)
    var, mean = torch.var_mean(x.to(_wide(x)), dims, correction=0)
    invstd = (var + eps).rsqrt()
    return mean, torch.where((var == 0) & (eps == 0), torch.zeros_like(invstd), invstd)


def _elemt(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    _check(x, weight, bias, mean, invstd)
    out = (x.to(_wide(x)) - _along(mean, x)) * _along(invstd, x)
    out = out if weight is None else out * _along(weight, x)
    return (out if bias is None else out + _along(bias, x)).to(x.dtype)


def _backward_reduce(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[torch.Tensor, ...]:
    dims = _check(grad)
    _check(x, mean, invstd)
    assert grad.dtype == x.dtype
    assert (input_g, weight_g, bias_g, weight) == (True, False, False, None), "only that is simulated"
    wide = grad.to(_wide(x))
    none = x.new_empty(0)
    return wide.sum(dims), (wide * (x.to(_wide(x)) - _along(mean, x))).sum(dims), none, none.clone()


def _backward_elemt(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    _check(grad)
    _check(x, mean, invstd, weight, sum_dy, sum_dy_xmu)
    assert count.dtype == torch.int32
    number, wide = count.sum(), _wide(x)
    slope = sum_dy_xmu / number * invstd.square()
    scale = invstd if weight is None else invstd * weight
    deviations = x.to(wide) - _along(mean, x)
    return ((grad.to(wide) - _along(sum_dy / number, x) - deviations * _along(slope, x)) * _along(scale, x)).to(x.dtype)


for _name, _kernel in {
    "batch_norm_stats": _stats,
    "batch_norm_elemt": _elemt,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}.items():
    _library.impl(_name, _kernel, "CPU")  # where simulated devices look for theirs
