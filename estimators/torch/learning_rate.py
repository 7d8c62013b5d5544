"""Makes optimizers and learning rate schedulers in the rank, and scales rates with the number of ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from spark_hvd.store.errors import CheckpointError
from spark_hvd.torch.sync import load_optimizer_state

Scheduler = LRScheduler | ReduceLROnPlateau
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr")
"""Keys of parameter groups under which torch's schedulers keep rates."""
_PLAIN = (bool, int, float, str, type(None))
_OWN_RATES = ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "eta_min")
"""Attributes of schedulers with a rate, or one for each group."""


def make_optimizer(given: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of ``model``: ``given`` itself, or its result.

    Args:
        given: An optimizer of the model's parameters, or a function of ``model.parameters()``, or of the model itself
            if its first parameter is called ``model``.
        model: The model.

    Raises:
        ValueError: The result is not an optimizer, or is one for other parameters.
    """
    optimizer = given
    if not isinstance(given, torch.optim.Optimizer):
        try:
            first = next(iter(inspect.signature(given).parameters), "")
        except (TypeError, ValueError):
            first = ""
        optimizer = given(model if first == "model" else model.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer={given!r} returned {type(optimizer).__name__}: expected a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("optimizer: LBFGS evaluates the loss several times per step, which batches do not allow")
    own = {id(param) for param in model.parameters()}
    foreign = sum(id(param) not in own for group in optimizer.param_groups for param in group["params"])
    if foreign:
        raise ValueError(
            f"optimizer: {foreign} of its parameters are not parameters of model. Make it from model.parameters(), or "
            "pass a function: optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    return optimizer


def optimizer_facts(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return names and defaults of optimizers, as MLflow logs Lightning's; several are numbered."""
    found: dict[str, Any] = {}
    for number, each in enumerate(optimizers):
        prefix = f"{number}_" if len(optimizers) > 1 else ""
        known = {"optimizer_name": type(each).__name__, **each.defaults}
        found |= {f"{prefix}{name}": value for name, value in known.items()}
    return found


def described(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    options: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return what a checkpoint records about optimizers and schedulers; ``options`` are those before training."""
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    return {
        "optimizer": ", ".join(type(each).__name__ for each in optimizers) or None,
        "lr_scheduler": ", ".join(type(each).__name__ for each in schedulers) or None,
        "parameters of the optimizer": [
            [names.get(id(each), "of another module") for each in group] for group in groups
        ],
        "options": options,
    }


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group of parameters that a checkpoint can hold, as Python's own values."""
    groups = [{name: _plain(each) for name, each in group.items()} for group in optimizer.param_groups]
    return [{name: each for name, each in group.items() if _is_plain(each)} for group in groups]


def _plain(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_plain, value))
    is_one = isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return value.item() if is_one else value


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in _PLAIN


def check_described(
    saved: Mapping[str, Any] | None, here: dict[str, Any], run_id: str, warns: bool = True
) -> dict[str, Any]:
    """Check that a checkpoint's state belongs to this optimizer and scheduler.

    Args:
        saved: The result of :func:`described` when it was written; None if an earlier version wrote it, or if there is
            no checkpoint.
        here: The present result.
        run_id: The run's name, for messages.
        warns: Whether to warn of options that the checkpoint overrides.

    Returns:
        What the next checkpoint records: ``here``, with the options that are in force.

    Raises:
        CheckpointError: It belongs to another optimizer or scheduler, or to other parameters.
    """
    if saved is None:
        return here
    for what in ("optimizer", "lr_scheduler", "parameters of the optimizer"):
        if saved[what] != here[what]:
            raise CheckpointError(
                f"run_id={run_id!r} resumes from the state of another {what}: {_short(saved[what])} then, "
                f"{_short(here[what])} now. Pass what the run was started with, or another run_id"
            )
    for before, now in zip(saved["options"], here["options"] if warns else saved["options"], strict=True):
        for name in sorted(before.keys() & now.keys()):
            if before[name] != now[name]:
                warnings.warn(
                    f"run_id={run_id!r} keeps the options of its checkpoint, which began with {name}={before[name]!r}: "
                    f"{name}={now[name]!r} of the present optimizer has no effect. "
                    "Pass another run_id to train with it",
                    stacklevel=2,
                )
    return {**here, "options": saved["options"]}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def make_scheduler(given: Any, optimizer: torch.optim.Optimizer, factor: float, steps: int) -> Scheduler | None:
    """Return the scheduler of ``optimizer``, with rates multiplied by ``factor``.

    A function is called with the optimizer after its rates are scaled, and with the total number of ``steps`` if it has
    a parameter ``total_steps`` without a default. If a scheduler is given, its own rates are scaled.

    Raises:
        ValueError: The result is not a scheduler, or belongs to another optimizer.
    """
    if given is None or isinstance(given, LRScheduler | ReduceLROnPlateau):
        scale(optimizer, given, factor)
        scheduler = given
    else:
        scale(optimizer, None, factor)
        asks = inspect.signature(given).parameters.get("total_steps")
        known = {"total_steps": steps} if asks is not None and asks.default is asks.empty else {}
        scheduler = given(optimizer, **known)
    if scheduler is not None and not isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        raise ValueError(f"lr_scheduler={given!r} returned {type(scheduler).__name__}: expected a torch LRScheduler")
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"lr_scheduler is a {type(scheduler).__name__} for another optimizer than the one that trains the model, "
            "so it would not change the rates: make it for the optimizer that you pass, or pass a function, "
            "lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"
        )
    return scheduler


def load(
    given: Any, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None, state: Mapping[str, Any], factor: float
) -> None:
    """Load a checkpoint's ``state`` of an optimizer and its scheduler; multiply rates by ``factor``.

    ``scheduler`` is the result of :func:`make_scheduler` for ``given``. If ``given`` is a function, the rates from its
    call count, as in a run that starts with these ranks.
    """
    made = _fixed_rates(optimizer, scheduler)
    load_optimizer_state(optimizer, state["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
    scale(optimizer, scheduler, factor)
    if scheduler is not given and factor != 1.0:
        for holder, rates in zip(_holders(optimizer, scheduler), made, strict=True):
            holder.update(rates)


def _fixed_rates(optimizer: torch.optim.Optimizer, scheduler: Scheduler | None) -> list[dict[str, Any]]:
    """Return the rates that no step changes."""
    names = {*_RATES, *_OWN_RATES} - {"lr", "_last_lr"}
    return [{name: holder[name] for name in names & holder.keys()} for holder in _holders(optimizer, scheduler)]


def _holders(optimizer: torch.optim.Optimizer, scheduler: Scheduler | None) -> list[dict[str, Any]]:
    own = [] if scheduler is None else [vars(each) for each in _with_inner(scheduler)]
    return [*optimizer.param_groups, *own]


def scale(optimizer: torch.optim.Optimizer, scheduler: Scheduler | None, factor: float) -> None:
    """Multiply learning rates by ``factor`` (Goyal et al., "Accurate, Large Minibatch SGD", arXiv 1706.02677)."""
    if factor == 1.0:
        return
    for group in optimizer.param_groups:
        for key in _RATES:
            if isinstance(group.get(key), torch.Tensor):
                group[key] = group[key] * factor
            elif group.get(key) is not None:
                group[key] *= factor
    for one in _with_inner(scheduler):
        for name in _OWN_RATES:
            rates = getattr(one, name, None)
            if isinstance(rates, list):
                setattr(one, name, [rate * factor for rate in rates])
            elif isinstance(rates, int | float):
                setattr(one, name, rates * factor)


def _with_inner(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and those that it contains, at any depth."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _with_inner(inner)
