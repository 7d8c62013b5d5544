"""The backward pass of Keras' own step on torch, whose gradients are reduced while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from spark_hvd.torch.optimizer.hooks import HookOrder, overrun, remove_all
from spark_hvd.torch.optimizer.recipe import ExternalGradients
from spark_hvd.torch.optimizer.reducer import GradientReducer
from spark_hvd.transport.torch_private import at_end_of_backward, current_backward


class FollowedBackward:
    """Passes gradients to a reducer as a backward pass produces them; `apply` passes the ones it misses.

    ``params`` are placeholders for ``variables``, whose gradients ``external`` reduces. A nested pass, as in reentrant
    checkpoints, may produce a gradient in parts. So the first pass is only observed; if it contains nested passes, no
    pass is followed.
    """

    def __init__(
        self, external: ExternalGradients, variables: Sequence[Any], params: Sequence[torch.nn.Parameter]
    ) -> None:
        self._external, self._params = external, params
        self._names = [variable.path for variable in variables]
        self._number = 0
        """Number of the pass whose gradients are taken; 0 if there is none."""
        self._pass: Callable[[], object] = _none
        """None once the pass has ended or was interrupted."""
        self._looked = False
        # Several devices have several threads, which would produce gradients at the same time.
        self._nested = len({param.device for param in params}) > 1
        self._reducer: weakref.ref[GradientReducer] | None = None
        self._hooks: list[Callable[[torch.Tensor], None]] = []
        self._taken: list[tuple[torch.Tensor, torch.nn.Parameter]] = []
        """Variables and placeholders that share a gradient that is not in a bucket yet."""
        self._order, handles = HookOrder(), []
        for place, variable in enumerate(variables):
            if (value := variable.value).requires_grad:
                handles.append(value.register_post_accumulate_grad_hook(partial(_take, weakref.ref(self), place)))
                self._order.add(value, handles[-1])
        weakref.finalize(self, remove_all, handles)

    def begin(self, loss: torch.Tensor) -> None:
        """Follow the backward pass of a loss, unless there is no reducer yet or the program changes gradients after us.

        Raises:
            RuntimeError: The previous step was interrupted when some of its gradients had been sent.
        """
        reducer = self._external.opened()
        if reducer is None or self._nested or not loss.requires_grad or self._order.is_followed():
            return
        if self._reducer is None or self._reducer() is not reducer:
            self._reducer, self._hooks = weakref.ref(reducer), reducer.hooks()
        if any(param.grad is not None for param in self._params):
            self._drop(reducer)
        loss.register_hook(self._begun)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Drop the gradients of an interrupted backward; the step's gradients come now.

        Raises:
            RuntimeError: Some of the dropped ones had been sent.
        """
        reducer = self._external.opened()
        if reducer is not None and reducer.in_backward:
            self._drop(reducer)
        self._taken.clear()

    def _drop(self, reducer: GradientReducer) -> None:
        """Restart the step. The other ranks wait for this one, unless it has sent gradients."""
        if reducer.launched:
            sent = [name for names in reducer.buckets[: reducer.launched] for name in names]
            raise RuntimeError(
                f"a step was interrupted in backward after the gradients of {len(sent)} of {len(self._names)} "
                f"variables had been sent, first {sent[0]!r}: other ranks use them in a step that this rank has not "
                "made. Let the exception that interrupted it end the program, and start again from a checkpoint"
            )
        self._external.drop()
        self._taken.clear()

    def _begun(self, _: torch.Tensor) -> None:
        self._number = current_backward()
        ended = partial(_look, weakref.ref(self))
        at_end_of_backward(ended)  # this also runs if the pass is interrupted
        self._pass = weakref.ref(ended)

    def look(self) -> None:
        """Check the nesting of the pass that has ended."""
        self._looked, self._pass = True, _none

    def take(self, place: int, variable: torch.Tensor) -> None:
        """Take the gradient of a variable, if it comes from the pass that is followed."""
        reducer = None if self._reducer is None else self._reducer()
        if self._pass() is None or reducer is None:
            return
        param = self._params[place]
        if current_backward() != self._number:
            self._nested = True
            if param.grad is not None:
                overrun(self._names[place], 1, missing=False)
        elif self._looked and not self._nested:
            param.grad = variable.grad
            self._taken.append((variable, param))
            launched = reducer.launched
            self._hooks[place](variable)
            if reducer.launched != launched:  # gradients are now in buckets, so release their former memory
                pairs, self._taken = self._taken, []
                for variable, param in pairs:
                    if variable.grad is param.grad:
                        self._taken.append((variable, param))
                    else:
                        variable.grad = param.grad


def _take(followed: weakref.ref[FollowedBackward], place: int, variable: torch.Tensor) -> None:
    if (owner := followed()) is not None:
        owner.take(place, variable)


def _look(followed: weakref.ref[FollowedBackward]) -> None:
    if (owner := followed()) is not None:
        owner.look()


def _none() -> None:
    """Do nothing; the end of no pass."""
