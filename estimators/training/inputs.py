"""Which tensors a model takes and is compared with: columns, in the dtype and shape that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from spark_hvd.data.readers.dataset import Column


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input of a model, or one label.

    Attributes:
        column: Where it comes from.
        dtype: Name of the torch dtype it is given in; None for the column's own.
        shape: Shape of a whole batch with one -1, such as (-1, 1, 28, 28); None for (rows, *column.shape).
    """

    column: Column
    dtype: str | None = None
    shape: tuple[int, ...] | None = None

    def of(self, tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
        """The column's ``tensor`` (rows, *shape) as the model gets it, on ``device``.

        Raises:
            ValueError: its elements do not fill ``shape``, or do not give as many rows.
        """
        rows = len(tensor)
        if self.shape is not None:
            try:
                tensor = tensor.reshape(self.shape)
            except RuntimeError:
                tensor = tensor[:0]
            if len(tensor) != rows:
                raise ValueError(
                    f"column {self.column.name!r}: a row has the shape {self.column.shape}, which does not fit into "
                    f"the shape {list(self.shape)} that was asked for (its first number stands for the rows)"
                )
        return tensor.to(device, getattr(torch, self.dtype) if self.dtype else None, non_blocking=True)


def tensors_of(
    specs: Sequence[TensorSpec], batch: Mapping[str, torch.Tensor], device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """The tensors of a batch that ``specs`` ask for, in their order."""
    return [spec.of(batch[spec.column.name], device) for spec in specs]


def outputs_of(result: object) -> list[torch.Tensor]:
    """What a model returned, as a list of tensors: one, a sequence, or the values of a dict.

    Raises:
        TypeError: it is something else.
    """
    found = result.values() if isinstance(result, Mapping) else result
    found = [found] if isinstance(found, torch.Tensor) else found
    if isinstance(found, str) or not hasattr(found, "__iter__"):
        raise TypeError(
            f"the model returned {type(result).__name__}: expected a tensor, or a list, tuple or dict of them"
        )
    outputs = list(found)
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"the model returned a {type(output).__name__} among its outputs: expected tensors")
    return outputs
