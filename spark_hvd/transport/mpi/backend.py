"""A backend of torch.distributed called mpi4py; MPI is not loaded before a group is made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from spark_hvd.transport.distributed import MPI_BACKEND

if TYPE_CHECKING:
    from spark_hvd.transport.mpi.endpoint import MpiEndpoint
    from spark_hvd.transport.mpi.group import MpiProcessGroup
    from spark_hvd.transport.mpi.library import MPI

_parent: MPI.Intracomm | None = None


def register() -> None:
    """Register the backend with torch.distributed; repeated calls change nothing."""
    dist.Backend.register_backend(MPI_BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def carrier(on_gpu: bool) -> str:
    """Return the name of what carries the world's tensors: "mpi", "nccl" or "gloo"."""
    if dist.is_initialized() and dist.get_backend() == MPI_BACKEND:
        return "mpi"
    return "nccl" if on_gpu else "gloo"


def use(parent: MPI.Intracomm | None, rank: int, size: int) -> None:
    """Make process groups from the ranks of a communicator from now on. Starts MPI.

    Args:
        parent: The communicator whose ranks form the default process group; None for MPI_COMM_WORLD.
        rank: This process's rank.
        size: World size.

    Raises:
        ImportError: There is no mpi4py, or no MPI library.
        RuntimeError: MPI numbers the ranks differently.
    """
    global _parent
    from spark_hvd.transport.mpi.library import MPI

    _require_same(MPI.COMM_WORLD if parent is None else parent, rank, size)
    _parent = parent


def release() -> None:
    """Go back to making process groups from the ranks of MPI_COMM_WORLD."""
    global _parent
    _parent = None


def endpoint_of(group: Any) -> MpiEndpoint:
    """Return the endpoint of a process group of this backend."""
    from spark_hvd.transport.mpi.group import MpiProcessGroup

    assert isinstance(group, MpiProcessGroup)
    return group.endpoint


def on_loss(prefix: str) -> Callable[[int, str], None]:
    """Return a function that takes a lost rank and what is known about it; see :func:`.endpoint.lose`."""
    from spark_hvd.transport.mpi.endpoint import lose

    return functools.partial(lose, prefix=prefix)


def _create(options: Any, backend_options: Any) -> MpiProcessGroup:
    from spark_hvd.transport.mpi.endpoint import MpiEndpoint
    from spark_hvd.transport.mpi.group import MpiProcessGroup
    from spark_hvd.transport.mpi.library import MPI

    parent = MPI.COMM_WORLD if _parent is None else _parent
    name = options.group_id
    ranks = list(options.global_ranks_in_group) or None
    if ranks is None:
        _require_same(parent, options.group_rank, options.group_size)
    return MpiProcessGroup(name, MpiEndpoint.over(parent, ranks, name, options.timeout.total_seconds()))


def _require_same(parent: MPI.Intracomm, rank: int, size: int) -> None:
    if (rank, size) == (parent.rank, parent.size):
        return
    said = f"this process is rank {rank} of {size} for its launcher, but rank {parent.rank} of {parent.size} for MPI. "
    if parent.size == 1:  # the library knows nothing of whoever started this process
        from spark_hvd.transport.mpi.library import MPI

        name, version = MPI.get_vendor()
        raise RuntimeError(
            f"{said}mpi4py has loaded {name} {'.'.join(map(str, version))}. If the tools of another MPI have started "
            "the process, use one of them: pip install mpi4py mpich, network=Network(mpi='openmpi') for Open MPI 4, "
            "or that library's own mpiexec."
        )
    raise RuntimeError(f"{said}Both must use the same numbers: let one mpiexec start all ranks, one process each.")
