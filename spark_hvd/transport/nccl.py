"""Aborts the NCCL part of process groups, which ends kernels that wait for a lost rank.

NCCL notices neither a peer on the same host that has died nor one on another host that has stopped. Its kernels wait on
the device, the host waits for the device, and no exception can reach either. Once aborted, the kernels end at once and
leave whatever is in their buffers; the next collective on the group raises. Gloo's part of a group is not affected.
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
    """The part of torch's ProcessGroupNCCL that we use."""

    def abort(self) -> None:
        """End all communicators and their kernels."""


def carries(group: dist.ProcessGroup) -> bool:
    """Return whether NCCL carries a group's CUDA tensors, and not Gloo or MPI."""
    return "cuda:nccl" in str(dist.get_backend_config(group))


def nccl_backend(group: dist.ProcessGroup) -> NcclBackend | None:
    """Return the NCCL backend for a group's CUDA tensors; None if there is none."""
    return cuda_backend(group) if carries(group) else None


class NcclGroups:
    """The process groups of one process set.

    ``groups`` returns the present ones; None stands for one that has been destroyed. ``backend_of`` returns a group's
    NCCL part.
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
        """NCCL parts of the groups, that of the oldest group first."""
        parts = (self._backend_of(group) for group in self._groups() if group is not None)
        return [part for part in parts if part is not None]

    def abort(self) -> None:
        """Abort all, and return when NCCL has done so."""
        abort(self.backends)

    def abort_soon(self) -> None:
        """Abort all without waiting: that may take as long as a hung driver does."""
        backends = self.backends
        if not backends:
            return
        try:
            # A daemon, so that the process can end without it.
            threading.Thread(target=abort, args=[backends], name="spark_hvd-nccl-abort", daemon=True).start()
        except RuntimeError:  # while the interpreter ends, Python 3.12 starts no thread
            abort(backends)


def abort(backends: Sequence[NcclBackend]) -> None:
    """Abort backends, the newest first. Errors are logged, as they must not hide the reason for the abort."""
    if not backends:
        return
    try:
        # Together: otherwise the abort of one communicator waits for another's kernels, which wait too.
        with nccl_calls_together(backends[0]):
            for backend in reversed(backends):
                backend.abort()
    except RuntimeError as error:
        _log.warning("NCCL could not be aborted: %s", error)
