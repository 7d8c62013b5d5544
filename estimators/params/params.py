"""Parameters declared once, in a table: Spark ML Params, getters, setters, defaults, checks and documentation.

A class that inherits from TableParams names its table. A row such as ``batch_size`` becomes a ``Param`` of that name,
``getBatchSize()``, ``setBatchSize(value)``, and a keyword of the constructor. Values are checked when they are set;
those of a ParamGridBuilder's grid are checked when ``fit`` starts.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml.param import Param, Params

from spark_hvd.estimators.params.checks import Check
from spark_hvd.runner.spark.private import set_defaults, unowned_param
from spark_hvd.world.words import nearest

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter. ``check`` says which values are allowed, ``group`` is the heading in the documentation."""

    name: str
    default: Any
    check: Check
    doc: str
    group: str = ""


class TableParams(Params):
    """Base class of everything whose parameters come from a table."""

    _table: ClassVar[tuple[Parameter, ...]] = ()
    _gone: ClassVar[Mapping[str, str]] = {}
    """Names that users of Horovod may still pass -> what to do instead."""
    _from_json: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    """Parameters that are saved as JSON by their ``to_json()`` -> the function that reads it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        for row in cls._table:
            if not isinstance(getattr(cls, row.name, None), Param):
                setattr(cls, row.name, unowned_param(row.name, row.doc))
                camel = "".join(word[:1].upper() + word[1:] for word in row.name.split("_"))
                _define(cls, f"get{camel}", _getter(row))
                _define(cls, f"set{camel}", _setter(row))
            parameters.append(inspect.Parameter(row.name, inspect.Parameter.KEYWORD_ONLY, default=row.default))
        cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # what help() and IDEs show

    def __init__(self, **values: Any) -> None:
        super().__init__()
        set_defaults(self, {row.name: copy.copy(row.default) for row in self._table})
        self.setParams(**values)

    def setParams(self, **values: Any) -> Self:  # noqa: N802 - Spark's name
        """Set parameters by name.

        Raises:
            TypeError: There is no parameter of that name, or its value has the wrong type.
            ValueError: A value is not allowed.
        """
        rows = {row.name: row for row in self._table}
        for name, value in values.items():
            if name not in rows:
                instead = f": {self._gone[name]}" if name in self._gone else f".{nearest(name, rows)}"
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}{instead}")
            # As in Horovod, None selects the default.
            if value is None and rows[name].default is not None:
                self.clear(getattr(self, name))
            else:
                self._set(**{name: rows[name].check(name, value) if value is not None else None})
        return self

    def value_of(self, name: str) -> Any:
        """Return a parameter's value or default. It is checked again, because grids and copies set values unchecked."""
        row = next(row for row in self._table if row.name == name)
        value = self.getOrDefault(name)
        value = row.default if value is None else value
        return None if value is None else row.check(name, value)


def rows(group: str, *entries: tuple[Any, ...]) -> tuple[Parameter, ...]:
    """Return rows of one group of a table, from (name, default, check, doc)."""
    return tuple(Parameter(name, default, check, doc, group) for name, default, check, doc in entries)


def _define(cls: type, name: str, method: Any) -> None:
    if name not in cls.__dict__:
        method.__name__ = name
        method.__qualname__ = f"{cls.__qualname__}.{name}"
        setattr(cls, name, method)


def _getter(row: Parameter) -> Any:
    def get(self: TableParams) -> Any:
        return self.getOrDefault(row.name)

    get.__doc__ = f"Return ``{row.name}``: {row.doc}"
    return get


def _setter(row: Parameter) -> Any:
    def set(self: TableParams, value: Any) -> TableParams:
        return self.setParams(**{row.name: value})

    set.__doc__ = f"Set ``{row.name}``: {row.doc}"
    return set
