"""Gradients that may not be changed until they are reduced."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spark_hvd.torch.optimizer.buckets import ParamSpec
from spark_hvd.transport.torch_private import changes


class Marks:
    """What gradients were when backward ended: object, memory and number of changes of each."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, torch.Tensor, torch.Tensor, int]] = []

    def set(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Mark what is there now."""
        graded = [(index, param.grad) for index, param in enumerate(params) if param.grad is not None]
        self._marks = [(index, grad, grad.detach(), changes(grad)) for index, grad in graded]

    def clear(self) -> None:
        """Forget them."""
        self._marks.clear()

    def check(self, params: Sequence[torch.nn.Parameter], specs: Sequence[ParamSpec]) -> None:
        """Go on only if nothing has changed.

        Raises:
            ValueError: A gradient has.
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
        """Whether gradients were zeroed, or dropped, before that of parameter `index` was added to."""
        others = [params[each].grad for each, *_ in self._marks if each != index]
        return bool(others) and not any(grad is not None and bool(grad.to_dense().any()) for grad in others)
