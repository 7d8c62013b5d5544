"""Pickling what travels: the call on its way out, its value or exception on its way back."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import cloudpickle

from spark_hvd.runner.tracebacks import Brief

R = TypeVar("R")

_MAX_DEPTH = 6


class UnpicklableError(Brief, TypeError):
    """Something that has to travel between processes cannot be pickled; the message names the part of it."""

    __module__ = "spark_hvd.runner"


def dump_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call. Functions and classes of ``__main__`` (a notebook, a script) travel by value.

    Raises:
        UnpicklableError: naming the closure variable, global, argument or attribute that cannot travel.
    """
    try:
        data: bytes = cloudpickle.dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        parts = [("fn", fn), *((f"args[{i}]", value) for i, value in enumerate(args))]
        parts += [(f"kwargs[{name!r}]", value) for name, value in kwargs.items()]
        raise UnpicklableError(
            f"cannot send fn to the ranks: {explain(parts, error)}\n"
            "Create it inside fn instead, or pass what it is made from (a path, a configuration)."
        ) from error
    return data


def dump_result(value: Any, rank: int) -> bytes:
    """Pickle what fn returned on ``rank``.

    Raises:
        UnpicklableError: naming the part of the value that cannot travel.
    """
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise UnpicklableError(
            f"fn returned on rank {rank} a value that cannot be sent back: {explain([('value', value)], error)}\n"
            "Return plain data: numbers, lists, arrays, tensors, state_dicts."
        ) from error
    return data


def dump_exception(error: BaseException) -> bytes:
    """Pickle an exception without its traceback; empty when it cannot be pickled and read back."""
    try:
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)  # many exceptions pickle and then cannot be rebuilt from their args
    except Exception:  # whatever a user's __reduce__ or __init__ raises
        return b""
    return data


def load_exception(data: bytes | None) -> BaseException | None:
    """Rebuild an exception; None where its class does not exist in this process."""
    try:
        error = pickle.loads(data) if data else None
    except Exception:  # whatever a user's module or __init__ raises here
        return None
    return error if isinstance(error, BaseException) else None


def explain(parts: Sequence[tuple[str, Any]], error: Exception) -> str:
    """Say which part, and what inside it, cannot be pickled."""
    for path, value in parts:
        culprit = _culprit(path, value, frozenset(), _MAX_DEPTH)
        if culprit is not None:
            where, what = culprit
            return f"{where} is a {type(what).__module__}.{type(what).__qualname__}, which cannot be pickled ({error})."
    return f"{error}."


def _culprit(path: str, value: Any, seen: frozenset[int], depth: int) -> tuple[str, Any] | None:
    """The deepest part of ``value`` that fails to pickle, as (path to it, the part); None if it pickles."""
    if _pickles(value):
        return None
    if depth and id(value) not in seen:
        for name, part in _parts(value):
            found = _culprit(f"{path}{name}", part, seen | {id(value)}, depth - 1)
            if found is not None:
                return found
    return path, value


def _pickles(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # whatever a user's __reduce__ raises
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What pickling ``value`` would reach next, each with the text that leads to it."""
    if hasattr(value, "__func__"):  # a bound method carries its object
        yield ".__self__", value.__self__
        value = value.__func__
    if hasattr(value, "__code__"):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f"'s closure variable {name!r}", cell.cell_contents
            except ValueError:  # not yet assigned
                continue
        for name in _names(value.__code__):
            if name in value.__globals__:
                yield f"'s global {name!r}", value.__globals__[name]
        for default in value.__defaults__ or ():
            yield "'s default argument", default
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from ((f".{name}", part) for name, part in vars(value).items())


def _names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _names(constant)


def renamed(fn: Callable[..., R], name: str) -> Callable[..., R]:
    """`fn` under another name, as the Spark UI and whatever shows the run have it."""
    other = partial(fn)
    other.__qualname__ = name  # type: ignore[attr-defined] # partials have a __dict__, which is pickled too
    return other


def name_of(fn: Callable[..., Any]) -> str:
    """What to call a function that runs: its name, or that of its class."""
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    return name.rpartition(".<locals>.")[2]
