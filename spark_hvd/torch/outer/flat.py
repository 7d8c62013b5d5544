"""Many tensors as few flat ones, which is how they travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class FlatTensors:
    """Tensors, and how they lie in flat ones: one for each device and precision, float32 or float64.

    Args:
        tensors: Floating-point ones. They are looked at each time, not kept in the flat ones.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        kinds = [(tensor.device, _wide(tensor.dtype)) for tensor in self.tensors]
        self._kinds = list(dict.fromkeys(kinds))
        self._sizes = [0] * len(self._kinds)
        self._places: list[tuple[int, int]] = []
        for tensor, kind in zip(self.tensors, kinds, strict=True):
            number = self._kinds.index(kind)
            self._places.append((number, self._sizes[number]))
            self._sizes[number] += tensor.numel()

    def read(self) -> list[torch.Tensor]:
        """New flat tensors with the values that the tensors have now."""
        flats = [
            torch.empty(size, dtype=dtype, device=device)
            for size, (device, dtype) in zip(self._sizes, self._kinds, strict=True)
        ]
        for view, tensor in zip(self.views(flats), self.tensors, strict=True):
            view.copy_(tensor.detach())
        return flats

    def write(self, flats: Sequence[torch.Tensor]) -> None:
        """Give the tensors the values of flat ones."""
        for view, tensor in zip(self.views(flats), self.tensors, strict=True):
            tensor.detach().copy_(view)

    def views(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of flat tensors, in the order and the shapes of the tensors."""
        return [
            flats[number][start : start + tensor.numel()].view(tensor.shape)
            for tensor, (number, start) in zip(self.tensors, self._places, strict=True)
        ]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
