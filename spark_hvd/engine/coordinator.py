"""The coordinator of named collectives: who is ready for what, what all ranks run next. A state machine without I/O.

Ranks say for which collectives they are ready, by name and in any order; once every rank has said so for a name, the
coordinator compares what they said and tells all of them the same: run it, or fail it with this text. What it tells is
one stream that every rank reads in the same order, so all ranks run the same collectives in the same order.

A name that comes back with the same requests gets a number. From then on a rank's set of ready names is a set of bits,
one integer however many tensors there are. The bits on which all ranks agree are found as a SAT solver finds out that
a clause is still open, by watching one rank that is missing (Moskewicz et al., "Chaff", 2001): as long as the watched
rank lacks the new bits, no other rank is looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from spark_hvd.collectives.messages import (
    AllJoined,
    Decision,
    Entry,
    Fail,
    Gone,
    Learn,
    Recall,
    Request,
    Run,
    RunKnown,
    bits,
)
from spark_hvd.engine.agreement import disagreement
from spark_hvd.world.words import ranks_text

V = TypeVar("V")

_REMEMBERED = 4096
"""Names whose last entry, or whose failure, is remembered without their having a number."""


@dataclass(slots=True)
class _PendingName:
    """A name for which some ranks are ready."""

    since: float
    requests: dict[int, Request] = field(default_factory=dict)


class Coordinator:
    """Decides for one process set. Ranks are meant by their place in the set; texts name them by rank in the world.

    ``ranks`` are those of the members in the world, ascending. At most ``cache_capacity`` names get a number. A name
    that some rank is missing for fails after ``stall_timeout`` seconds; None: never. Whether errors, and what joined
    ranks contribute, are Horovod's, ``horovod`` tells.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        cache_capacity: int = 1024,
        stall_timeout: float | None = None,
        *,
        horovod: bool = False,
    ) -> None:
        self._ranks = ranks
        self._capacity = cache_capacity
        self.stall_timeout, self.horovod = stall_timeout, horovod
        # Names without a number.
        self._pending: dict[str, _PendingName] = {}
        self._seen: OrderedDict[str, Entry] = OrderedDict()
        self._failed: OrderedDict[str, tuple[set[int], Fail]] = OrderedDict()
        # Names with a number: bits.
        self._known: list[Entry] = []
        self._ids: dict[str, int] = {}
        self._masks = [0] * len(ranks)
        self._anyone = 0
        self._ages: list[tuple[float, int]] = []
        self._thawed = 0
        self._watched = 0
        self.in_memory = 0
        """Those that ranks of one host may run without a word to the coordinator, as bits."""
        self.last_in_memory: Callable[[int], tuple[float, str] | None] = lambda place: None
        """When a rank last called one of these, and its name."""
        # Ranks.
        self._joined: dict[int, bool] = {}
        self._gone: Gone | None = None
        self._last: list[tuple[float, str | int] | None] = [None] * len(ranks)

    # ---- events ---------------------------------------------------------------------------------------------------

    def submitted(self, place: int, ids: int, fresh: Sequence[tuple[str, Request]], now: float) -> list[Decision]:
        """A rank is ready for these names.

        ``ids`` are numbers of names, as bits; ``fresh`` are other names, or ones with another request than before.
        ``now`` is in seconds, on any monotonic clock.
        """
        if self._gone is not None:
            return []  # every rank has been told, or is about to be
        entries: list[Entry] = []
        decisions: list[Decision] = []
        before = self._anyone | self._thawed
        if ids:
            self._last[place] = now, ids
            thawed = ids & self._thawed
            if thawed:
                again = [self._known[id] for id in bits(thawed)]
                fresh = [*fresh, *((known.name, _request_of(known, place)) for known in again)]
                ids &= ~thawed
            decisions += self._submitted_known(place, ids, now)
        for name, request in fresh:
            decisions += self._submitted_fresh(place, name, request, entries, now)
        recalled = (self._anyone | self._thawed) & ~before & self.in_memory
        if recalled:
            decisions.insert(0, Recall(recalled))
        if entries:
            decisions.append(Run(entries))
        return decisions

    def joined(self, place: int, counts: bool) -> list[Decision]:
        """A rank has no more data, and contributes nothing from now on.

        ``counts`` says that Average still divides by it.
        """
        if self._gone is not None:
            return []
        self._joined[place] = counts
        decisions: list[Decision] = [Recall(self.in_memory)] if self.in_memory else []
        entries: list[Entry] = []
        for name in [name for name, pending in self._pending.items() if self._complete(pending)]:
            decisions += self._finish(name, self._pending.pop(name), entries)
        for id in bits(self._ready(self._anyone)):
            decisions += self._finish(self._known[id].name, self._thaw(id), entries)
        if entries:
            decisions.append(Run(entries))
        if len(self._joined) == len(self._ranks):
            self._joined.clear()
            self._failed.clear()  # who has joined instead of coming is not told any more
            decisions.append(AllJoined(self._ranks[place]))
        return decisions

    def gone(self, place: int, text: str, *, left: bool, done: int | None = None) -> list[Decision]:
        """A rank is no longer there; nothing runs any more that needs it, which is everything."""
        if self._gone is not None:
            return []
        self._gone = Gone(self._ranks[place], text, left, done)
        return [self._gone]

    def overdue(self, now: float) -> list[Decision]:
        """Fail the names that have waited for longer than `stall_timeout`."""
        if self.stall_timeout is None:
            return []
        decisions: list[Decision] = []
        for name, since in list(self.waiting()):
            if now - since >= self.stall_timeout:
                fail = Fail([name], "stall", self.stall_text(name, now), sorted(self._ready_for(name)))
                _remember(self._failed, name, (self.missing(name), fail))
                id = self._ids.get(name)
                if id is not None:  # so that the number, when it comes late, is looked up in _failed
                    self._thawed |= 1 << id
                if self._pending.pop(name, None) is None:
                    assert id is not None
                    self._clear(1 << id)
                decisions.append(fail)
        return decisions

    # ---- questions ------------------------------------------------------------------------------------------------

    def waiting(self) -> Iterator[tuple[str, float]]:
        """The names that some rank is ready for and some rank is not, and since when."""
        if self._gone is not None:
            return
        for name, pending in self._pending.items():
            yield name, pending.since
        for since, ids in self._ages:
            for id in bits(ids):
                yield self._known[id].name, since

    @property
    def has_waiting(self) -> bool:
        """Whether there are any."""
        return self._gone is None and bool(self._pending or self._anyone)

    def missing(self, name: str) -> set[int]:
        """The places of the ranks that are not ready for a waiting name."""
        return set(range(len(self._ranks))) - self._joined.keys() - self._ready_for(name)

    def stall_text(self, name: str, now: float) -> str:
        """One sentence on who is missing for a waiting name, and what they did last."""
        since = next(since for other, since in self.waiting() if other == name)
        missing = sorted(self.missing(name))
        ready = self._ready_for(name)
        lasts = "; ".join(f"rank {self._ranks[place]} {self._last_text(place, now)}" for place in missing[:6])
        more = f"; and {len(missing) - 6} more" if len(missing) > 6 else ""
        return (
            f"{self._title(name)} has waited {now - since:.1f} s for {ranks_text([self._ranks[p] for p in missing])}"
            f" ({lasts}{more}); ready: {ranks_text([self._ranks[place] for place in ready])}."
        )

    def _ready_for(self, name: str) -> set[int]:
        if name in self._pending:
            return set(self._pending[name].requests)
        id = self._ids[name]
        return {place for place, mask in enumerate(self._masks) if mask >> id & 1}

    def name_of(self, id: int) -> str:
        """The name with this number."""
        return self._known[id].name

    # ---- names with a number --------------------------------------------------------------------------------------

    def _submitted_known(self, place: int, ids: int, now: float) -> list[Decision]:
        fresh = ids & ~self._anyone
        if fresh:
            self._ages.append((now, fresh))
            self._anyone |= fresh
        self._masks[place] |= ids
        ready = self._ready(ids)
        if not ready:
            return []
        if self._joined:
            decisions, entries = [], list[Entry]()
            for id in bits(ready):
                decisions += self._finish(self._known[id].name, self._thaw(id), entries)
            return [*decisions, Run(entries)] if entries else decisions
        self._clear(ready)
        return [RunKnown(ready)]

    def _ready(self, ids: int) -> int:
        """Which of `ids` every rank is ready for that has not joined."""
        count = len(self._masks)
        for step in range(count):
            place = (self._watched + step) % count
            if place not in self._joined:
                ids &= self._masks[place]
                if not ids:
                    self._watched = place
                    return 0
        return ids

    def _clear(self, ids: int) -> None:
        others = ~ids
        self._masks = [mask & others for mask in self._masks]
        self._anyone &= others
        self._ages = [(since, left) for since, ids in self._ages if (left := ids & others)]

    def _thaw(self, id: int) -> _PendingName:
        """Take a number's state apart into the requests it stands for."""
        known = self._known[id]
        since = next(since for since, ids in self._ages if ids >> id & 1)
        places = [place for place, mask in enumerate(self._masks) if mask >> id & 1]
        self._clear(1 << id)
        return _PendingName(since, {place: _request_of(known, place) for place in places})

    # ---- names without a number, or with another request than usual -------------------------------------------------

    def _submitted_fresh(
        self, place: int, name: str, request: Request, entries: list[Entry], now: float
    ) -> list[Decision]:
        self._last[place] = now, name
        if name in self._failed:
            missing, fail = self._failed[name]
            if place in missing:  # the others have had their error already; this rank's comes now
                missing.discard(place)
                return [fail._replace(places=[place])]
        pending = self._pending.get(name)
        if pending is None:
            id = self._ids.get(name)
            if id is not None:
                self._thawed |= 1 << id
            pending = self._thaw(id) if id is not None and self._anyone >> id & 1 else _PendingName(now)
            self._pending[name] = pending
        # Equal requests of many ranks are one object.
        first = next(iter(pending.requests.values()), request)
        pending.requests[place] = first if first == request else request
        if not self._complete(pending):
            return []
        del self._pending[name]
        return self._finish(name, pending, entries)

    def _complete(self, pending: _PendingName) -> bool:
        here = len(pending.requests)
        if here + len(self._joined) < len(self._ranks):
            return False
        return here == len(self._ranks) or len(pending.requests.keys() | self._joined.keys()) == len(self._ranks)

    def _finish(self, name: str, pending: _PendingName, entries: list[Entry]) -> list[Decision]:
        """Every rank is ready: put an entry to run in `entries`, or fail it."""
        if name in self._ids:
            self._thawed &= ~(1 << self._ids[name])
        places = sorted(pending.requests)
        requests = {self._ranks[place]: pending.requests[place] for place in places}
        absent = [place for place in range(len(self._ranks)) if place not in pending.requests]
        fault = disagreement(name, requests, [self._ranks[place] for place in absent], horovod=self.horovod)
        if fault is not None:
            return [Fail([name], "horovod mismatch" if self.horovod else "mismatch", fault)]
        divisor = len(places) + sum(self._joined[place] for place in absent)
        request = pending.requests[places[0]]
        table = _table(request.kind, pending.requests, len(self._ranks))
        seals = _seals(pending.requests, len(self._ranks))
        if absent:
            entries.append(Entry(name, request, table, absent, divisor, seals, self.horovod))
            return []
        entry = Entry(name, request, table, seals=seals)
        entries.append(entry)
        return self._learn(name, entry) if seals is None else []  # objects are large, and seldom come back

    def _learn(self, name: str, entry: Entry) -> list[Decision]:
        """Number an entry that has come twice in a row. No rank can be about to use the name meanwhile."""
        if self._seen.get(name) != entry:
            _remember(self._seen, name, entry)
            return []
        id = self._ids.get(name, len(self._known))
        if id == len(self._known):
            if id >= self._capacity:
                return []
            self._known.append(entry)
            self._ids[name] = id
        else:
            self._known[id] = entry
        del self._seen[name]
        return [Learn(id, entry)]

    # ---- texts ----------------------------------------------------------------------------------------------------

    def _title(self, name: str) -> str:
        if name in self._pending:
            return f"{next(iter(self._pending[name].requests.values())).kind} {name!r}"
        return f"{self._known[self._ids[name]].request.kind} {name!r}"

    def _last_text(self, place: int, now: float) -> str:
        told = [last for last in (self._last[place], self.last_in_memory(place)) if last is not None]
        if not told:
            return "has called nothing yet"
        when, what = max(told, key=lambda last: last[0])
        name = what if isinstance(what, str) else self._known[what.bit_length() - 1].name
        return f"last called {name!r}, {now - when:.1f} s ago"


