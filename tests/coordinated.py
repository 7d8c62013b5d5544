"""A coordinator of three ranks, and helpers that submit to it, read its decisions, and apply them as a rank does."""

from __future__ import annotations

from collections.abc import Sequence

from spark_hvd.collectives.messages import (
    AllJoined,
    Decision,
    Entry,
    Fail,
    Learn,
    Request,
    Run,
    RunKnown,
    bits,
)
from spark_hvd.engine.coordinator import Coordinator

USUAL = Request("allreduce", ["float32"], [[3]], "cpu", "SUM")
OTHER = USUAL._replace(shapes=[[4]])


def three(capacity: int = 1024, stall_timeout: float | None = None) -> Coordinator:
    # Ranks of the world other than their places, so that texts can be told from places.
    return Coordinator([1, 4, 6], capacity, stall_timeout)


def fresh(to: Coordinator, place: int, *names: str, request: Request = USUAL, now: float = 0.0) -> list[Decision]:
    return to.submitted(place, 0, [(name, request) for name in names], now)


def by_number(to: Coordinator, place: int, *ids: int, now: float = 0.0) -> list[Decision]:
    return to.submitted(place, sum(1 << id for id in ids), [], now)


def round_of(to: Coordinator, *names: str, request: Request = USUAL) -> list[Decision]:
    """Mark these names as ready on all ranks, rank 0 first."""
    return [decision for place in range(3) for decision in fresh(to, place, *names, request=request)]


def numbered(*names: str, request: Request = USUAL, stall_timeout: float | None = None) -> Coordinator:
    """Return a coordinator that has numbered these names, from 0."""
    to = three(stall_timeout=stall_timeout)
    round_of(to, *names, request=request)
    round_of(to, *names, request=request)
    return to


def works_by_number(to: Coordinator, id: int) -> bool:
    return [by_number(to, place, id) for place in range(3)] == [[], [], [RunKnown(1 << id)]] and not to.has_waiting


def run_names(decisions: Sequence[Decision]) -> list[str]:
    return [entry.name for decision in decisions if isinstance(decision, Run) for entry in decision.entries]


def failure(decisions: Sequence[Decision]) -> Fail:
    (fail,) = decisions
    assert isinstance(fail, Fail)
    return fail


def gather(*rows: int) -> Request:
    return Request("allgather", ["float32"] * len(rows), [[count, 2] for count in rows], "cpu")


def splits(*counts: int) -> Request:
    return Request("alltoall", ["float32"], [[sum(counts), 2]], "cpu", splits=list(counts))


class Calls:
    """Does what spark_hvd.collectives.queue.NegotiatedQueue does for a rank, without tensors."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.calls: dict[str, Request] = {}
        """Those under way."""
        self.joining = False
        self.joins = 0
        self._known: dict[str, tuple[Request, int]] = {}
        self._entries: list[Entry] = []
        self._ids = 0
        self._fresh: list[tuple[str, Request]] = []

    def end(self, name: str, outcome: Entry | Fail) -> None:
        """Note that a call may run, or has failed."""

    def submit(self, name: str, request: Request) -> None:
        """Mark a collective as ready."""
        self.calls[name] = request
        known, bit = self._known.get(name, (None, 0))
        if known == request:
            self._ids |= bit
        else:
            self._fresh.append((name, request))

    def take(self) -> tuple[int, list[tuple[str, Request]]]:
        """Return the messages to the coordinator, once."""
        told = self._ids, self._fresh
        self._ids, self._fresh = 0, []
        return told

    def take_in(self, decision: Decision) -> None:
        """Apply the coordinator's decisions."""
        if isinstance(decision, Learn):
            assert decision.id <= len(self._entries)
            self._entries[decision.id : decision.id + 1] = [decision.entry]
            if decision.entry.name in self.calls:
                self._known[decision.entry.name] = self.calls[decision.entry.name], 1 << decision.id
        elif isinstance(decision, RunKnown):
            for id in bits(decision.ids):
                self._run(self._entries[id])
        elif isinstance(decision, Run):
            for entry in decision.entries:
                self._run(entry)
        elif isinstance(decision, Fail):
            for name in decision.names:
                mine = decision.places is None or self.place in decision.places
                if mine and self.calls.pop(name, None) is not None:
                    self.end(name, decision)
        elif isinstance(decision, AllJoined):
            assert self.joining
            self.joining = False
            self.joins += 1

    def _run(self, entry: Entry) -> None:
        mine = self.calls.pop(entry.name, None)
        if self.place in (entry.absent or ()):
            assert mine is None
            assert self.joining
            assert entry.table is None or not any(entry.table[self.place])
            return
        assert mine is not None
        self.end(entry.name, entry)
        if entry.table is None:
            assert mine == entry.request
        else:
            rows = mine.splits if mine.kind == "alltoall" else [shape[0] if shape else 1 for shape in mine.shapes]
            assert entry.table[self.place] == rows
            assert [shape[1:] for shape in mine.shapes] == [shape[1:] for shape in entry.request.shapes]
