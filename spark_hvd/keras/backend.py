"""What Keras computes with, and its variables as torch tensors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import torch

from spark_hvd.torch.sync import broadcast_parameters

BACKENDS = ("torch", "tensorflow")


def require_backend() -> str:
    """The name of Keras' backend, one of those that work here.

    Raises:
        ImportError: Keras cannot be imported, or computes with something else.
    """
    if "keras" not in sys.modules and "KERAS_BACKEND" in os.environ:
        _require_supported(os.environ["KERAS_BACKEND"])  # which may not be installed
    try:
        import keras
    except ImportError as error:
        if "KERAS_BACKEND" in os.environ or error.name == "keras":
            raise
        raise ImportError(
            f"keras cannot be imported with its default backend ({error}). Set KERAS_BACKEND=torch before keras is "
            "imported.",
            name=error.name,
        ) from error
    return _require_supported(keras.config.backend())


def _require_supported(name: str) -> str:
    if name not in BACKENDS:
        raise ImportError(
            f"KERAS_BACKEND={name}: spark_hvd.keras works with {' and '.join(BACKENDS)}. Set KERAS_BACKEND="
            f"{BACKENDS[0]} before keras is imported."
        )
    return name


def name_of(place: int, variable: Any) -> str:
    """What ranks call a variable among themselves.

    Paths, and the names of an optimizer's variables before their last word, count the layers that a process has made.
    """
    return f"{place}.{variable.name.rpartition('_')[2]}"


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> None:
    """Overwrite variables with those of one rank, in place.

    Args:
        variables: Keras variables, in the same order on every rank: ``model.weights``, ``model.optimizer.variables``.
        root_rank: Whose values everyone gets.

    Raises:
        NotInitializedError: Before init().
        ValueError: `root_rank` is no rank.
        MismatchError: A variable's name, dtype or shape differs between ranks. Raised on every rank; nothing has
            changed.
        CollectiveError: A peer or the network failed.
    """
    variables = list(variables)
    named = [(name_of(place, variable), tensor_of(variable)) for place, variable in enumerate(variables)]
    broadcast_parameters(named, root_rank)
    for variable, (_, tensor) in zip(variables, named, strict=True):
        assign(variable, tensor)


def tensor_of(variable: Any) -> torch.Tensor:
    """A variable's own memory on the torch backend; elsewhere a copy, to be given to :func:`assign`."""
    if isinstance(variable.value, torch.Tensor):
        return variable.value.detach()
    from spark_hvd.tensorflow.tensors import to_torch

    return to_torch(variable.value.read_value()).clone()


def assign(variable: Any, tensor: torch.Tensor) -> None:
    """Give a variable the values of a tensor; nothing to do where it is the variable's own memory."""
    if not isinstance(variable.value, torch.Tensor):
        from spark_hvd.tensorflow.tensors import to_tensorflow

        variable.assign(to_tensorflow(tensor.clone()))
    elif tensor.data_ptr() != variable.value.data_ptr():
        variable.value.detach().copy_(tensor)
