"""Pickles the call for the ranks, and its value or exception for the driver."""

from __future__ import annotations

import inspect
import pickle
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from spark_hvd.runner.outcome.endings import GROUPS
from spark_hvd.runner.tracebacks import Brief
from spark_hvd.world.pickles import dumps
from spark_hvd.world.words import bounded, text_of

R = TypeVar("R")

_MAX_DEPTH = 6
_MAX_EXCEPTION_BYTES = 1 << 20
_MAX_TEXT_CHARS = 16 << 10
_SUBSTITUTES = (KeyError, IndexError, OSError, ValueError, TypeError, AttributeError, AssertionError, MemoryError)
"""Built-in classes that take a text, and may replace an exception derived from them. RuntimeError replaces others."""
_INSIDE = "Create it inside fn instead, or pass what it is made from (a path, a configuration)."
_NO_SPARK = (
    "Ranks have no Spark. Write a DataFrame to Parquet and pass the path, pass df.toPandas() if it is small, or train "
    "on it with an estimator. Pass the value of a broadcast variable; return what an accumulator would add up."
)


class UnpicklableError(Brief, TypeError):
    """An object that must be sent to another process cannot be pickled; the message names the part at fault."""

    __module__ = "spark_hvd.runner"


def dump_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call. Functions and classes of ``__main__`` (a notebook, a script) are pickled by value.

    Raises:
        TypeError: It is not a function, or the arguments do not match it.
        UnpicklableError: naming the closure variable, global, argument or attribute that cannot be pickled.
    """
    _check_call(fn, args, kwargs)
    try:
        data = dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        parts = [("fn", fn), *((f"args[{i}]", value) for i, value in enumerate(args))]
        parts += [(f"kwargs[{name!r}]", value) for name, value in kwargs.items()]
        spark = any((found := _culprit(*part, frozenset(), _MAX_DEPTH)) and _is_spark(found[1]) for part in parts)
        raise UnpicklableError(
            f"cannot send fn to the ranks: {explain(parts, error)}\n{_NO_SPARK if spark else _INSIDE}"
        ) from error
    return data


def _check_call(fn: Any, args: Any, kwargs: Any) -> None:
    if not callable(fn):
        raise TypeError(
            f"fn={reprlib.repr(fn)} is no function: pass the function itself, run(train, args=(1,)), not the value "
            "that it returns, run(train(1))"
        )
    if inspect.iscoroutinefunction(fn):
        raise TypeError(f"fn={name_of(fn)} is async, but ranks call plain functions: call asyncio.run(...) inside one")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(f"fn={name_of(fn)} is a generator, which runs nothing when it is called: return a list instead")
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise TypeError(
            f"args={reprlib.repr(args)}: expected a tuple of arguments; for a single one, args=({reprlib.repr(args)},)"
        )
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs={reprlib.repr(kwargs)}: expected a dict of arguments by name")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{name_of(fn)}{signature} does not take args={reprlib.repr(args)}, kwargs={reprlib.repr(kwargs)}: {error}"
        ) from None


def dump_result(value: Any, rank: int) -> bytes:
    """Pickle the return value of fn on ``rank``.

    Raises:
        UnpicklableError: naming the part of the value that cannot be pickled.
    """
    try:
        data = dumps(value)
    except Exception as error:
        raise UnpicklableError(
            f"fn returned on rank {rank} a value that cannot be sent back: {explain([('value', value)], error)}\n"
            "Return plain data: numbers, lists, arrays, tensors, state_dicts."
        ) from error
    return data


def dump_exception(error: BaseException) -> bytes:
    """Pickle an exception without its traceback; if it is too large or unpicklable, a built-in one replaces it."""
    # Many exceptions pickle, but fail or change when they are rebuilt, because __init__ does not take their args.
    for alike in (True, False):
        for way in (error, _Parts(error), _Group(error)):
            try:
                data = dumps(way)
                made = pickle.loads(data) if len(data) <= _MAX_EXCEPTION_BYTES else None
                if isinstance(made, BaseException) and (not alike or _texts(made) == _texts(error)):
                    return data
            except Exception:  # whatever a user's __reduce__ or __init__ raises
                continue
    base = next((each for each in type(error).__mro__ if each in _SUBSTITUTES), RuntimeError)
    name = "" if type(error) is base else f"{type(error).__qualname__}: "
    return dumps(base(bounded(f"{name}{text_of(error)}", _MAX_TEXT_CHARS)))


def _texts(error: BaseException) -> tuple[str, str]:
    return str(error), repr(error.args)


class _Group:
    """Pickles a group; each exception in it is pickled separately."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        group: Any = self._error
        if not isinstance(group, GROUPS):
            raise TypeError("no group")
        members = [
            (dump_exception(each), bounded(f"{type(each).__qualname__}: {text_of(each)}", _MAX_TEXT_CHARS))
            for each in group.exceptions
        ]
        return _grouped, (group.message, members, getattr(group, "__notes__", []))


