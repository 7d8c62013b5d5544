"""Shares memory between MXNet's arrays and torch's tensors.

MXNet computes asynchronously. Asking for DLPack waits for pending operations on an array: for its writers before
reading, and for its readers too before writing. What is written through a view is visible to all later operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mxnet
import numpy
import torch
from torch.utils.dlpack import from_dlpack


def to_torch(array: Any) -> torch.Tensor:
    """Return the elements of an array, for reading only: its memory, or a copy if DLPack does not support it."""
    tensor = _view(array, "to_dlpack_for_read")
    return torch.from_numpy(array.asnumpy()) if tensor is None else tensor


def to_mxnet(tensor: torch.Tensor, like: Any) -> Any:
    """Return an array of the same kind as `like` with the tensor's memory; a copy if DLPack does not support it."""
    if tensor.dtype == torch.bool:
        array = mxnet.nd.array(tensor.numpy(), dtype=bool)
    else:
        array = mxnet.nd.from_dlpack(tensor.contiguous().__dlpack__())
    return array.as_np_ndarray() if isinstance(like, mxnet.np.ndarray) else array


def change(arrays: Sequence[Any], function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]) -> None:
    """Overwrite arrays, all on a CPU, with the result of a function of them.

    The function gets tensors that it may write to. It returns these or others, in the same number and shapes.
    """
    views = [_view(array, "to_dlpack_for_write") for array in arrays]
    given = [to_torch(array) if view is None else view for array, view in zip(arrays, views, strict=True)]
    for array, view, result in zip(arrays, views, function(given), strict=True):
        if view is None:
            overwrite(array, result)
        elif view is not result:
            view.copy_(result)


def overwrite(array: Any, tensor: torch.Tensor) -> None:
    """Overwrite an array by an operation of MXNet, which drops what MXNet has cached of the old elements."""
    array[:] = to_mxnet(tensor, array)


def require_arrays(arrays: Any) -> None:
    """Raise a TypeError for anything but a list of dense arrays on a CPU."""
    if not isinstance(arrays, Sequence):
        raise TypeError(f"expected a list of MXNet arrays, got {type(arrays).__name__}.")
    for array in arrays:
        if not isinstance(array, mxnet.nd.NDArray):
            raise TypeError(f"expected an MXNet array, got {type(array).__name__}; use broadcast_object for objects.")
        if array.stype != "default":
            raise TypeError(f'an array of stype "{array.stype}": collectives need dense ones; call tostype("default").')
        if array.context.device_type == "gpu":
            raise TypeError(
                f"an array on {array.context}: collectives need arrays on the CPU; call as_in_context(mx.cpu())."
            )


def _view(array: Any, wanted: str) -> torch.Tensor | None:
    """Return the array's memory; None if torch cannot read it: booleans, and oneDNN's layouts for convolutions."""
    if numpy.dtype(array.dtype) == bool:
        return None
    try:
        capsule = getattr(array, wanted)()
    except mxnet.base.MXNetError as error:
        if "MKLDNN" in str(error):
            return None
        raise
    return from_dlpack(capsule)
