"""Who am I: the questions about ranks and hosts, in Horovod's words."""

from __future__ import annotations

import torch
import torch.distributed as dist

from spark_hvd.context import current


def rank() -> int:
    """My rank, 0 to size() - 1. All functions here raise NotInitializedError before init()."""
    return current().world.me.rank


def size() -> int:
    """Number of ranks."""
    return current().world.me.size


def local_rank() -> int:
    """My position among the ranks of my host; commonly the number of my GPU."""
    return current().world.me.local_rank


def local_size() -> int:
    """Number of ranks on my host."""
    return current().world.me.local_size


def cross_rank() -> int:
    """The position of my host among the hosts that have a rank with my local rank."""
    return current().world.me.cross_rank


def cross_size() -> int:
    """Number of hosts that have a rank with my local rank."""
    return current().world.me.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return current().layout.is_homogeneous


def mpi_threads_supported() -> bool:
    """Whether several threads of a rank may call MPI.

    Raises:
        ValueError: The world was not made by MPI.
    """
    raise ValueError("this world was not made by MPI, so there is nothing to say of its threads.")


def mpi_enabled() -> bool:
    """Whether the world was made by MPI."""
    return False


def mpi_built() -> bool:
    """Whether MPI can be used."""
    return False


def gloo_enabled() -> bool:
    """Whether tensors on the CPU travel over Gloo."""
    return gloo_built()


def gloo_built() -> bool:
    """Whether this torch comes with Gloo."""
    return dist.is_available() and dist.is_gloo_available()


def nccl_built() -> int:
    """The version of NCCL that this torch comes with, as Horovod writes it (2.21.5 is 22105); 0 without NCCL."""
    if not (dist.is_available() and dist.is_nccl_available() and cuda_built()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10_000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Whether this torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this torch was built for ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """False: IBM's DDL is not supported."""
    return False


def ccl_built() -> bool:
    """False: Intel's oneCCL is not supported."""
    return False
