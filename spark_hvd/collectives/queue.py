"""A rank's collectives by name on one process set: submitted, negotiated, then run as the coordinator decides.

Calls come from the user's threads, decisions from the engine's. A queue knows no socket: what is to be told to the
coordinator gathers in an outbox, which whoever is about to wait sends, else the engine.
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
from spark_hvd.collectives.runs import Runs
from spark_hvd.collectives.tracing import Tracing
from spark_hvd.collectives.underway.failure import error_of
from spark_hvd.collectives.underway.outgoing import QueueLink
from spark_hvd.collectives.underway.rounds import MemoryRounds
from spark_hvd.world.activity import Source, activity
from spark_hvd.world.errors import CollectiveError
from spark_hvd.world.vitals import Underway


class NegotiatedQueue(Calls, Source):
    """See the module's description.

    Collectives travel together up to ``fusion_threshold`` bytes. With ``horovod``, errors are Horovod's.
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
        """Whether a rank has vanished, so that what is in flight will probably fail."""
        self.left_unfinished = False
        """Whether a rank has left without its part of collectives that were begun here, perhaps on the device."""
        # The engine's thread only.
        self.planner = Planner(fusion_threshold)
        self._runs = Runs(members, tracing, self.release, self._cannot_run)
        activity.add_source(self)

    # ---- the user's threads ---------------------------------------------------------------------------------------

    def join(self, counts: bool, device: torch.device | None) -> NamedHandle[int]:
        """Have no more data, and stand in on a GPU. The handle's result is the last rank to join, as in the world."""
        with self._lock:
            self._failure.require_none()
            if self._joining is not None:
                raise self._duplicate("join() was called while another join() of this rank is under way.")
            last = Work([], in_place=True, results=[], received=[])
            handle = self._joining = NamedHandle(self, "join", Request("join", [], [], ""), last, _last)
        # Once this rank has joined, a name stands for what others call, and this rank for zeros. So nothing may be
        # left: no call that waits for a name, and none in memory, where one to which all have come ends only when the
        # rank has looked that tries to withdraw from it.
        left: list[NamedHandle[Any]] | None = None
        while left != []:
            with self._lock:
                self.memory.recall(self.memory.ids)
                self._put_deferred()
                left = [*self.memory.under_way, *(self._handles[name] for name in self._deferred.names)]
            self.flush()
            for other in left:
                with contextlib.suppress(Exception):  # it is the caller's, who waits for it too
                    other.wait()
        handle.since = activity.enter(handle.request.kind, repr(handle.name))
        self._runs.device = device
        self._link.join(self, counts)
        return handle

    def underway(self, now: float) -> list[Underway]:
        if self._failure.text is not None:
            return []
        ranks, joining = tuple(self.ranks), [] if self._joining is None else [self._joining]
        return [
            Underway(handle.label, now - handle.since, ranks)
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
            deferred = self._deferred.clear()
        self._failure.announce()
        for handle in [*self._handles.values(), *deferred, *([joining] if joining else [])]:
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
            self._unnamed.joined()  # all ranks read this between the same two decisions
        if joining is not None:
            joining.work.received = [last]
            joining.complete()

    def _cannot_run(self, text: str) -> None:
        self._link.failed(self, text)


def _last(work: Work) -> int:
    assert work.received
    return work.received[0]
