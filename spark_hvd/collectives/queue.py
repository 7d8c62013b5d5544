"""A rank's named collectives on one process set: submitted, negotiated, then run as the coordinator decides.

Calls come from the user's threads, decisions from the engine's thread. A queue knows no sockets: messages for the
coordinator collect in an outbox. A thread that is about to wait sends the outbox; otherwise the engine does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from spark_hvd.collectives.calls import DUPLICATE, Calls
from spark_hvd.collectives.execution import Execution, Work
from spark_hvd.collectives.fusion import Planner
from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.members import Members
from spark_hvd.collectives.messages import AllJoined, Decision, Fail, Gone, Learn, Recall, Request, Run, RunKnown, Tune
from spark_hvd.collectives.names import slot_use
from spark_hvd.collectives.pending.failure import error_of
from spark_hvd.collectives.pending.outgoing import QueueLink
from spark_hvd.collectives.pending.rounds import MemoryRounds
from spark_hvd.collectives.runs import Runs
from spark_hvd.collectives.tracing import Tracing
from spark_hvd.world.activity import Source, activity
from spark_hvd.world.errors import CollectiveError
from spark_hvd.world.vitals import PendingCollective


class NegotiatedQueue(Calls, Source):
    """The collectives of one process set on this rank.

    Up to ``fusion_threshold`` bytes are sent together. With ``horovod``, errors are Horovod's.
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
        super().__init__(members, link, tracing, horovod)
        self._joining: NamedHandle[int] | None = None
        self.peer_lost = False
        """Whether a rank has vanished, so that collectives in flight will probably fail."""
        self.left_unfinished = False
        """Whether a rank left before its part in collectives that began here, perhaps on the device."""
        # Used by the engine's thread only.
        self.planner = Planner(fusion_threshold)
        self._runs = Runs(members, tracing, self.release, self._cannot_run)
        activity.add_source(self)

    # ---- the user's threads ---------------------------------------------------------------------------------------

    def join(self, counts: bool, device: torch.device | None) -> NamedHandle[int]:
        """Declare that this rank has no more data. The handle's result is the last rank to join, as in the world."""
        with self._lock:
            self._failure.require_none()
            if self._joining is not None:
                raise self._duplicate("join() was called while another join() of this rank is under way.")
            last = Work([], in_place=True, results=[], received=[])
            handle = self._joining = NamedHandle(self, "join", Request("join", [], [], ""), last, _last)
        # Once this rank has joined, a name stands for the other ranks' calls, to which this rank contributes zeros. So
        # no call of its own may be left: none that waits for a name, and none in memory. A call there that all ranks
        # have entered ends only once the rank that tries to withdraw has seen that all have.
        left: list[NamedHandle[Any]] | None = None
        while left != []:
            with self._lock:
                self.memory.recall(self.memory.ids)
                self._put_deferred()
                left = [*self.memory.in_flight, *(self._handles[name] for name in self._deferred.names)]
            self.flush()
            for other in left:
                with contextlib.suppress(Exception):  # the error belongs to the caller, who waits for the handle too
                    other.wait()
        handle.since = activity.enter(handle.request.kind, repr(handle.name))
        self._runs.device = device
        self._link.join(self, counts)
        return handle

    def pending(self, now: float) -> list[PendingCollective]:
        if self._failure.text is not None:
            return []
        ranks, joining = tuple(self.ranks), [] if self._joining is None else [self._joining]
        return [
            PendingCollective(handle.label, now - handle.since, ranks)
            for handle in [*self._handles.copy().values(), *self._deferred.handles, *joining]
            if not handle.done and handle.since
        ]

    def finish(self, handle: NamedHandle[Any], execution: Execution) -> None:
        if self.tracing.recorder is None or execution.finished:
            execution.finish()
            return
        started_ns = time.monotonic_ns()
        execution.finish()
        self.tracing.finished(handle, started_ns)

    def explained(self, handle: NamedHandle[Any], error: CollectiveError) -> CollectiveError:
        return self._failure.explains(handle.label, error)

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def apply(self, decisions: Sequence[Decision]) -> None:
        """Carry out the coordinator's decisions."""
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
                self._duplicate = DUPLICATE[decision.horovod]
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
        """Continue a collective of several rounds, if its round has ended."""
        self._runs.resume()

    def gone(self, text: str) -> None:
        """Start nothing more: a rank is gone, or this one leaves."""
        with self._lock:
            if self._failure.text is not None:
                return
            self._failure.text = text
            joining, self._joining = self._joining, None
            self.memory.abandon()
            deferred = self._deferred.clear()
        self._failure.announce()
        for handle in [*self._handles.values(), *deferred, *([joining] if joining else [])]:
            if not self._runs.has(handle):
                handle.complete(error=self._failure.of(handle.label))

    def vanished(self) -> None:
        """Handle the end of the coordinator's connection."""
        if self._failure.text is None:
            text = (
                f"rank {self.ranks[0]}, which coordinates, has ended without notice, or can no longer be reached. "
                "See its own output and exit code for the cause."
            )
            self.gone(text)
            self.members.on_loss(self.ranks[0], text)
            self._mark_peer_lost()

    def _mark_peer_lost(self) -> None:
        self.peer_lost = True
        self._link.peer_lost(self)

    def aborted(self, text: str) -> None:
        """Fail everything in flight: the world has ended."""
        self.gone(text)
        self.peer_lost = True
        self.abandon()

    def forked(self, text: str) -> None:
        """End all calls in a forked process: it has no engine, so nobody may wait for one."""
        self._lock = threading.Lock()
        self._failure.forked()
        self.memory = MemoryRounds(None, self._lock, self)
        self.aborted(text)

    def abandon(self, done: int = 0) -> None:
        """Fail started batches too, except the first `done`: they wait for a rank that is gone."""
        for handle in self._runs.abandon(done):
            handle.complete(error=self._failure.of(handle.label))

    def give_up(self) -> None:
        """Stop waiting for collectives in flight: they can no longer succeed."""
        if self.peer_lost:
            self.abandon()
            self.abort()
        if self.members.nccl is not None:
            self.members.nccl.abort_soon()

    def abort(self) -> None:
        """End the Gloo connections to the other members: collectives in flight fail on both sides. From any thread."""
        if self.members.connections is not None:
            self.members.connections.abort()

    @property
    def done(self) -> int:
        """Number of batches to which this rank has contributed: the others can finish those without it."""
        return self._runs.done

    @property
    def unfinished(self) -> bool:
        """Whether collectives are in flight on the wire; from any thread."""
        return self._runs.unfinished

    def _learn(self, decision: Learn) -> None:
        self.planner.learn(decision.id, decision.entry)
        self.learn(decision.id, slot_use(decision.entry, self.ranks), decision.entry.name)

    def _fail(self, decision: Fail) -> None:
        if decision.places is not None and self.members.place not in decision.places:
            return
        for name in decision.names:
            handle = self._handles.get(name)
            if handle is not None and not handle.done and not self._runs.has(handle):
                self.release([handle])
                handle.complete(error=error_of(decision.error, decision.text))

    def _joined(self, last: int) -> None:
        with self._lock:
            joining, self._joining = self._joining, None
            self._unnamed.joined()  # all ranks read this decision at the same point of the stream
        if joining is not None:
            joining.work.received = [last]
            joining.complete()

    def _cannot_run(self, text: str) -> None:
        self._link.failed(self, text)


def _last(work: Work) -> int:
    assert work.received
    return work.received[0]
