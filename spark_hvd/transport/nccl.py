"""Aborts the NCCL part of process groups, so that kernels which wait for a rank that has gone come to an end.

NCCL notices neither a peer on the same host that has died nor one on another host that has stopped: its kernels wait
on the device, the host waits for the device, and no exception can reach either. Once aborted, the kernels end at once,
with whatever is in their buffers; the next collective on the group raises. Gloo's part of a group stays as it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch.distributed as dist

from spark_hvd.transport.torch_private import cuda_backend, nccl_calls_together

_log = logging.getLogger("spark_hvd")


class NcclBackend(Protocol):
    """What we use of torch's ProcessGroupNCCL."""

    def abort(self) -> None:
        """End all communicators and their kernels."""


def carries(group: dist.ProcessGroup) -> bool:
    """Whether NCCL carries a group's CUDA tensors: else Gloo may, or MPI."""
    return "cuda:nccl" in str(dist.get_backend_config(group))


def nccl_backend(group: dist.ProcessGroup) -> NcclBackend | None:
    """What carries a group's CUDA tensors by NCCL; None if nothing does."""
    return cuda_backend(group) if carries(group) else None


class NcclGroups:
    """The process groups of one process set.

    ``groups`` gives those there are now; None: one that has been destroyed. ``backend_of`` gives a group's NCCL part.
    """

    def __init__(
        self,
        groups: Callable[[], Iterable[dist.ProcessGroup | None]],
        backend_of: Callable[[dist.ProcessGroup], NcclBackend | None] = nccl_backend,
    ) -> None:
        self._groups = groups
        self._backend_of = backend_of

    @property
    def backends(self) -> list[NcclBackend]:
        """Their NCCL parts, if they have any; that of the oldest group first."""
        parts = (self._backend_of(group) for group in self._groups() if group is not None)
        return [part for part in parts if part is not None]

    def abort(self) -> None:
        """Abort all; returns when NCCL has."""
        abort(self.backends)

    def abort_soon(self) -> None:
        """Abort all without waiting for it: it may take as long as a hung driver does."""
        backends = self.backends
        if not backends:
            return
        try:
            # A daemon: the process can end without it.
            threading.Thread(target=abort, args=[backends], name="spark_hvd-nccl-abort", daemon=True).start()
        except RuntimeError:  # the interpreter is ending, and Python 3.12 starts no thread then
            abort(backends)


def abort(backends: Sequence[NcclBackend]) -> None:
    """Abort backends, the newest first; an error is logged, for it must not hide why they are aborted."""
    if not backends:
        return
    try:
        # Together, or the abort of one communicator waits for kernels of another that wait too.
        with nccl_calls_together(backends[0]):
            for backend in reversed(backends):
                backend.abort()
    except RuntimeError as error:
        _log.warning("NCCL could not be aborted: %s", error)
