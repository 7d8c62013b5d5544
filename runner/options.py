"""Declares the options of a run once, as fields of a class, from which checks, docs and the command line follow."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from textwrap import fill
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of a config's field, besides its name, type and default.

    Attributes:
        text: The meaning.
        least: The minimum of a whole number; None if the value is not a whole number.
        unit: What a whole number counts.
        choices: The texts allowed.
        seconds: Whether it is a number of seconds above 0.
        above_0: Whether it is another number above 0.
        none: The meaning of None, as in "None for every slot".
    """

    text: str
    least: int | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()
    seconds: bool = False
    above_0: bool = False
    none: str = ""

    def check(self, name: str, value: Any) -> None:
        """Check the type and the range of a value.

        Raises:
            ValueError: The value is out of range. The message names the option, its value and what is allowed.
            TypeError: The value has a wrong type.
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
    """Declare a field of a config; the arguments are those of :class:`Option`."""
    made: T = field(default=default, metadata={"option": Option(text, **more)})
    return made


def reworded(config: type[Any], name: str, text: str) -> Any:
    """Declare a config's field again, for a subclass in which it has another meaning."""
    (known,) = (each for each in fields(config) if each.name == name)
    return field(default=known.default, metadata={"option": replace(known.metadata["option"], text=text)})


def options_of(config: type[Any]) -> dict[str, Option]:
    """Return the options that a config declares, by name."""
    return {each.name: each.metadata["option"] for each in fields(config)}


def described(kind: type[T]) -> type[T]:
    """Add the meanings of a class's options to its docstring."""
    if kind.__doc__ is not None:  # there is none under python -OO
        kind.__doc__ = f"{inspect.cleandoc(kind.__doc__)}\n\nArgs:\n{meanings(options_of(kind))}"
    return kind


def meanings(options: Mapping[str, Option | str]) -> str:
    """Format options as the lines of a docstring's "Args:"."""
    texts = ((name, each if isinstance(each, str) else each.text) for name, each in options.items())
    return "\n".join(fill(f"    {name}: {text}", 110, subsequent_indent=" " * 8) for name, text in texts)
