"""MXNet's arrays and torch's tensors over one memory.

MXNet computes behind the caller's back. Asking for DLPack waits for what is under way on an array: for its writers to
read it, for its readers too to write it. What is written through a view is there before anything that is asked later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mxnet
import numpy
import torch
from torch.utils.dlpack import from_dlpack


def to_torch(array: Any) -> torch.Tensor:
    """The elements of an array, only to be read: its memory, or a copy where DLPack has no word for it."""
    tensor = _view(array, "to_dlpack_for_read")
    return torch.from_numpy(array.asnumpy()) if tensor is None else tensor


def to_mxnet(tensor: torch.Tensor, like: Any) -> Any:
    """The same memory as an array of the kind of another one; a copy where DLPack has no word for it."""
    if tensor.dtype == torch.bool:
        array = mxnet.nd.array(tensor.numpy(), dtype=bool)
    else:
        array = mxnet.nd.from_dlpack(tensor.contiguous().__dlpack__())
    return array.as_np_ndarray() if isinstance(like, mxnet.np.ndarray) else array


def change(arrays: Sequence[Any], function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]) -> None:
    """Overwrite arrays, all on a CPU, with what a function makes of them.

    The function is given tensors that it may write to; it returns them or others, as many and of the same shapes.
    """
    views = [_view(array, "to_dlpack_for_write") for array in arrays]
    given = [to_torch(array) if view is None else view for array, view in zip(arrays, views, strict=True)]
    for array, view, result in zip(arrays, views, function(given), strict=True):
        if view is None:
            overwrite(array, result)
        elif view is not result:
            view.copy_(result)


def overwrite(array: Any, tensor: torch.Tensor) -> None:
    """Give an array other elements by an operation of MXNet's, which drops what it has kept of the former ones."""
    array[:] = to_mxnet(tensor, array)


def require_arrays(arrays: Any) -> None:
    """Raise a TypeError for anything but a list of dense arrays on a CPU."""
    if not isinstance(arrays, Sequence):
        raise TypeError(f"expected a list of MXNet arrays, got {type(arrays).__name__}.")
    for array in arrays:
        if not isinstance(array, mxnet.nd.NDArray):
            raise TypeError(f"expected an MXNet array, got {type(array).__name__}; objects go by broadcast_object.")
        if array.stype != "default":
            raise TypeError(f'an array of stype "{array.stype}": collectives move dense arrays; tostype("default").')
        if array.context.device_type == "gpu":
            raise TypeError(
                f"an array on {array.context}: collectives move arrays of the CPU; as_in_context(mx.cpu())."
            )


def _view(array: Any, wanted: str) -> torch.Tensor | None:
    """Its memory; None if torch cannot read that: booleans, and what oneDNN has laid out for its convolutions."""
    if numpy.dtype(array.dtype) == bool:
        return None
    try:
        capsule = getattr(array, wanted)()
    except mxnet.base.MXNetError as error:
        if "MKLDNN" in str(error):
            return None
        raise
    return from_dlpack(capsule)
