"""The handles of collectives: finished ones, and those that wait for torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from spark_hvd.transport.communicator import Handle
from spark_hvd.transport.waits import wait_for
from spark_hvd.world.activity import activity
from spark_hvd.world.errors import CollectiveError

T = TypeVar("T")

_OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "out of memory")


class FinishedHandle(Handle[T]):
    """A collective that has already ended."""

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self) -> T:
        return self._result

    def done(self) -> bool:
        return True

    def when_done(self, callback: Callable[[], None]) -> None:
        callback()


class PendingHandle(Handle[T]):
    """A collective that torch.distributed runs."""

    def __init__(
        self,
        name: str,
        works: Sequence[dist.Work | None],
        finish: Callable[[], T],
        groups: Sequence[dist.ProcessGroup | None] = (),
    ) -> None:
        """Create a handle for works in flight.

        ``finish`` creates the result, once, when all works have ended. ``groups`` are those of works on the CPU, which
        may have to be abandoned with their world.
        """
        self._groups = groups
        self._name = name
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], T] | None = finish
        self._result: T

    def wait(self) -> T:
        if self._finish is not None:
            try:
                if all(work.is_completed() for work in self._works):
                    self._wait()
                else:
                    with activity.waiting(self._name):
                        self._wait()
            except RuntimeError as error:
                raise failed(self._name, error) from error
            self._result = self._finish()
            self._finish = None
        return self._result

    def _wait(self) -> None:
        for work in self._works:
            if self._groups:
                wait_for(work, *self._groups)
            else:
                work.wait()

    def done(self) -> bool:
        return self._finish is None or all(work.is_completed() for work in self._works)

    def when_done(self, callback: Callable[[], None]) -> None:
        if self._finish is None or not self._works:
            callback()
        elif len(self._works) == 1:
            self._works[0].get_future().add_done_callback(lambda _: callback())
        else:
            collected = torch.futures.collect_all([work.get_future() for work in self._works])
            collected.add_done_callback(lambda _: callback())


class JointHandle(Handle[list[Any]]):
    """Several collectives in flight, as one."""

    def __init__(self, handles: Sequence[Handle[Any]]) -> None:
        self._handles = handles

    def wait(self) -> list[Any]:
        """Return the results in order; see base class."""
        return [handle.wait() for handle in self._handles]

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)

    def when_done(self, callback: Callable[[], None]) -> None:
        when_all_done([handle.when_done for handle in self._handles], callback)


def when_all_done(parts: Sequence[Callable[[Callable[[], None]], None]], callback: Callable[[], None]) -> None:
    """Call back once, from the thread of the last part, when all have called back; at once if there are none."""
    left, lock = len(parts), threading.Lock()
    if not left:
        callback()

    def one_is() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            callback()

    for when_done in parts:
        when_done(one_is)


def failed(name: str, error: RuntimeError) -> RuntimeError:
    """Return a CollectiveError for an error of torch.distributed, or the error itself if memory ran out."""
    if is_out_of_memory(error):
        return error
    return CollectiveError(f"{name} failed on rank {dist.get_rank() if dist.is_initialized() else '?'}: {error}")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this rank lacks memory on its host or GPU. No peer is at fault, and retrying does not help."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # torch's host allocator, and CUDA errors that NCCL passes on, have no exception class of their own.
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
