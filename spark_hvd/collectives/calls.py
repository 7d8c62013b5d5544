"""The calls that a rank's user threads make on a process set: names them, recognises repeated ones, and sends them.

A call goes into the memory that ranks of one host share, or into the outbox for the coordinator. A call without a name
may first have to wait until a generated name is free. None of this blocks on another rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from spark_hvd.collectives.execution import Work
from spark_hvd.collectives.handle import NamedHandle, Owner, StreamEvent
from spark_hvd.collectives.members import Members
from spark_hvd.collectives.messages import Request
from spark_hvd.collectives.names import How, KnownCalls, Unnamed
from spark_hvd.collectives.pending.failure import QueueFailure
from spark_hvd.collectives.pending.outgoing import DeferredCalls, OutgoingCalls, QueueLink
from spark_hvd.collectives.pending.rounds import MemoryRounds, RoundsOwner
from spark_hvd.collectives.pending.use import SlotUse
from spark_hvd.collectives.tracing import Tracing
from spark_hvd.world import errors
from spark_hvd.world.activity import activity

T = TypeVar("T")

DUPLICATE = {False: errors.DuplicateNameError, True: errors.HorovodDuplicateNameError}


class Calls(Owner, RoundsOwner[NamedHandle[Any]]):
    """The calls of one queue that have not been handed to the engine's thread yet."""

    def __init__(self, members: Members, link: QueueLink[Any], tracing: Tracing, horovod: bool) -> None:
        self._link = link
        self._duplicate = DUPLICATE[horovod]
        self.tracing = tracing
        # Held whenever the fields below are read and then changed. So if a rank is lost, either the loss finds a call
        # among the handles, or the call finds the loss. A name is in the outbox at most once.
        self._lock = threading.Lock()
        self._handles: dict[str, NamedHandle[Any]] = {}
        self._unnamed = Unnamed()
        self._known = KnownCalls()
        self._outgoing = OutgoingCalls[Request]()
        self._deferred = DeferredCalls[NamedHandle[Any]]()
        self.memory = MemoryRounds[NamedHandle[Any]](members.slots, self._lock, self)
        """Calls that the coordinator need not know about."""
        self._failure = QueueFailure()

    def submit(
        self, name: str | None, request: Request, work: Work, result: Callable[[Work], T], *, urgent: bool = False
    ) -> NamedHandle[T]:
        """Register that this rank is ready for a collective.

        Calls without a name match by their order and get generated names. If such a name is still in use, the call is
        deferred, but the caller does not wait. ``urgent`` calls are sent at once, because the caller is about to wait.

        Raises:
            DuplicateNameError: The name is in use.
            CollectiveError: A rank has gone.
            TypeError: The name is not a string.
        """
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name={name!r}: expected a string or None, got {type(name).__name__}.")
        with self._lock:
            self._failure.require_none()
            called = self._unnamed.take(request.kind, self._handles) if name is None else name
            ready = StreamEvent.now(work.tensors[0].device) if request.on_gpu else None
            handle = NamedHandle(self, called, request, work, result, ready)
            first = False
            if name is None and (called in self._deferred or self._is_in_flight(called)):
                self._deferred.put(called, handle)
            else:
                first = self._put(handle)
        return self._announce(handle, first, urgent)

    def again(
        self,
        kind: str,
        name: str | None,
        tensor: torch.Tensor | None,
        how: How,
        result: Callable[[Work], T],
        *,
        in_place: bool,
        urgent: bool,
    ) -> NamedHandle[T] | None:
        """Do :meth:`submit` for a call that this rank has made in the same way before, of `tensor` or of none.

        ``how`` is the result of :func:`spark_hvd.collectives.names.how_of`.

        Returns:
            None if the name has no number, or if the number stands for a different call.
        """
        if name is not None and type(name) is not str:
            return None
        with self._lock:
            called = self._unnamed.next(kind) if name is None else name
            known = self._known.as_before(called, tensor, how)
            if known is None:
                return None
            if in_place and tensor is not None and not tensor.is_contiguous() and 0 in tensor.stride():
                return None  # tensors made by expand() are refused on the slower path
            if self._failure.text is not None:  # inlined for speed, as this path is hot
                self._failure.require_none()
            if name is None:
                if called in self._deferred or (called in self._handles and self._is_in_flight(called)):
                    return None
                self._unnamed.take(kind, self._handles)
            tensors = () if tensor is None else (tensor,)
            ready = StreamEvent.now(known.device) if known.device is not None and known.request.on_gpu else None
            handle = NamedHandle(self, called, known.request, Work(tensors, in_place, []), result, ready)
            slot = known.slot
            if slot is None or slot.closed or self.tracing.recorder is not None:
                first = self._put(handle)
            else:
                if called in self._handles:
                    self._require_free(called, kind)
                handle.since = activity.enter(kind, known.title)
                first = self.memory.begin(handle, slot, urgent=urgent)
                self._handles[called] = handle
                if first:
                    self._link.notify(self)
                return handle
        return self._announce(handle, first, urgent)

    def _is_in_flight(self, name: str) -> bool:
        other = self._handles.get(name)
        if other is None or other.done:
            return False
        self.memory.settle(other)
        return not other.done

    def _require_free(self, name: str, kind: str) -> None:
        if self._is_in_flight(name):
            raise self._duplicate(
                f"{kind} {name!r} was called while {self._handles[name].label} is still under way on this rank; wait "
                "for its handle first, or use another name."
            )

    def _put(self, handle: NamedHandle[Any]) -> bool:
        """Put a call into the outbox; returns whether it was empty."""
        name, request = handle.name, handle.request
        self._require_free(name, request.kind)
        self.memory.close(name)
        self._handles[name] = handle
        first = not self._outgoing
        self._outgoing.put(name, request, self._known.bit(name, request))
        return first

    def _put_deferred(self) -> None:
        """Move deferred calls whose names are free now into the outbox; under the lock."""
        for handle in self._deferred.take(lambda name: not self._is_in_flight(name)):
            self._put(handle)

    def _announce(self, handle: NamedHandle[T], first: bool, urgent: bool) -> NamedHandle[T]:
        handle.since = activity.enter(handle.request.kind, repr(handle.name))
        if self.tracing.recorder is not None:
            self.tracing.called(handle)
        if first and not urgent:
            self._link.notify(self)
        return handle

    def flush(self) -> None:
        self.memory.publish()
        if self._outgoing or self._deferred:
            self._link.post(self)

    def wait_for(self, handle: NamedHandle[Any], timeout: float | None) -> None:
        self.memory.wait_for(handle, timeout)

    def take(self) -> tuple[int, list[tuple[str, Request]]]:
        """Empty the outbox; return the numbers of known names as bits, and the other names with their requests."""
        self.memory.publish()
        with self._lock:
            if self._deferred:
                self._put_deferred()
            return self._outgoing.take()

    def withdrawn(self, handle: NamedHandle[Any]) -> None:
        self._outgoing.put(handle.name, handle.request, self._known.bit(handle.name, handle.request))
        self._link.notify(self)

    def watch(self) -> None:
        self._link.check_later(self)

    def learn(self, id: int, use: SlotUse | None, name: str) -> None:
        """Record that a name has a number; it may also get a slot."""
        with self._lock:
            slot = self.memory.learn(id, use)
            handle = self._handles.get(name)
            if handle is not None:  # None if this rank has joined: then it has no request
                self._known.learn(handle, 1 << id, slot)

    def forget(self, handles: Sequence[NamedHandle[Any]]) -> None:
        self._free(handles)
        if self._deferred:
            self._link.notify(self)

    def release(self, handles: Sequence[NamedHandle[Any]]) -> None:
        """Free the names of these handles, whose calls by way of the coordinator have ended."""
        with self._lock:
            self._free(handles)
        if self._deferred:
            self._link.notify(self)

    def _free(self, handles: Sequence[NamedHandle[Any]]) -> None:
        for handle in handles:
            if self._handles.get(handle.name) is handle:
                del self._handles[handle.name]