def _remember(memory: OrderedDict[str, V], name: str, value: V) -> None:
    memory[name] = value
    memory.move_to_end(name)
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)


def _table(kind: str, requests: dict[int, Request], size: int) -> list[list[int]] | None:
    if kind == "allgather":
        tensors = len(next(iter(requests.values())).shapes)
        # A 0-dim tensor counts as one row.
        return [
            [shape[0] if shape else 1 for shape in requests[place].shapes] if place in requests else [0] * tensors
            for place in range(size)
        ]
    if kind == "alltoall":
        return [list(requests[place].splits or []) for place in range(size)]
    return None


def _seals(requests: dict[int, Request], size: int) -> list[str | None] | None:
    if all(request.seal is None for request in requests.values()):
        return None
    return [requests[place].seal if place in requests else None for place in range(size)]


def _request_of(known: Entry, place: int) -> Request:
    """The request of one rank that a number stands for."""
    request, table = known.request, known.table
    if table is None:
        return request
    if request.kind == "alltoall":
        splits = table[place]
        return request._replace(splits=splits, shapes=[[sum(splits), *request.shapes[0][1:]]])
    shapes = [[rows, *shape[1:]] for rows, shape in zip(table[place], request.shapes, strict=True)]
    return request._replace(shapes=shapes)
