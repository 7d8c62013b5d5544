"""The handles that the ``_async`` functions return and that poll and synchronize accept: ints in Horovod's dialect."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar, cast

from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.context.global_state import current, global_state, speaks_horovod

T = TypeVar("T")

_numbers = itertools.count(1)


class NumberedHandle(int):
    """A handle in Horovod's dialect: an int with the methods of our handles; any equal int works as well."""

    def poll(self) -> bool:
        """See NamedHandle.poll."""
        return poll(cast(NamedHandle[Any], self))

    def wait(self, timeout: float | None = None) -> Any:
        """Wait as NamedHandle.wait does; the second call returns None, as :func:`synchronize` does."""
        return _wait(self, timeout)

    synchronize = wait


def numbered(handle: NamedHandle[T]) -> NamedHandle[T]:
    """Return what the caller of a collective gets: the handle, or an int in Horovod's dialect."""
    if not speaks_horovod():
        return handle
    number = NumberedHandle(next(_numbers))
    current().handles[number] = handle
    return cast(NamedHandle[T], number)


def poll(handle: NamedHandle[Any]) -> bool:
    """Return whether :func:`synchronize` would return or raise at once.

    Raises:
        TypeError: `handle` is not a handle.
        ValueError: In Horovod's dialect, the int is not a handle of this world, or has been waited for.
    """
    registered = _found(handle)
    if registered is None:
        raise ValueError(f"handle {handle!r} does not belong to this world, or was already waited for")
    return registered.poll()


def synchronize(handle: NamedHandle[T]) -> T:
    """Wait for an asynchronous collective and return its result; see NamedHandle.wait.

    In Horovod's dialect a handle is an int and can be waited for once: a second call returns None.

    Raises:
        TypeError: `handle` is not a handle.
    """
    return handle.wait() if type(handle) is NamedHandle else cast(T, _wait(handle, None))


def _wait(handle: Any, timeout: float | None) -> Any:
    registered = _found(handle)
    if registered is None:
        return None
    try:
        return registered.wait(timeout)
    finally:
        if registered is not handle and registered.done and global_state.context is not None:
            global_state.context.handles.pop(handle, None)


def _found(handle: Any) -> NamedHandle[Any] | None:
    if isinstance(handle, int) and speaks_horovod():
        return current().handles.get(handle)
    if not isinstance(handle, NamedHandle):
        raise TypeError(f"expected a handle from an _async function; got {handle!r}.")
    return handle