def _grouped(message: str, members: Sequence[tuple[bytes, str]], notes: Sequence[str]) -> BaseException:
    found = [load_exception(*each) for each in members]
    made = GROUPS(message, [each for each in found if each is not None])
    for note in notes:
        made.add_note(note)
    return cast("BaseException", made)


class _Parts:
    """Pickles an exception as its class, arguments and attributes, to be rebuilt without its ``__init__``."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_parts, (type(self._error), self._error.args, dict(vars(self._error)))


def _from_parts(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    made = kind.__new__(kind)
    made.args = args
    vars(made).update(attributes)
    str(made)  # raises if these parts are not enough
    return made


def load_exception(data: bytes | None, text: str = "") -> BaseException | None:
    """Rebuild an exception, or return a RuntimeError with ``text`` if its class does not exist here."""
    if not data:
        return None
    try:
        error = pickle.loads(data)
    except Exception:  # whatever a user's module or __init__ raises here
        error = None
    return error if isinstance(error, BaseException) else RuntimeError(text)


def explain(parts: Sequence[tuple[str, Any]], error: Exception) -> str:
    """Say which part, and what inside it, cannot be pickled."""
    for path, value in parts:
        culprit = _culprit(path, value, frozenset(), _MAX_DEPTH)
        if culprit is not None:
            where, what = culprit
            if _is_spark(what):
                return f"{where} is a {type(what).__qualname__} of Spark, which exists only on the driver."
            return f"{where} is a {type(what).__module__}.{type(what).__qualname__}, which cannot be pickled ({error})."
    return f"{error}."


def _culprit(path: str, value: Any, seen: frozenset[int], depth: int) -> tuple[str, Any] | None:
    """Find the deepest part of ``value`` that fails to pickle, as (path to it, the part); None if it pickles."""
    if _pickles(value):
        return None
    if depth and id(value) not in seen and not _is_spark(value):
        for name, part in _parts(value):
            found = _culprit(f"{path}{name}", part, seen | {id(value)}, depth - 1)
            if found is not None:
                return found
    return path, value


def _is_spark(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("pyspark", "py4j")


def _pickles(value: Any) -> bool:
    try:
        dumps(value)
    except Exception:  # whatever a user's __reduce__ raises
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that pickling ``value`` would reach next, each with the text that leads to it."""
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


def renamed(fn: Callable[..., R], name: str, **facts: str | float) -> Callable[..., R]:
    """Wrap `fn` with another name, for the Spark UI and displays, and with facts for a tracker."""
    other = partial(fn)
    other.facts = facts  # type: ignore[attr-defined]
    other.__qualname__ = name  # type: ignore[attr-defined] # partials have a __dict__, which is pickled too
    return other


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name to display for a function: its own, or that of its class."""
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    return name.rpartition(".<locals>.")[2]
