"""The options of a run are declared once, as fields of a config: checks, docs and the command line come from there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from numbers import Real
from textwrap import fill
from typing import Any, ParamSpec, TypeVar

from spark_hvd.world.words import nearest

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_NOT_OPTIONS = {
    "fn": "The training function.",
    "args": "Positional arguments of fn.",
    "kwargs": "Keyword arguments of fn.",
    "data": 'Data sets by name, as ``{"train": df, "val": "s3://bucket/val"}``: Spark or pandas DataFrames, Arrow '
    "tables, and paths of files. In fn, each rank reads its share of the rows.",
    "data_store": "Where rows of DataFrames and tables are written for the ranks, and deleted after the run: a path or "
    "URL that all hosts reach, or a Store; None for a temporary folder, if the ranks are on this machine.",
    "spark": "The session; None for the active one.",
    "tracker": "Keeps a record of the run elsewhere: ``spark_hvd.runner.MlflowTracker()``, or one of yours. See "
    "docs/tracking.md.",
    "stdout": "Text stream for the ranks' stdout instead of ``sys.stdout``.",
    "stderr": "Text stream for the ranks' stderr instead of ``sys.stderr``.",
}
"""Parameters of the functions that no config holds."""


@dataclass(frozen=True, slots=True)
class Option:
    """What the field of a config says of itself besides its name, type and default.

    Attributes:
        text: What it means.
        least: The least whole number; None where the value is no whole number.
        unit: What a whole number counts.
        choices: The texts allowed.
        seconds: Whether it is a number of seconds, above 0.
        above_0: Whether it is another number above 0.
        none: What None is for, as in "None for every slot".
    """

    text: str
    least: int | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()
    seconds: bool = False
    above_0: bool = False
    none: str = ""

    def check(self, name: str, value: Any) -> None:
        """Hold a value to the type and range that the option has by itself.

        Raises:
            ValueError: naming the option, its value and what is allowed.
            TypeError: a value of a wrong type, likewise.
        """
        if value is None:
            return
        kind: Any
        above_0 = self.seconds or self.above_0
        if self.least is not None:
            kind, expected = int, f"a whole number{self.unit and ' of '}{self.unit}, at least {self.least}"
        elif above_0:
            kind, expected = Real, f"a number {'of seconds ' * self.seconds}above 0"
        elif self.choices:
            kind, expected = str, f"one of {', '.join(map(repr, self.choices))}"
        else:
            return
        expected += f", or None {self.none}" if self.none else ""
        if isinstance(value, bool) or not isinstance(value, kind):
            raise TypeError(f"{name}={value!r}: expected {expected}")
        if not (value in self.choices if self.choices else value > 0 if above_0 else value >= self.least):
            raise ValueError(f"{name}={value!r}: expected {expected}")


def option(default: T, text: str, **more: Any) -> T:
    """A field of a config; the arguments are those of :class:`Option`."""
    made: T = field(default=default, metadata={"option": Option(text, **more)})
    return made


def reworded(config: type[Any], name: str, text: str) -> Any:
    """The field of a config for a subclass in which it means something else, with its default and checks."""
    (known,) = (each for each in fields(config) if each.name == name)
    return field(default=known.default, metadata={"option": replace(known.metadata["option"], text=text)})


def options_of(config: type[Any]) -> dict[str, Option]:
    """The options that a config declares, by name."""
    return {each.name: each.metadata["option"] for each in fields(config)}


def launcher(config: type[Any], **texts: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function's keyword arguments the options that a config declares.

    Its docstring gets what each argument means, and a name that it does not have is refused with the closest that it
    has. The signature stays written out, for those who read it without running it (editors, mypy).

    Args:
        config: The class.
        texts: What options mean here, where that differs.
    """

    def complete(function: Callable[P, R]) -> Callable[P, R]:
        names = list(inspect.signature(function).parameters)
        named = [name for name in names if name not in ("fn", "args", "kwargs")]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in names:
                    hint = nearest(name, named, 0.4) or f" Expected one of {', '.join(named)}."
                    raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}.{hint}")
            return function(*args, **kwargs)

        if function.__doc__ is not None:  # there is none under python -OO
            meanings = {**_NOT_OPTIONS, **{name: each.text for name, each in options_of(config).items()}, **texts}
            call.__doc__ = _with_arguments(function.__doc__, {name: meanings[name] for name in names})
        return call

    return complete


def _with_arguments(docstring: str, meanings: Mapping[str, str]) -> str:
    head, returns, rest = inspect.cleandoc(docstring).partition("Returns:\n")
    lines = [fill(f"    {name}: {text}", 110, subsequent_indent=" " * 8) for name, text in meanings.items()]
    return "\n".join([head + "Args:", *lines, "", returns + rest])
