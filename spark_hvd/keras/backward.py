"""The backward pass of Keras' own step on torch: its gradients are reduced while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from spark_hvd.torch.optimizer.hooks import overrun, remove_all
from spark_hvd.torch.optimizer.recipe import HandedGradients
from spark_hvd.torch.optimizer.reducer import GradientReducer
from spark_hvd.transport.torch_private import backward_under_way


class FollowedBackward:
    """Hands gradients of variables to a reducer as a backward pass produces them; `apply` hands over those it misses.

    ``params`` are the placeholders of ``variables``, whose gradients ``handed`` reduces. A nested pass, as reentrant
    checkpoints make, may produce a gradient in parts. The first pass is therefore only observed: if it contains nested
    passes, no pass is followed.
    """

    def __init__(self, handed: HandedGradients, variables: Sequence[Any], params: Sequence[torch.nn.Parameter]) -> None:
        self._handed, self._params = handed, params
        self._names = [variable.path for variable in variables]
        self._number = 0
        """The number of the pass whose gradients are taken; 0 if there is none."""
        self._looked = False
        # Several devices have several threads, which would produce gradients at the same time.
        self._nested = len({param.device for param in params}) > 1
        self._reducer: weakref.ref[GradientReducer] | None = None
        self._hooks: list[Callable[[torch.Tensor], None]] = []
        self._taken: list[tuple[torch.Tensor, torch.nn.Parameter]] = []
        """Variables and placeholders that share a gradient, which is not in a bucket yet."""
        handles = [
            variable.value.register_post_accumulate_grad_hook(partial(_take, weakref.ref(self), place))
            for place, variable in enumerate(variables)
            if variable.value.requires_grad
        ]
        weakref.finalize(self, remove_all, handles)

    def begin(self, loss: torch.Tensor) -> None:
        """Follow the backward pass of a loss, unless there is no reducer yet.

        Raises:
            CollectiveError: A peer or the network failed during a step that was interrupted.
        """
        reducer = self._handed.opened()
        if reducer is None or self._nested or not loss.requires_grad:
            return
        if self._reducer is None or self._reducer() is not reducer:
            self._reducer, self._hooks = weakref.ref(reducer), reducer.hooks()
        if any(param.grad is not None for param in self._params):
            reducer.synchronize()  # a step was interrupted that other ranks may have completed
            self._handed.forget()
            self._taken.clear()
        loss.register_hook(self._begun)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Take no more gradients."""
        self._looked = self._looked or self._number > 0
        self._number = 0
        self._taken.clear()

    def _begun(self, _: torch.Tensor) -> None:
        self._number = backward_under_way()

    def take(self, place: int, variable: torch.Tensor) -> None:
        """Take the gradient of a variable if it comes from the pass that is followed."""
        reducer = None if self._reducer is None else self._reducer()
        if not self._number or reducer is None:
            return
        param = self._params[place]
        if backward_under_way() != self._number:
            self._nested = True
            if param.grad is not None:
                overrun(self._names[place], 1)
        elif self._looked and not self._nested:
            param.grad = variable.grad
            self._taken.append((variable, param))
            launched = reducer.launched
            self._hooks[place](variable)
            if reducer.launched != launched:  # gradients are in buckets: release their former memory
                pairs, self._taken = self._taken, []
                for variable, param in pairs:
                    if variable.grad is param.grad:
                        self._taken.append((variable, param))
                    else:
                        variable.grad = param.grad


def _take(followed: weakref.ref[FollowedBackward], place: int, variable: torch.Tensor) -> None:
    if (alive := followed()) is not None:
        alive.take(place, variable)
