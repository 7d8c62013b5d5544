"""The handle of a named collective: what the user polls and waits for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

from spark_hvd.collectives.execution import Execution, Work
from spark_hvd.collectives.messages import Request
from spark_hvd.collectives.underway.slots import Slot
from spark_hvd.world.activity import activity
from spark_hvd.world.errors import CollectiveError

T = TypeVar("T")

_making = threading.Lock()
"""Held to make a baton: most handles need none, and to make one takes as long as all else of a handle."""


class Owner(Protocol):
    """The queue that runs a handle's collective."""

    def flush(self) -> None:
        """Tell the coordinator what this rank is ready for, if there is news."""

    def meet(self, handle: NamedHandle[Any], timeout: float | None) -> None:
        """Wait for a handle that is under way in memory; it may be the coordinator's afterwards. 0: look only."""

    def finish(self, handle: NamedHandle[Any], execution: Execution) -> None:
        """Do what is left to do for a handle whose collective has ended.

        Raises:
            CollectiveError: It has not ended well.
        """

    def explained(self, handle: NamedHandle[Any], error: CollectiveError) -> CollectiveError:
        """A collective failed on the wire: the error to raise, with the coordinator's word on who has gone."""


class NamedHandle(Generic[T]):
    """A collective in flight, as returned by the ``_async`` functions."""

    __slots__ = (
        "_baton",
        "_done",
        "_error",
        "_execution",
        "_queue",
        "_result",
        "name",
        "ready",
        "request",
        "since",
        "slot",
        "work",
    )

    def __init__(
        self,
        owner: Owner | None,
        name: str,
        request: Request,
        work: Work,
        result: Callable[[Work], T],
        ready: Moment | None = None,
    ) -> None:
        """Made by a queue.

        Args:
            owner: Which runs it.
            name: Its name.
            request: What this rank says of it.
            work: This rank's tensors.
            result: Makes what :meth:`wait` returns.
            ready: When tensors on a GPU are.
        """
        self.name = name
        self.request = request
        self.work = work
        self.ready = ready
        self.since = 0.0
        """When it was called, on the monotonic clock."""
        self.slot: Slot | None = None
        """The shared memory that it is in."""
        self._queue = owner
        self._result = result
        self._done = False
        self._error: Exception | None = None
        self._execution: Execution | Moment | None = None
        self._baton: threading.Lock | None = None
        """What threads that wait sleep on, if any does: it is held until the collective has ended."""

    @classmethod
    def ended(cls, value: T) -> NamedHandle[T]:
        """A handle for what needed no collective."""
        handle = cls(None, "", Request("nothing", [], [], ""), Work([], True, []), lambda _: value)
        handle.complete()
        return handle

    @property
    def label(self) -> str:
        """What to call it: ``allreduce 'loss'``."""
        return f"{self.request.kind} {self.name!r}"

    def poll(self) -> bool:
        """Whether :meth:`wait` would return or raise at once; on a GPU, also whether the device has finished."""
        if not self._done:
            self._owner.meet(self, 0)
            self._owner.flush()
            return self._done
        return not isinstance(self._execution, Moment) or self._execution.passed()

    def wait(self, timeout: float | None = None) -> T:
        """Block until the collective has ended, and return its result; may be called again.

        For tensors on a GPU the current stream waits, not the host.

        Args:
            timeout: Seconds; None: no limit besides the stall timeout and that of the process group.

        Raises:
            MismatchError: The ranks' calls do not match. Raised on every rank; the world stays usable.
            StalledError: Some ranks did not call it within the stall timeout.
            CollectiveError: A peer or the network failed.
            TimeoutError: `timeout` has expired. The collective continues, and you may wait for it again.
        """
        if not self._done:
            begun = time.monotonic()
            activity.wait_begins(begun)
            if self.slot is not None:
                self._owner.meet(self, timeout)
            ended = self.done
            if not ended:
                self._owner.flush()
                left = -1 if timeout is None else max(0.0, begun + timeout - time.monotonic())
                ended = self._sleep(left)
            activity.wait_ends(time.monotonic())
            if not ended:
                raise TimeoutError(f"{self.label} has not ended within {timeout} s; it is still under way.")
        execution = self._execution
        if execution is not None and not execution.finished:
            self._finish(execution)
        elif self._error is not None:
            raise type(self._error)(*self._error.args) from self._error
        return self._result(self.work)

    def _finish(self, execution: Execution | Moment) -> None:
        if isinstance(execution, Moment):
            execution.wait(self.work.results)
            return
        try:
            self._owner.finish(self, execution)
        except CollectiveError as error:
            raise self._owner.explained(self, error) from error

    synchronize = wait

    def __call__(self) -> T:
        """The same as :meth:`wait`, as for Horovod's sparse_allreduce_async."""
        return self.wait()

    def complete(self, outcome: Execution | Moment | None = None, error: Exception | None = None) -> None:
        """Called by its queue, once: the collective has ended."""
        if self._done:
            return
        self._execution = outcome
        self._error = error
        self._done = True
        if self._baton is not None:
            self._let_go()

    def _sleep(self, seconds: float) -> bool:
        """Wait for the end of the collective; returns whether it has come. -1: no limit."""
        with _making:
            if self._baton is None:
                baton = threading.Lock()
                baton.acquire()
                self._baton = baton
        # Whoever ends the collective says so, and then looks for the baton: one of the two sees the other.
        ended = self._done or self._baton.acquire(timeout=seconds)
        if ended:
            self._let_go()
        return ended

    def _let_go(self) -> None:
        assert self._baton is not None
        with contextlib.suppress(RuntimeError):  # two threads let go at the same time
            self._baton.release()

    @property
    def _owner(self) -> Owner:
        assert self._queue is not None
        return self._queue

    @property
    def done(self) -> bool:
        """Whether the queue has nothing more to do for it."""
        return self._done


class Moment:
    """A moment on the current stream of a CUDA device, for other streams of that device to wait for.

    The device need not be the current one: a thread of its own begins with device 0.
    """

    finished = False
    """Every stream that uses the results has to wait for it."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event = event
        self._device = device

    @classmethod
    def now(cls, device: torch.device) -> Moment:
        """The current moment of a device's current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return cls(event, device)

    def passed(self) -> bool:
        """Whether the device has come to it."""
        return bool(self._event.query())

    def wait(self, tensors: list[torch.Tensor]) -> None:
        """Let the device's current stream wait for it, and tell the allocator that this stream uses `tensors`."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(stream)
