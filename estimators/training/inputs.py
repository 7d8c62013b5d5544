"""The tensors that a model takes and is compared with, in the requested dtypes and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from spark_hvd.data.readers.batches import STACK
from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.measure import no_weights
from spark_hvd.data.readers.tensors import check_stack, converted
from spark_hvd.transport.host.pages import moved


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input of a model, or one label.

    Attributes:
        column: Its column.
        dtype: Name of its torch dtype; None for the column's own.
        shape: Shape of a batch with one -1, such as (-1, 1, 28, 28); None for (rows, *column.shape).
        stacked: Whether the model gets all inputs side by side as one argument; the same for each of them.
    """

    column: Column
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    stacked: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert the column's ``tensor`` (rows, *shape), or array of str, to the form that the model gets, on the CPU.

        Raises:
            DataError: ``dtype`` is an integer type that cannot represent a value, or the column is text.
            ValueError: Its elements do not fill ``shape``, or the number of rows would change.
        """
        if self.shape is not None:
            rows = len(tensor)
            try:
                tensor = tensor.reshape(self.shape)
            except (RuntimeError, ValueError):
                tensor = tensor[:0]
            if len(tensor) != rows:
                raise ValueError(
                    f"column {self.column.name!r}: a row has the shape {self.column.shape}, which does not fit into "
                    f"the requested shape {list(self.shape)} (its first number stands for the rows)"
                )
        if self.dtype is None:
            return tensor
        if not isinstance(tensor, torch.Tensor):
            raise DataError(
                f"column {self.column.name!r} is text, but input_dtypes says {self.dtype}: pass None for it, "
                "or choose a column of numbers"
            )
        return converted(tensor, self.dtype, self.column.name)


def tensors_of(
    specs: Sequence[TensorSpec], batch: Mapping[str, torch.Tensor], device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Return the tensors of a batch for ``specs``, in their order; a single one if they are stacked."""
    if specs and specs[0].stacked and specs[0].column.name not in batch:
        return [moved(specs[0].of(batch[STACK]), device)]
    return stacked(specs, [spec.of(batch[spec.column.name]) for spec in specs], device)


def stacked(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor], device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Join all tensors into one (rows, numbers) if ``specs`` say so, in a dtype that holds them; else return them.

    ``tensors`` are on the CPU; the result is on ``device``.

    Raises:
        DataError: No dtype holds all of them, because integers are too large for the dtype of the others, or because
            one is text.
    """
    if specs and specs[0].stacked:
        for spec, each in zip(specs, tensors, strict=True):
            if not isinstance(each, torch.Tensor):
                raise DataError(
                    f"column {spec.column.name!r} is text, which stack_features=True cannot stack with numbers: omit "
                    "stack_features, so that each column is an input"
                )
        if all(each.dim() == 1 for each in tensors):
            stack = torch.stack([*tensors], 1)
        else:
            stack = torch.cat([each.flatten(1) if each.dim() > 1 else each.unsqueeze(1) for each in tensors], 1)
        dtype = stack.dtype
        for spec, each in zip(specs, tensors, strict=True):
            if each.dtype != dtype:
                check_stack(each, dtype, spec.column.name)
        tensors = [stack]
    return [moved(tensor, device) if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors]


def weights_of(name: str | None, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the weights of a batch's rows, from the column ``name``; None if no column is named.

    Raises:
        DataError: One is negative, NaN or infinite.
    """
    if name is None:
        return None
    weights = batch[name]
    odd = weights[~(weights.isfinite() & (weights >= 0))]
    if len(odd):
        raise DataError(no_weights(name, len(odd), odd[0].item(), f"{len(weights)} rows of a batch"))
    return weights


def argument_names(specs: Sequence[TensorSpec]) -> list[str]:
    """Return the names of the tensors of :func:`tensors_of`, for messages and Lightning's batches."""
    return [STACK] if specs and specs[0].stacked else [spec.column.name for spec in specs]


def outputs_of(result: object) -> list[torch.Tensor]:
    """Return the result of a model as a list of tensors; it may be a tensor, a sequence, or a dict.

    Raises:
        TypeError: It is something else.
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
