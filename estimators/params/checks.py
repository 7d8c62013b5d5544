"""Checks for the values of parameters. Each error names the parameter, the value and what is allowed."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

from spark_hvd.store import Store
from spark_hvd.world.words import nearest

Check = Callable[[str, Any], Any]
"""(name, value) -> the value, possibly converted; raises ValueError or TypeError."""


def anything(name: str, value: Any) -> Any:
    """Accept any value."""
    return value


def whole(at_least: int) -> Check:
    """Check for a whole number of at least ``at_least``."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}={value!r}: expected a whole number, at least {at_least}")
        if value < at_least:
            raise ValueError(f"{name}={value}: expected a whole number, at least {at_least}")
        return int(value)

    return check


def number(above: float | None = None, at_least: float | None = None) -> Check:
    """Check for a number that is above a bound, or at least a bound."""
    bound = f" above {above:g}" if above is not None else f", at least {at_least:g}" if at_least is not None else ""

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}={value!r}: expected a number{bound}")
        if not ((above is None or value > above) and (at_least is None or value >= at_least)):
            raise ValueError(f"{name}={value!r}: expected a number{bound}")
        return float(value)

    return check


def flag(name: str, value: Any) -> bool:
    """Check for True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected True or False")
    return value


def flag_or_number(name: str, value: Any) -> int:
    """Check for True, False, or a whole number that is not negative; True becomes 1."""
    return int(value) if isinstance(value, bool) else int(whole(0)(name, value))


def text(name: str, value: Any) -> str:
    """Check for text that is not empty."""
    if not isinstance(value, str) or not value:
        raise (ValueError if value == "" else TypeError)(f"{name}={value!r}: expected text that is not empty")
    return value


def maybe_empty_text(name: str, value: Any) -> str:
    """Check for text, which may be empty."""
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: expected text, or '' for none")
    return value


def one_of(*allowed: str) -> Check:
    """Check for one of the ``allowed`` words."""

    def check(name: str, value: Any) -> str:
        if value not in allowed:
            hint = nearest(value, allowed) if isinstance(value, str) else ""
            raise ValueError(
                f"{name}={value!r}: expected {', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}.{hint}"
            )
        return str(value)

    return check


def names(name: str, value: Any) -> list[str]:
    """Check for column names; a single one may be plain text."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) and item for item in items) or not items:
        raise TypeError(f"{name}={value!r}: expected a list of column names")
    repeated = {item for item in items if list(items).count(item) > 1}
    if repeated:
        raise ValueError(f"{name}={value!r}: {', '.join(sorted(repeated))} is named more than once")
    return list(items)


def shapes(name: str, value: Any) -> list[tuple[int, ...] | None]:
    """Check for a list of shapes: with one -1 for the rows, or of a single row; None keeps the shape of the tensor."""
    example = f"expected a list of shapes, one for each column, such as {name}=[[-1, 1, 28, 28]]"
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}={value!r}: {example}")
    for shape in value:
        if shape is None:
            continue
        if not isinstance(shape, (list, tuple)) or not all(isinstance(n, int) for n in shape) or not shape:
            raise TypeError(f"{name}={value!r}: {example}")
        if any(n < 1 and n != -1 for n in shape) or list(shape).count(-1) > 1:
            raise ValueError(f"{name}: the shape {shape!r} may have one -1; expected numbers above 0 otherwise")
    # Add the dimension of the rows to the shape of a single row.
    return [None if shape is None else tuple(shape) if -1 in shape else (-1, *shape) for shape in value]


def dtypes(name: str, value: Any) -> list[str | None]:
    """Check for a list of torch dtypes or their names; None keeps the dtype of the column."""
    import torch

    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}={value!r}: expected a list of dtypes, one for each column, such as ['float32']")
    result: list[str | None] = []
    for item in value:
        short = str(item).removeprefix("torch.")
        if item is not None and not isinstance(getattr(torch, short, None), torch.dtype):
            raise ValueError(f"{name}={value!r}: {item!r} is not a torch dtype, such as 'float32' or 'int64'")
        result.append(None if item is None else short)
    return result


