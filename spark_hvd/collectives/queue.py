"""A rank's collectives by name on one process set: submitted, negotiated, then run as the coordinator decides.

Calls come from the user's threads, decisions from the engine's. A queue knows no socket: what is to be told to the
coordinator gathers in an outbox, which whoever is about to wait sends, else the engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from spark_hvd.collectives.execution import Execution, Work
from spark_hvd.collectives.fusion import Planner
from spark_hvd.collectives.handle import NamedHandle, Owner
from spark_hvd.collectives.members import Members
from spark_hvd.collectives.messages import AllJoined, Decision, Fail, Gone, Learn, Recall, Request, Run, RunKnown, Tune
from spark_hvd.collectives.names import KnownCalls, Unnamed, slot_use
from spark_hvd.collectives.runs import Runs
from spark_hvd.collectives.tracing import Tracing
from spark_hvd.collectives.underway.failure import QueueFailure, error_of
from spark_hvd.collectives.underway.outgoing import OutgoingCalls, QueueLink
from spark_hvd.collectives.underway.rounds import MemoryRounds, RoundsOwner
from spark_hvd.world import errors
from spark_hvd.world.activity import Source, activity
from spark_hvd.world.errors import CollectiveError
from spark_hvd.world.vitals import Underway

T = TypeVar("T")

_DUPLICATE = {False: errors.DuplicateNameError, True: errors.HorovodDuplicateNameError}


class NegotiatedQueue(Owner, RoundsOwner[NamedHandle[Any]], Source):
    """See the module's description.

    Args:
        members: Of the process set.
        link: To the coordinator.
        tracing: The process' timeline.
        fusion_threshold: Bytes up to which collectives travel together.
        horovod: Whether errors are Horovod's.
    """

    def __init__(
        self,
        members: Members,
        link: QueueLink[NegotiatedQueue],
        tracing: Tracing,
        fusion_threshold: int,
        horovod: bool = False,
    ) -> None:
        self.members = members
        self.ranks = members.ranks
        self.communicator = members.communicator
        self._link = link
        self._duplicate = _DUPLICATE[horovod]
        self.tracing = tracing
        # Held over look and change of all that follows: a loss finds each call among the handles, or the call finds
        # the loss; what is in the outbox is under its name, and has one place there.
        self._lock = threading.Lock()
        self._handles: dict[str, NamedHandle[Any]] = {}
        self._unnamed = Unnamed()
        self._known = KnownCalls()
        self._outgoing = OutgoingCalls[Request]()
        self._joining: NamedHandle[int] | None = None
        self.memory = MemoryRounds[NamedHandle[Any]](members.slots, self._lock, self)
        """Calls of which the coordinator need not know."""
        self._failure = QueueFailure()
        self.peer_lost = False
        """Whether a rank has vanished, so that what is in flight will probably fail."""
        self.left_unfinished = False
        """Whether a rank has left without its part of collectives that were begun here, perhaps on the device."""
        # The engine's thread only.
        self.planner = Planner(fusion_threshold)
        self._runs = Runs(members, tracing, self._release, self._cannot_run)
        activity.add_source(self)

    # ---- the user's threads ---------------------------------------------------------------------------------------

    def submit(
        self, name: str | None, request: Request, work: Work, result: Callable[[Work], T], *, urgent: bool = False
    ) -> NamedHandle[T]:
        """Be ready for a collective.

        Args:
            name: None: the next of the made-up names, so that such calls match by their order.
            request: What to tell of it.
            work: My tensors.
            result: Makes the handle's result.
            urgent: Whether the caller is about to wait for it, which sends it at once.

        Raises:
            DuplicateNameError: The name is under way.
            CollectiveError: A rank has gone.
            TypeError: The name is no string.
        """
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name={name!r}: expected a string or None, got {type(name).__name__}.")
        with self._lock:
            self._failure.require_none()
            if name is None:
                name = self._unnamed.name(request.kind, self._handles)
            handle = NamedHandle(self, name, request, work, result)
            first = self._put(handle, self._known.bit(name, request))
        return self._told(handle, first, urgent)

    def again(
        self,
        name: str,
        tensor: torch.Tensor,
        reducing: tuple[object, ...],
        result: Callable[[Work], T],
        *,
        in_place: bool,
        urgent: bool,
    ) -> NamedHandle[T] | None:
        """:meth:`submit` for an allreduce of one tensor, quicker if it was called in just this way before.

        Args:
            name: Its name.
            tensor: My tensor.
            reducing: Operation and scales.
            result: As for :meth:`submit`.
            in_place: Whether the result is `tensor` itself.
            urgent: As for :meth:`submit`.

        Returns:
            None if the name has no number, or the call is another than the number stands for.

        Raises:
            DuplicateNameError, CollectiveError: As for :meth:`submit`.
        """
        known = self._known.as_before(name, tensor, reducing)
        if known is None:
            return None
        with self._lock:
            if self._failure.text is not None:  # not by another function, as below: such calls are many
                self._failure.require_none()
            handle = NamedHandle(self, name, known.request, Work((tensor,), in_place, []), result)
            slot = known.slot
            if slot is None or slot.closed or self.tracing.recorder is not None:
                first = self._put(handle, known.bit)
            else:
                if name in self._handles:
                    self._require_free(name, "allreduce")
                handle.since = activity.enter("allreduce", known.title)
                first = self.memory.begin(handle, slot, urgent=urgent)
                self._handles[name] = handle
                if first:
                    self._link.notify(self)
                return handle
        return self._told(handle, first, urgent)

    def _require_free(self, name: str, kind: str) -> None:
        other = self._handles.get(name)
        if other is None or other.done:
            return
        self.memory.settle(other)
        if not other.done:
            raise self._duplicate(
                f"{kind} {name!r} was called while {other.label} is still under way on this rank; wait for its handle "
                "first, or use another name."
            )

    def _put(self, handle: NamedHandle[Any], known_as: int) -> bool:
        """Put a call into the outbox; returns whether it was empty."""
        name = handle.name
        self._require_free(name, handle.request.kind)
        self.memory.close(name)
        self._handles[name] = handle
        first = not self._outgoing
        self._outgoing.put(name, handle.request, known_as)
        return first

    def _told(self, handle: NamedHandle[T], first: bool, urgent: bool) -> NamedHandle[T]:
        handle.since = activity.enter(handle.request.kind, repr(handle.name))
        if self.tracing.recorder is not None:
            self.tracing.called(handle)
        if first and not urgent:
            self._link.notify(self)
        return handle

    def join(self, counts: bool, device: torch.device | None) -> NamedHandle[int]:
        """Have no more data, and stand in on a GPU. The handle's result is the last rank to join, as in the world."""
        with self._lock:
            self._failure.require_none()
            if self._joining is not None:
                raise self._duplicate("join() was called while another join() of this rank is under way.")
            last = Work([], in_place=True, results=[], received=[])
            handle = self._joining = NamedHandle(self, "join", Request("join", [], [], ""), last, _last)
            self.memory.recall(self.memory.ids)
        self.flush()
        handle.since = activity.enter(handle.request.kind, repr(handle.name))
        self._runs.device = device
        self._link.join(self, counts)
        return handle

    def flush(self) -> None:
        """See base class."""
        self.memory.publish()
        if self._outgoing:
            self._link.post(self)

    def meet(self, handle: NamedHandle[Any], timeout: float | None) -> None:
        """See base class."""
        self.memory.meet(handle, timeout)

    def underway(self, now: float) -> list[Underway]:
        """See base class."""
        if self._failure.text is not None:
            return []
        ranks, joining = tuple(self.ranks), [] if self._joining is None else [self._joining]
        return [
            Underway(handle.label, now - handle.since, ranks)
            for handle in [*self._handles.copy().values(), *joining]
            if not handle.done and handle.since
        ]

    def take(self) -> tuple[int, list[tuple[str, Request]]]:
        """Empty the outbox: the numbers of known names as bits, and the other names with their requests."""
        self.memory.publish()
        with self._lock:
            return self._outgoing.take()

    def finish(self, handle: NamedHandle[Any], execution: Execution) -> None:
        """See base class."""
        if self.tracing.recorder is None or execution.finished:
            execution.finish()
            return
        started_ns = time.monotonic_ns()
        execution.finish()
        self.tracing.finished(handle, started_ns)

    def explained(self, handle: NamedHandle[Any], error: CollectiveError) -> CollectiveError:
        """See base class."""
        return self._failure.explains(handle.label, error)

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def apply(self, decisions: Sequence[Decision]) -> None:
        """Do what the coordinator has decided."""
        for decision in decisions:
            if isinstance(decision, RunKnown):
                self.memory.has_run(decision.ids)
                self._runs.start(self.planner.batches_of_known(decision.ids), self._handles)
            elif isinstance(decision, Run):
                self._runs.start(self.planner.batches(decision.entries), self._handles)
            elif isinstance(decision, Learn):
                self._learn(decision)
            elif isinstance(decision, Recall):
                with self._lock:
                    self.memory.recall(decision.ids)
            elif isinstance(decision, Fail):
                self._fail(decision)
            elif isinstance(decision, AllJoined):
                self._joined(decision.last)
            elif isinstance(decision, Tune):
                self.planner.tune(decision.fusion_threshold)
                self._duplicate = _DUPLICATE[decision.horovod]
            elif isinstance(decision, Gone):
                self.gone(decision.text)
                self.members.on_loss(decision.rank, decision.text)
                if decision.done is None:
                    self._mark_peer_lost()
                else:
                    self.abandon(decision.done)
                    if self._runs.begun > decision.done:
                        self.left_unfinished = True
                        self._link.peer_lost(self)

    def resume(self) -> None:
        """A collective of several rounds may be able to go on."""
        self._runs.resume()

    def gone(self, text: str) -> None:
        """Nothing can start any more: a rank has gone, or this one leaves."""
        with self._lock:
            if self._failure.text is not None:
                return
            self._failure.text = text
            joining, self._joining = self._joining, None
            self.memory.gone()
        self._failure.announce()
        for handle in [*self._handles.values(), *([joining] if joining else [])]:
            if not self._runs.has(handle):
                handle.complete(error=self._failure.of(handle.label))

    def vanished(self) -> None:
        """The coordinator's connection has ended."""
        if self._failure.text is None:
            text = (
                f"rank {self.ranks[0]}, which coordinates, has ended without a word, or cannot be reached any more. "
                "Its own output and exit code say why."
            )
            self.gone(text)
            self.members.on_loss(self.ranks[0], text)
            self._mark_peer_lost()

    def _mark_peer_lost(self) -> None:
        self.peer_lost = True
        self._link.peer_lost(self)

    def aborted(self, text: str) -> None:
        """The world has ended: nothing in flight can succeed any more."""
        self.gone(text)
        self.peer_lost = True
        self.abandon()

    def forked(self, text: str) -> None:
        """End all calls in a process that this rank has forked: it has no engine, so nobody may wait for one."""
        self._lock = threading.Lock()
        self._failure.forked()
        self.memory = MemoryRounds(None, self._lock, self)
        self.aborted(text)

    def abandon(self, done: int = 0) -> None:
        """Fail what has started too, after the first `done` batches: it waits for a rank that is gone."""
        for handle in self._runs.abandon(done):
            handle.complete(error=self._failure.of(handle.label))

    def give_up(self) -> None:
        """Stop waiting for what is in flight: after this moment it can no longer succeed."""
        if self.peer_lost:
            self.abandon()
            self.abort()
        if self.members.nccl is not None:
            self.members.nccl.abort_soon()

    def abort(self) -> None:
        """End the Gloo connections to the other members: what is under way fails, here and there. From any thread."""
        if self.members.connections is not None:
            self.members.connections.abort()

    @property
    def done(self) -> int:
        """The number of batches of which this rank has done its part: the others can end them without it."""
        return self._runs.done

    @property
    def unfinished(self) -> bool:
        """Whether collectives are under way on the wire; from any thread."""
        return self._runs.unfinished

    def _learn(self, decision: Learn) -> None:
        self.planner.learn(decision.id, decision.entry)
        name = decision.entry.name
        with self._lock:
            slot = self.memory.learn(decision.id, slot_use(decision.entry))
            handle = self._handles.get(name)
            if handle is not None:  # a rank that has joined has no request of its own
                self._known.learn(handle, 1 << decision.id, slot)

    def withdrawn(self, handle: NamedHandle[Any]) -> None:
        """See base class."""
        self._outgoing.put(handle.name, handle.request, self._known.bit(handle.name, handle.request))
        self._link.notify(self)

    def watch(self) -> None:
        """See base class."""
        self._link.look_later(self)

    def forget(self, handles: Sequence[NamedHandle[Any]]) -> None:
        """See base class."""
        for handle in handles:
            if self._handles.get(handle.name) is handle:
                del self._handles[handle.name]

    def _fail(self, decision: Fail) -> None:
        if decision.places is not None and self.members.place not in decision.places:
            return
        for name in decision.names:
            handle = self._handles.get(name)
            if handle is not None and not handle.done and not self._runs.has(handle):
                self._release([handle])
                handle.complete(error=error_of(decision.error, decision.text))

    def _joined(self, last: int) -> None:
        with self._lock:
            joining, self._joining = self._joining, None
            self._unnamed.joined()  # all ranks read this between the same two decisions
        if joining is not None:
            joining.work.received = [last]
            joining.complete()

    def _cannot_run(self, text: str) -> None:
        self._link.failed(self, text)

    def _release(self, handles: Sequence[NamedHandle[Any]]) -> None:
        """Free the names of handles."""
        with self._lock:
            self.forget(handles)


def _last(work: Work) -> int:
    assert work.received
    return work.received[0]
