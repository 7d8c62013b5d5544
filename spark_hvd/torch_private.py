"""The private torch names that we need, in one place to look at when torch moves."""

from __future__ import annotations

from collections.abc import Callable

import torch


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is under way has produced its last gradient.

    To be called from a hook of that backward. An exception in `callback` is raised by `backward()`. This is how DDP and
    FSDP2 end their backward, and there is no public way.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target in one call, which spares Python a microsecond or two a tensor."""
    torch._foreach_copy_(targets, sources)
