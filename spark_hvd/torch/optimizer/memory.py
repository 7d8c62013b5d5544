"""Finds out where gradients lie and whether they were changed: a gradient belongs to a bucket if its memory does.

The tensor object in ``param.grad`` does not tell: casting a module gives the same object other memory, and users
create new objects with the same memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import ref

import torch

from spark_hvd.torch.optimizer.buckets import ParamSpec
from spark_hvd.transport.torch_private import changes, users_of

if TYPE_CHECKING:
    from spark_hvd.torch.optimizer.flat import FlatBucket


class BucketMemory:
    """The buckets of one reducer, and where they lie in memory.

    Call :meth:`changed` after a change of the list.
    """

    def __init__(self, buckets: list[FlatBucket]) -> None:
        self._buckets = buckets
        self._bounds: list[int] = []  # addresses at which buffers alternately start and end, ascending

    def changed(self) -> None:
        """Look up where the buckets lie now."""
        self._bounds = sorted(bound for bucket in self._buckets for bound in bucket.bounds)

    def is_inside(self, address: int) -> bool:
        """Return whether an address lies in a bucket."""
        return bisect_right(self._bounds, address) & 1 == 1

    def has(self, grad: torch.Tensor) -> bool:
        """Return whether a gradient starts in a bucket."""
        return grad.layout is torch.strided and self.is_inside(grad.data_ptr())

    def rescue(self, written: FlatBucket) -> None:
        """Move gradients of other buckets that lie out of place to separate memory, before ``written`` is written."""
        for bucket in self._buckets:
            if bucket is not written:
                bucket.rescue()


class GradientViews:
    """The views of a bucket that became gradients of parameters, and which others may still hold.

    Attributes:
        assigned: For each place, the tensor that was assigned last, if it is alive.
    """

    def __init__(self, flat: torch.Tensor, params: Sequence[torch.nn.Parameter], views: Sequence[torch.Tensor]) -> None:
        self._params, self._views = params, views
        self._storage = flat.untyped_storage()
        self._own: int | None = None
        self.assigned: list[Callable[[], torch.Tensor | None]] = [lambda: None] * len(params)

    def assign(self, place: int) -> None:
        """Make the memory of a parameter's place its gradient."""
        view = self._views[place].data  # with its own version counter, so that a change is noticed
        self._params[place].grad = view
        self.assigned[place] = ref(view)

    def others(self, gradients: int) -> bool:
        """Return whether anything uses the memory, besides the bucket and this many gradients in their places."""
        count = users_of(self._storage) - gradients
        self._own = count if self._own is None else min(self._own, count)
        return count > self._own

    def release(self, assigned: Sequence[Callable[[], torch.Tensor | None]]) -> None:
        """Move tensors of ``assigned`` that are no longer gradients to separate memory before the buffer is written."""
        for param, view, alive in zip(self._params, self._views, assigned, strict=True):
            grad = alive()
            if grad is not None and grad is not param.grad and lies_in(grad, view):
                grad.data = grad.clone()

    def move_out(self) -> None:
        """Move the gradients that lie in their places to separate memory."""
        for param, view in zip(self._params, self._views, strict=True):
            if lies_in(param.grad, view):
                param.grad = view.clone()


def lies_in(grad: torch.Tensor | None, view: torch.Tensor) -> bool:
    """Return whether a gradient is the memory of a view, element for element."""
    return (
        grad is not None
        and grad.layout is torch.strided
        and grad.data_ptr() == view.data_ptr()
        and grad.dtype is view.dtype
        and grad.is_set_to(view)
    )


def fits(param: torch.Tensor, view: torch.Tensor) -> bool:
    """Return whether a view can be a parameter's gradient."""
    return param.dtype is view.dtype and param.shape == view.shape and param.device == view.device


def dense_stride(spec: ParamSpec) -> tuple[int, ...]:
    """Return the parameter's strides if they fill memory without gaps (as channels_last does), else default ones."""
    dims = sorted((dim for dim, length in enumerate(spec.shape) if length > 1), key=lambda dim: spec.stride[dim])
    expected = 1
    for dim in dims:
        if spec.stride[dim] != expected:
            return torch.empty(spec.shape, device="meta").stride()
        expected *= spec.shape[dim]
    return spec.stride


class Marks:
    """Object, memory and version of each gradient at the end of backward."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, torch.Tensor, torch.Tensor, int]] = []

    def set(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Record the present gradients."""
        graded = [(index, param.grad) for index, param in enumerate(params) if param.grad is not None]
        self._marks = [(index, grad, grad.detach(), changes(grad)) for index, grad in graded]

    def clear(self) -> None:
        """Forget the recorded gradients."""
        self._marks.clear()

    def check(self, params: Sequence[torch.nn.Parameter], specs: Sequence[ParamSpec]) -> None:
        """Raise if a gradient has changed.

        Raises:
            ValueError: A gradient has changed.
        """
        for index, grad, alias, version in self._marks:
            same = params[index].grad is grad and changes(grad) == version
            if not same or (grad.layout is torch.strided and not grad.is_set_to(alias)):
                raise ValueError(
                    f"the gradient of {specs[index].name!r} was changed before it was reduced (clipped or unscaled?). "
                    "Some parameters get no gradient in some backward passes of this model, so reduction ends in "
                    "step(): call optimizer.synchronize() before you change gradients"
                )

    def are_cleared(self, params: Sequence[torch.nn.Parameter], index: int) -> bool:
        """Return whether gradients were zeroed or dropped before parameter `index`'s gradient was added to."""
        others = [params[each].grad for each, *_ in self._marks if each != index]
        return bool(others) and not any(grad is not None and bool(grad.to_dense().any()) for grad in others)
