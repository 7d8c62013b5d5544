"""The private torch names that we need, in one place to look at when torch moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is under way has produced its last gradient.

    To be called from a hook of that backward. An exception in `callback` is raised by `backward()`. This is how DDP and
    FSDP2 end their backward, and there is no public way.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target in one call, which spares Python a microsecond or two a tensor."""
    torch._foreach_copy_(targets, sources)


def gloo_group(ranks: Sequence[int], threads: int, timeout: timedelta, part: bool) -> dist.ProcessGroup:
    """A Gloo process group with a number of threads, which torch has no public name for.

    Args:
        ranks: Its ranks.
        threads: Collectives that run at the same time.
        timeout: Of its collectives.
        part: Whether some ranks of the world are not in it, and do not call this.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._threads = threads
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout, "gloo", pg_options=options, use_local_synchronization=part
    )
    return group
