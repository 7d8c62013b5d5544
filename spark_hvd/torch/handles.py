"""Handles, as the ``_async`` functions return them and poll and synchronize take them: ints in Horovod's dialect."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar, cast

from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.context.standing import current, speaks_horovod, standing

T = TypeVar("T")

_numbers = itertools.count(1)


class NumberedHandle(int):
    """A handle in Horovod's dialect: an int, for which an equal one serves as well, with the methods of ours."""

    def poll(self) -> bool:
        """See NamedHandle.poll."""
        return poll(cast(NamedHandle[Any], self))

    def wait(self, timeout: float | None = None) -> Any:
        """See NamedHandle.wait; the second time it is None, as :func:`synchronize` is."""
        return _wait(self, timeout)

    synchronize = wait


def numbered(handle: NamedHandle[T]) -> NamedHandle[T]:
    """The handle of a call as its caller gets it: an int where the dialect is Horovod's."""
    if not speaks_horovod():
        return handle
    number = NumberedHandle(next(_numbers))
    current().handles[number] = handle
    return cast(NamedHandle[T], number)


def poll(handle: NamedHandle[Any]) -> bool:
    """Whether :func:`synchronize` would return or raise at once.

    Raises:
        TypeError: `handle` is not a handle.
        ValueError: In Horovod's dialect: an int that is no handle of this world, or has been waited for.
    """
    found = _found(handle)
    if found is None:
        raise ValueError(f"handle {handle!r} is none of this world, or was waited for already")
    return found.poll()


def synchronize(handle: NamedHandle[T]) -> T:
    """Wait for an asynchronous collective and return its result; see NamedHandle.wait.

    In Horovod's dialect a handle is an int and can be waited for once: the second time the result is None.

    Raises:
        TypeError: `handle` is not a handle.
    """
    return handle.wait() if type(handle) is NamedHandle else cast(T, _wait(handle, None))


def _wait(handle: Any, timeout: float | None) -> Any:
    found = _found(handle)
    if found is None:
        return None
    try:
        return found.wait(timeout)
    finally:
        if found is not handle and found.done and standing.context is not None:
            standing.context.handles.pop(handle, None)


def _found(handle: Any) -> NamedHandle[Any] | None:
    if isinstance(handle, int) and speaks_horovod():
        return current().handles.get(handle)
    if not isinstance(handle, NamedHandle):
        raise TypeError(f"expected a handle, as the _async functions return it; got {handle!r}.")
    return handle
