"""Huge pages for large results: the kernel hands out fresh memory page by page, which costs more than to reduce it.

The C library takes memory of 32 MiB and more from the kernel at each allocation, and gives it back when it is freed.
Pages of 4 KiB then take longer than the whole all-reduce: 50 ms for 64 MiB on a virtual machine, where pages of 2 MiB
take a third of that.
"""

from __future__ import annotations

import ctypes
import functools
import mmap

import torch

_LEAST = 32 << 20
"""Bytes from which memory is always fresh."""


def prefer_huge(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for huge pages under a tensor that nothing has written to yet; where there are none, nothing changes.

    Returns:
        The tensor.
    """
    if tensor.device.type == "cpu" and tensor.nbytes >= _LEAST and (advise := _madvise()) is not None:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        advise(start, tensor.data_ptr() + tensor.nbytes - start, mmap.MADV_HUGEPAGE)
    return tensor


@functools.cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
