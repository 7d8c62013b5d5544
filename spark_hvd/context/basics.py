"""Rank, size, hosts and available backends, under Horovod's names."""

from __future__ import annotations

import importlib.util

import torch
import torch.distributed as dist

from spark_hvd.context import global_state
from spark_hvd.context.global_state import current, in_world, rank_info
from spark_hvd.transport.distributed import MPI_BACKEND

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "generation",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "size",
]


def rank() -> int:
    """Return this process's rank, 0 to size() - 1. All functions here raise NotInitializedError before init()."""
    return rank_info().rank


def size() -> int:
    """Return the number of ranks."""
    return rank_info().size


def local_rank() -> int:
    """Return this rank's position among the ranks of its host; commonly the number of its GPU."""
    return rank_info().local_rank


def local_size() -> int:
    """Return the number of ranks on this rank's host."""
    return rank_info().local_size


def cross_rank() -> int:
    """Return the position of this rank's host among the hosts that have a rank with the same local rank."""
    return rank_info().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with the same local rank as this one."""
    return rank_info().cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks."""
    if not in_world():
        return rank_info().local_size * rank_info().cross_size == rank_info().size
    return current().layout.is_homogeneous


def generation() -> int:
    """Return how often the membership of an elastic job has changed, or how often a job was restarted.

    It starts at 0, and is the same on all ranks of a world.
    """
    return global_state.generation()


def mpi_threads_supported() -> bool:
    """Return whether several threads of a rank may call MPI at the same time. If not, ours take turns.

    Raises:
        NotInitializedError: Before init().
        ValueError: The world was not made by MPI.
    """
    current()
    if not mpi_enabled():
        raise ValueError("this world was not made by MPI, so it has no MPI threads.")
    from spark_hvd.transport.mpi.library import THREADS

    return THREADS


def mpi_enabled() -> bool:
    """Return whether this process is in a world that was made by MPI."""
    return in_world() and dist.is_initialized() and dist.get_backend() == MPI_BACKEND


def mpi_built() -> bool:
    """Return whether mpi4py is installed. It contains no MPI library; the extra `mpi` installs one."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Return whether CPU tensors are sent over Gloo; before init(), whether they could be."""
    return gloo_built() and not mpi_enabled()


def gloo_built() -> bool:
    """Return whether this torch comes with Gloo."""
    return dist.is_available() and dist.is_gloo_available()


def nccl_built() -> int:
    """Return the version of NCCL in this torch, as Horovod writes it (2.21.5 is 22105); 0 without NCCL."""
    if not (dist.is_available() and dist.is_nccl_available() and cuda_built()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10_000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Return whether this torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether this torch was built for ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Return False: IBM's DDL is not supported."""
    return False


def ccl_built() -> bool:
    """Return False: Intel's oneCCL is not supported."""
    return False
