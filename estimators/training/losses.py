"""The losses of a fit, given or made by constructors, as driver and ranks know them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from spark_hvd.estimators.training.spec import Objects


def losses_of(objects: Objects, device: torch.device | str = "cpu") -> list[Any]:
    """The losses; those that constructors make get the model and the device they ask for."""
    made = [calling(make)(model=objects.model, device=torch.device(device)) for make in objects.loss_constructors]
    return made or list(objects.loss)


def calling(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, given only those keyword arguments that it has names for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function
    return lambda **kwargs: function(**{name: value for name, value in kwargs.items() if name in parameters})
