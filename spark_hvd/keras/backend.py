"""Keras' backend, and Keras variables as torch tensors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import torch

from spark_hvd.torch.sync import broadcast_parameters

BACKENDS = ("torch", "tensorflow")


def require_backend() -> str:
    """Return the name of Keras' backend, if it is supported.

    Raises:
        ImportError: Keras cannot be imported, or its backend is not supported.
    """
    if "keras" not in sys.modules and "KERAS_BACKEND" in os.environ:
        _require_supported(os.environ["KERAS_BACKEND"])  # it may not be installed
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
            f"KERAS_BACKEND={name}: spark_hvd.keras supports {' and '.join(BACKENDS)}. Set KERAS_BACKEND="
            f"{BACKENDS[0]} before keras is imported."
        )
    return name


def name_of(place: int, variable: Any) -> str:
    """Return the name that ranks use for a variable among themselves.

    A variable's path, and the first part of an optimizer variable's name, depend on how many layers a process has made.
    """
    return f"{place}.{variable.name.rpartition('_')[2]}"


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> None:
    """Overwrite variables with those of one rank, in place.

    Args:
        variables: Keras variables, in the same order on every rank: ``model.weights``, ``model.optimizer.variables``.
        root_rank: The rank whose values all ranks get.

    Raises:
        NotInitializedError: Before init().
        ValueError: `root_rank` is not a rank.
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
    """Return a variable's memory on the torch backend, or a copy on others, to be passed to :func:`assign`."""
    if isinstance(variable.value, torch.Tensor):
        return variable.value.detach()
    from spark_hvd.tensorflow.tensors import to_torch

    return to_torch(variable.value.read_value()).clone()


def assign(variable: Any, tensor: torch.Tensor) -> None:
    """Assign the values of a tensor to a variable; do nothing if the tensor is the variable's own memory."""
    if not isinstance(variable.value, torch.Tensor):
        from spark_hvd.tensorflow.tensors import to_tensorflow

        variable.assign(to_tensorflow(tensor.clone()))
    elif tensor.data_ptr() != variable.value.data_ptr():
        variable.value.detach().copy_(tensor)
