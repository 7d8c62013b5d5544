"""Which tensors can be sent, and how rows are divided among ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def split_fault(tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> str | None:
    """Return what is wrong with a call of alltoall; None if nothing is."""
    if tensor.dim() == 0:
        return "its tensor is 0-dim and has no rows to split"
    if splits is None:
        uneven = tensor.shape[0] % size
        return "its first dimension cannot be divided by the number of ranks; pass splits" if uneven else None
    if len(splits) != size:
        return "its splits are not one number for each rank"
    if min(splits) < 0:
        return "its splits contain a negative number"
    return "its splits do not add up to the tensor's first dimension" if sum(splits) != tensor.shape[0] else None


def even_rows(rows: int, size: int) -> list[int]:
    """Divide rows among ranks; the first ``rows % size`` ranks get one more."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def require_root(root_rank: int, size: int) -> None:
    """Raise a ValueError unless `root_rank` is a rank."""
    if not 0 <= root_rank < size:
        raise ValueError(f"root_rank={root_rank} is not a rank of this world; expected 0 to {size - 1}.")


def require_rows(tensor: torch.Tensor) -> None:
    """Raise a ValueError for a 0-dim tensor, which reducescatter cannot divide."""
    if tensor.dim() == 0:
        raise ValueError("reducescatter divides rows, and a 0-dim tensor has none; pass tensor.reshape(1).")


def require_dense(tensor: torch.Tensor) -> None:
    """Raise a TypeError for tensors without plain memory to send: sparse, nested, quantized, or on other devices."""
    if tensor.is_nested:
        raise TypeError(
            "a nested tensor cannot be sent; pass tensor.to_padded_tensor(0.0), or each of tensor.unbind()."
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {tensor.layout} cannot be sent; pass tensor.to_dense().")
    if tensor.is_quantized:
        raise TypeError("a quantized tensor cannot be sent; pass tensor.dequantize(), or its int_repr().")
    if type(tensor) is not torch.Tensor and hasattr(tensor, "placements"):
        raise TypeError("a DTensor holds another part on every rank; pass its to_local() or full_tensor().")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"a tensor on device {tensor.device} cannot be sent; move it to the CPU or a CUDA device.")


def require_places(tensors: Iterable[torch.Tensor]) -> None:
    """Raise a ValueError for a tensor that cannot hold a result because several elements share one place in memory."""
    for tensor in tensors:
        if not tensor.is_contiguous() and any(
            stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}, as expand() makes it, stores "
                "several elements in one place and cannot hold the result; pass tensor.contiguous()."
            )
