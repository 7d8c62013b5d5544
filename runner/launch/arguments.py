"""The arguments of functions that start ranks: their documentation, and the config made from them."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from spark_hvd.runner.config import GROUPS, PRELOAD, CommonConfig
from spark_hvd.runner.options import Option, meanings, options_of
from spark_hvd.runner.watch.display.choose import in_notebook
from spark_hvd.world.env import carried_dialect
from spark_hvd.world.words import nearest

C = TypeVar("C", bound=CommonConfig)
P = ParamSpec("P")
R = TypeVar("R")

_NO_OPTIONS = {
    "fn": "The training function.",
    "args": "Positional arguments of fn.",
    "kwargs": "Keyword arguments of fn.",
    "data": 'Data sets by name, as ``{"train": df, "val": "s3://bucket/val"}``: Spark or pandas DataFrames, Arrow '
    "tables, and paths of files. In fn, each rank reads its share of the rows.",
    "data_store": "Where rows of DataFrames and tables are written for the ranks, and deleted after the run: a path or "
    "URL that all hosts reach, or a Store; None for a temporary folder, if the ranks are on this machine.",
    "spark": "The session; None for the active one.",
    "network": "How ranks reach each other and this program, as a :class:`spark_hvd.Network`: interfaces, ports, MPI, "
    "the time limit of collectives.",
    "reporting": "What is shown and kept of the run, as a :class:`spark_hvd.Reporting`: progress, tracker, streams.",
}
"""Arguments that no config holds by these names."""


def launcher(config: type[C], **texts: str) -> Callable[[Callable[Concatenate[C, P], R]], Callable[P, R]]:
    """Decorate a function that starts ranks, so that its first argument is the config made from the others.

    The function keeps an explicit signature for editors and mypy. Its docstring gets the meaning of each argument. For
    an unknown name, the error suggests the closest argument. Options of a Network or a Reporting are also accepted as
    arguments, with a DeprecationWarning. ``texts`` override the meaning of options.
    """

    def complete(function: Callable[Concatenate[C, P], R]) -> Callable[P, R]:
        own = inspect.signature(function)
        signature = own.replace(parameters=list(own.parameters.values())[1:])
        names = list(signature.parameters)
        moved = {option: group for group, kind in GROUPS.items() if group in names for option in options_of(kind)}

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name in moved and name not in names:
                    group = moved[name]
                    warnings.warn(
                        f"{function.__name__}({name}=...) is deprecated: pass "
                        f"{group}=spark_hvd.{GROUPS[group].__name__}({name}=...)",
                        DeprecationWarning,
                        stacklevel=2,
                    )
                elif name not in names:
                    options = [each for each in names if each not in ("fn", "args", "kwargs")]
                    hint = nearest(name, [*options, *moved], 0.4) or f" Expected one of {', '.join(options)}."
                    raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}.{hint}")
            old = {name: kwargs.pop(name) for name in moved if name in kwargs}
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            bound.apply_defaults()
            return function(config.of({**bound.arguments, **old}), *args, **kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        if function.__doc__ is not None:  # there is none under python -OO
            known: dict[str, Option | str] = {**_NO_OPTIONS, **options_of(config), **texts}
            head, returns, rest = inspect.cleandoc(function.__doc__).partition("Returns:\n")
            call.__doc__ = f"{head}Args:\n{meanings({name: known[name] for name in names})}\n\n{returns}{rest}"
        return call

    return complete


def folded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Group single options into a Network and a Reporting, as arguments of a function that starts ranks."""
    rest = dict(options)
    for group, kind in GROUPS.items():
        if parts := {name: rest.pop(name) for name in options_of(kind) if name in rest}:
            rest[group] = kind(**parts)
    return rest


def adapted(config: C) -> C:
    """Add this program's settings to a config: its dialect, and TensorFlow to preload if it trains with it.

    Raises:
        ValueError: ``progress="notebook"`` outside of a notebook.
    """
    if config.progress == "notebook" and not in_notebook():
        raise ValueError(
            "progress='notebook': this program does not run in a notebook. Use 'auto', which shows a table in one."
        )
    tensorflow = {PRELOAD: "tensorflow"} if uses_tensorflow() else {}
    return replace(config, env={**tensorflow, **carried_dialect(), **config.env})


def uses_tensorflow() -> bool:
    """Tell whether this program trains with TensorFlow; other libraries import TensorFlow, too, so check ours."""
    if "spark_hvd.tensorflow" in sys.modules:
        return True
    keras = sys.modules.get("keras") if "tensorflow" in sys.modules else None
    return keras is not None and bool(keras.config.backend() == "tensorflow")
