"""Memory that MPI can access: the host's, and that of GPUs only if the library is CUDA-aware.

Other tensors are sent through copies in pinned host memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from spark_hvd.transport.mpi.library import MPI
from spark_hvd.world.env import read_mpi_cuda


@functools.cache
def takes_cuda() -> bool:
    """Return whether MPI accepts addresses of CUDA memory.

    The environment variable SPARK_HVD_MPI_CUDA decides. Without it, MPI itself is asked, by the functions of MPI 4.1,
    MPICH and Open MPI.
    """
    told = read_mpi_cuda()
    if told is not None:
        return told
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    if any(kind.split(":")[0] == "cuda" for kind in kinds.split(",")):
        return True
    try:
        return bool(ctypes.CDLL(None).MPIX_Query_cuda_support())
    except AttributeError:  # the library has no such function, or its symbols are not global
        return False


def reaches(tensor: torch.Tensor) -> bool:
    """Return whether MPI can access the tensor's memory."""
    return not tensor.is_cuda or takes_cuda()


def within_reach(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a copy on the host, once pending writes to it have finished."""
    if reaches(tensor):
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        return tensor
    copy = room(tensor, tensor.shape)
    return copy.copy_(tensor)  # waits for the GPU


def room(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return an uninitialised tensor that MPI can access, with the dtype and device of `like` if possible."""
    if reaches(like):
        return like.new_empty(shape)
    return torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda, device="cpu")
