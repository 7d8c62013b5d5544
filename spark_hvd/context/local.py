"""Rank-local parameters, which intentionally differ between ranks, so that they are not reduced or broadcast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_marks: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mark_local(param: torch.Tensor, *, averaged: bool = False) -> None:
    """Mark a parameter as rank-local.

    With ``averaged``, its gradient is already the mean over all ranks, as for a table that is divided among them.
    """
    _marks[param] = averaged


def is_local(param: torch.Tensor) -> bool:
    """Return whether a parameter is rank-local."""
    return param in _marks


def is_averaged(param: torch.Tensor) -> bool:
    """Return whether the gradient of a rank-local parameter is already the mean over the ranks."""
    return param in _marks and bool(_marks[param])


def require_no_tables(of: Any, what: str) -> None:
    """Raise a ValueError if a model, an optimizer or a state holds parts of tables, which differ between ranks."""
    tables = {_address(param) for param in list(_marks) if _marks[param]} - {0}
    for name, tensor in _named(of) if tables else ():
        if _address(tensor) in tables:
            raise ValueError(
                f"{what} would take this rank's rows of {name!r} for a whole ShardedEmbedding: save "
                "hvd.whole_state_dict(model) and that of its optimizer, and load them with any number of ranks"
            )


def _named(of: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(of, torch.nn.Module):
        yield from of.named_parameters()
    elif isinstance(of, torch.optim.Optimizer):
        yield from _named([group["params"] for group in of.param_groups])
    elif isinstance(of, torch.Tensor):
        yield name, of
    elif isinstance(of, Mapping | list | tuple):
        items = of.items() if isinstance(of, Mapping) else enumerate(of)
        for key, value in items:
            yield from _named(value, f"{name}.{key}" if name else str(key))


def shares_local(tensors: list[torch.Tensor]) -> list[bool]:
    """Return whether each tensor is a rank-local parameter or shares its memory, like the tensors of a state dict."""
    memory = {_address(each) for each in list(_marks)} - {0}
    return [each in _marks or (bool(memory) and _address(each) in memory) for each in tensors]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
