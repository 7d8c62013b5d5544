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
from spark_hvd.collectives.pending.slots import Slot
from spark_hvd.world.activity import activity
from spark_hvd.world.errors import CollectiveError

T = TypeVar("T")

_making = threading.RLock()
"""Held while a baton is created. Most handles need none, and creating one takes as long as the rest of a handle."""


class Owner(Protocol):
    """The queue that runs a handle's collective."""

    def flush(self) -> None:
        """Send the outbox to the coordinator, unless it is empty."""

    def wait_for(self, handle: NamedHandle[Any], timeout: float | None) -> None:
        """Wait for a call in shared memory, which may then move to the coordinator. A timeout of 0 only checks."""

    def finish(self, handle: NamedHandle[Any], execution: Execution) -> None:
        """Do the remaining work for a handle whose collective has ended.

        Raises:
            CollectiveError: The collective failed.
        """

    def explained(self, handle: NamedHandle[Any], error: CollectiveError) -> CollectiveError:
        """Return the error to raise for a failure on the wire, with what the coordinator knows about lost ranks."""


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
        ready: StreamEvent | None = None,
    ) -> None:
        """Create the handle of a call; queues do this.

        Args:
            owner: The queue that runs the call.
            name: Its name.
            request: What this rank tells the coordinator about it.
            work: This rank's tensors.
            result: Makes the return value of :meth:`wait`.
            ready: The point in the stream at which the tensors on a GPU are written.
        """
        self.name = name
        self.request = request
        self.work = work
        self.ready = ready
        self.since = 0.0
        """Time of the call, on the monotonic clock."""
        self.slot: Slot | None = None
        """The shared memory that the call is in."""
        self._queue = owner
        self._result = result
        self._done = False
        self._error: Exception | None = None
        self._execution: Execution | StreamEvent | None = None
        self._baton: threading.Lock | None = None
        """The lock that waiting threads sleep on, if there are any. It is held until the collective has ended."""

    @classmethod
    def ended(cls, value: T) -> NamedHandle[T]:
        """Return a handle of a call that needed no collective."""
        handle = cls(None, "", Request("nothing", [], [], ""), Work([], True, []), lambda _: value)
        handle.complete()
        return handle

    @property
    def label(self) -> str:
        """The call in words: ``allreduce 'loss'``."""
        return f"{self.request.kind} {self.name!r}"

    def poll(self) -> bool:
        """Return whether :meth:`wait` would not block; on a GPU, this includes that the device has finished."""
        if not self._done:
            self._owner.wait_for(self, 0)
            self._owner.flush()
            return self._done
        return not isinstance(self._execution, StreamEvent) or self._execution.passed()

    def wait(self, timeout: float | None = None) -> T:
        """Block until the collective has ended, and return its result. You may call it again.

        For tensors on a GPU, the current stream waits and not the host.

        Args:
            timeout: Seconds; None: only the stall timeout and that of the process group apply.

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
                self._owner.wait_for(self, timeout)
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

    def _finish(self, execution: Execution | StreamEvent) -> None:
        if isinstance(execution, StreamEvent):
            execution.wait(self.work.results)
            return
        try:
            self._owner.finish(self, execution)
        except CollectiveError as error:
            raise self._owner.explained(self, error) from error

    synchronize = wait

    def __call__(self) -> T:
        """Do the same as :meth:`wait`, as Horovod's sparse_allreduce_async needs."""
        return self.wait()

    def complete(self, outcome: Execution | StreamEvent | None = None, error: Exception | None = None) -> None:
        """Record that the collective has ended; its queue calls this once."""
        if self._done:
            return
        self._execution = outcome
        self._error = error
        self._done = True
        if self._baton is not None:
            self._release_waiters()

    def _sleep(self, seconds: float) -> bool:
        """Wait until the collective has ended; return whether it has. -1 means no limit."""
        with _making:
            if self._baton is None:
                baton = threading.Lock()
                baton.acquire()
                self._baton = baton
        # Whoever ends the collective sets `_done` and then looks for the baton: one of the two threads sees the other.
        ended = self._done or self._baton.acquire(timeout=seconds)
        if ended:
            self._release_waiters()
        return ended

    def _release_waiters(self) -> None:
        assert self._baton is not None
        with contextlib.suppress(RuntimeError):  # two threads release it at the same time
            self._baton.release()

    @property
    def _owner(self) -> Owner:
        assert self._queue is not None
        return self._queue

    @property
    def done(self) -> bool:
        """Whether the queue has nothing left to do for the call."""
        return self._done


class StreamEvent:
    """A point in the current stream of a CUDA device that other streams of that device can wait for.

    The device need not be the current one: a new thread starts with device 0.
    """

    finished = False
    """Every stream that uses the results has to wait."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event = event
        self._device = device

    @classmethod
    def now(cls, device: torch.device) -> StreamEvent:
        """Return the current point of a device's current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return cls(event, device)

    def passed(self) -> bool:
        """Return whether the device has reached this point."""
        return bool(self._event.query())

    def wait(self, tensors: list[torch.Tensor]) -> None:
        """Let the device's current stream wait, and tell the allocator that this stream uses `tensors`."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(stream)
