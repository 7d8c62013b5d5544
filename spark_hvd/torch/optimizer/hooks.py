"""The hooks that autograd runs after each gradient, which count gradients for the reducer."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NoReturn, Protocol

import torch

from spark_hvd.torch.optimizer.flat import FlatBucket
from spark_hvd.transport.torch_private import hooks_of, next_hook_id


class Backward(Protocol):
    """What the hooks report to the reducer during a backward pass."""

    def begin_backward(self, index: int) -> None:
        """Record the first gradient of a pass, which is this parameter's."""

    def advance(self) -> None:
        """Launch complete buckets, of which there is one more."""

    def overrun(self, index: int) -> None:
        """Handle a parameter that got one gradient more than its step should have."""


def overrun(name: str, passes: int, *, missing: bool) -> NoReturn:
    """Raise because a parameter got a gradient that its step no longer takes; `missing` says whether it lacks one.

    Raises:
        AssertionError: Always.
    """
    if missing:
        raise AssertionError(
            f"parameter {name!r} got a gradient after those of its step had been reduced, by synchronize() or because "
            f"every parameter of the first step had its own after backward_passes_per_step={passes} calls of "
            f"backward(): later steps do not wait for more calls. Call backward() once, on the sum of the losses; to "
            f"begin another step, call optimizer.zero_grad()"
        )
    raise AssertionError(
        f"parameter {name!r} got more than backward_passes_per_step={passes} gradients before step(), or after "
        f"synchronize(). To accumulate gradients over n calls of backward(), pass backward_passes_per_step=n; to drop "
        f"them, call optimizer.zero_grad()"
    )


class NoBucket:
    """Stands in where a parameter has no bucket; its count never reaches zero."""

    pending = -1


class GradientCounts:
    """The counts that hooks write. They do not refer to the reducer: hooks live as long as the model."""

    __slots__ = ("buckets", "idle", "left", "order")

    def __init__(self) -> None:
        self.idle = True  # no hook of the current backward has fired yet
        self.left: list[int] = []  # backward passes still to come, by parameter
        self.order: list[int] = []  # parameters in the order in which they became ready
        self.buckets: list[FlatBucket | NoBucket] = []  # each parameter's bucket


def make_hook(
    index: int, progress: GradientCounts, reducer_ref: weakref.ref[Backward]
) -> Callable[[torch.Tensor], None]:
    """Return the hook that runs after each gradient; for small models it is most of the cost of a step."""
    left, order, buckets = progress.left, progress.order, progress.buckets

    def hook(_: torch.Tensor) -> None:
        if progress.idle:
            _alive(reducer_ref).begin_backward(index)
        count = left[index] = left[index] - 1
        if count == 0:
            order.append(index)
            bucket = buckets[index]
            bucket.pending -= 1
            if bucket.pending == 0:
                _alive(reducer_ref).advance()
        elif count < 0:
            _alive(reducer_ref).overrun(index)

    return hook


def serialized(hook: Callable[[torch.Tensor], None], lock: threading.RLock) -> Callable[[torch.Tensor], None]:
    """Wrap a hook so that it waits while another with the same lock runs, in any thread.

    Autograd has one thread per GPU, and runs CPU work in the caller's thread. So if parameters are on several devices,
    their hooks run in several threads at once. One lock guards everything that they change, including which bucket is
    launched next: buckets are launched one after another, in plan order, by any thread. A launch does not wait for
    other ranks, so the lock is only held for moments. Parameters on one device share a thread and need no lock.
    """

    def locked(gradient: torch.Tensor) -> None:
        with lock:
            hook(gradient)

    return locked


def _alive(reducer_ref: weakref.ref[Backward]) -> Backward:
    reducer = reducer_ref()
    assert reducer is not None, "hooks are removed with their reducer"
    return reducer


def remove_all(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    """Remove hooks from their parameters, and empty the list."""
    while handles:
        handles.pop().remove()


class HookOrder:
    """Detects hooks of the program that run after ours, for the same gradient, and may change it."""

    def __init__(self) -> None:
        self._ours: list[tuple[dict[int, object], int]] = []
        """For each parameter, all its hooks by id in their order, and the id of ours."""
        self._checked = -1
        """The id that the next hook of this process had when ours were last found to be the last ones."""

    def add(self, param: torch.Tensor, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Add a parameter and the handle of our hook."""
        self._ours.append((hooks_of(param), handle.id))

    def is_followed(self) -> bool:
        """Return whether a hook runs after one of ours."""
        upcoming = next_hook_id()
        if upcoming == self._checked:  # the usual case; every step asks
            return False
        followed = any(next(reversed(hooks), None) != ours for hooks, ours in self._ours)
        if not followed:
            self._checked = upcoming
        return followed


class Watch:
    """The hooks of a reducer's parameters. The list of parameters may grow."""

    def __init__(
        self, params: Sequence[torch.nn.Parameter], progress: GradientCounts, reducer_ref: weakref.ref[Backward]
    ) -> None:
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self.watched: dict[int, None] = {}
        """Indices of the parameters, in the order in which they were hooked."""
        self._params, self._progress, self._reducer_ref = params, progress, reducer_ref
        self._order = HookOrder()
        self._lock: threading.RLock | None = None
        """Used if the parameters are on several devices."""

    def add(self, indices: Iterable[int]) -> None:
        """Hook parameters, each once."""
        if self._lock is None and len({param.device for param in self._params}) > 1:
            self._lock = threading.RLock()
            self.renew()
        for index in indices:
            if index not in self.watched:
                self._hook(index)

    def _hook(self, index: int) -> None:
        self.watched[index] = None
        hook = make_hook(index, self._progress, self._reducer_ref)
        if self._lock is not None:
            hook = serialized(hook, self._lock)
        param = self._params[index]
        handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.handles.append(handle)
        self._order.add(param, handle)

    def clear(self) -> None:
        """Remove all hooks."""
        remove_all(self.handles)
        self._order = HookOrder()
        self.watched.clear()

    @property
    def are_followed(self) -> bool:
        """Whether the program's own hooks run after one of these, for the same gradient."""
        return self._order.is_followed()

    @property
    def is_lost(self) -> bool:
        """Whether parameters have become other tensors without hooks; either all have or none."""
        return any(not hooks_of(self._params[index]) for index in islice(self.watched, 1))

    def renew(self) -> None:
        """Hook parameters again."""
        watched = list(self.watched)
        self.clear()
        self.add(watched)

    def require_hooks(self) -> None:
        """Raise a RuntimeError if hooks are lost, so that backward could not report its gradients."""
        if self.is_lost:
            raise RuntimeError(
                "backward() has not reported its gradients, because the parameters have become other tensors "
                "(torch.utils.swap_tensors does that). Call optimizer.zero_grad() after it, before backward()"
            )