def callable_or(expected: str, *attributes: str) -> Check:
    """Check for a callable, or an object with certain attributes, so that its class need not be imported."""

    def check(name: str, value: Any) -> Any:
        if not callable(value) and not (attributes and all(hasattr(value, each) for each in attributes)):
            raise TypeError(f"{name}={value!r}: expected {expected}")
        return value

    return check


function = callable_or("a function")
optimizer = callable_or("a torch optimizer, or a function of model.parameters()", "param_groups", "step")
scheduler = callable_or("a learning rate scheduler, or a function of the optimizer", "step")


def functions(name: str, value: Any) -> list[Any]:
    """Check for a function or a list of functions."""
    return [function(name, item) for item in (value if isinstance(value, (list, tuple)) else [value])]


def function_groups(name: str, value: Any) -> list[list[Any]]:
    """Check for a list of functions, or a list of such lists, one for each label."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}={value!r}: expected a list of functions, or one such list for each label")
    groups = [value] if value and not isinstance(value[0], (list, tuple)) else value
    return [functions(name, group) for group in groups]


def numbers(name: str, value: Any) -> list[float]:
    """Check for a list of numbers."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}={value!r}: expected a list of numbers")
    return [number()(name, item) for item in value]


def fraction_or_column(name: str, value: Any) -> float | str:
    """Check for a share of the rows, at least 0 and below 1, or the name of a column."""
    if isinstance(value, str):
        return text(name, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r}: expected a number between 0 and 1, or the name of a column")
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value!r}: expected a share of the rows, at least 0 and below 1, or a column")
    return float(value)


def mapping_of_functions(name: str, value: Any) -> dict[str, Any]:
    """Check for a dict of column name -> function."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name}={value!r}: expected a dict of column name -> function")
    return {key: function(f"{name}[{key!r}]", item) for key, item in value.items()}


def instance(kind: str, *methods: str) -> Check:
    """Check for an object with certain methods, so that its class need not be imported."""

    def check(name: str, value: Any) -> Any:
        if isinstance(value, type) or not all(callable(getattr(value, method, None)) for method in methods):
            raise TypeError(f"{name}={value!r}: expected {kind}")
        return value

    return check


def losses(name: str, value: Any) -> list[Any]:
    """Check for a loss or a list of losses."""
    kind = instance("a function of (output, label) such as torch.nn.MSELoss(), not its class or its name", "__call__")
    return [kind(name, item) for item in (value if isinstance(value, (list, tuple)) else [value])]


def store(name: str, value: Any) -> Store:
    """Check for a Store, or its path or URL."""
    if isinstance(value, (str, os.PathLike)):
        return Store.create(os.fspath(value))
    checked: Store = instance("a Store, or its path or URL", "open", "run_path")(name, value)
    return checked


def callbacks(name: str, value: Any) -> list[Any]:
    """Check for a list of callbacks."""
    if not isinstance(value, (list, tuple)) or any(isinstance(item, type) or inspect.isroutine(item) for item in value):
        raise TypeError(
            f"{name}={value!r}: expected a list of callbacks (objects of a subclass of Callback, "
            "not classes or functions)"
        )
    return list(value)


def edit_fields(name: str, value: Any) -> list[tuple[str, Any, tuple[int, ...] | None, bool]]:
    """Check for fields of Petastorm's TransformSpec. If a shape is None, it is that of the values."""
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(field, (list, tuple)) and len(field) == 4 and isinstance(field[0], str) for field in value
    ):
        raise TypeError(f"{name}={value!r}: expected a list of (name, numpy dtype, shape, nullable)")
    return [(each[0], each[1], None if each[2] is None else tuple(each[2]), bool(each[3])) for each in value]


def compression(name: str, value: Any) -> Any:
    """Check for an object with ``compress`` and ``decompress``. It may be a class, as ``hvd.Compression.fp16`` is."""
    if not all(callable(getattr(value, method, None)) for method in ("compress", "decompress")):
        raise TypeError(
            f"{name}={value!r}: expected hvd.Compression.fp16, .bf16, or an object with compress and decompress"
        )
    return value
