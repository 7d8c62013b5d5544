"""The coordinator of named collectives decides what all ranks run next. A state machine without I/O.

Ranks say by name, in any order, which collectives they are ready for. Once every rank is ready for a name, the
coordinator compares their requests. It tells all ranks to run the collective, or to fail it with a text. Every rank
reads these decisions in the same order, so all ranks run the same collectives in the same order.

A name that comes back with the same requests gets a number. From then on, a rank's set of ready names is a set of bits:
one integer, however many tensors there are. To find the bits on which all ranks agree, the coordinator watches one rank
that is missing, as a SAT solver watches literals (Moskewicz et al., "Chaff", 2001). While that rank lacks the new bits,
no other rank is checked.
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
"""How many unnumbered names are remembered with their last entry, and how many with their failure."""


@dataclass(slots=True)
class _PendingName:
    """A name for which some ranks are ready."""

    since: float
    requests: dict[int, Request] = field(default_factory=dict)


class Coordinator:
    """Decides for one process set. Arguments give a rank's place in the set; texts give its rank in the world.

    ``ranks`` are the members' ranks in the world, ascending. At most ``cache_capacity`` names get a number. If some
    rank is still missing for a name after ``stall_timeout`` seconds (None: never), the name fails. ``horovod`` selects
    Horovod's errors and its rules for ranks that have joined.
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
        """Numbers, as bits, that ranks of one host may run without telling the coordinator."""
        self.last_in_memory: Callable[[int], tuple[float, str] | None] = lambda place: None
        """Returns when a rank last called one of these, and its name."""
        # Ranks.
        self._joined: dict[int, bool] = {}
        self._gone: Gone | None = None
        self._last: list[tuple[float, str | int] | None] = [None] * len(ranks)

    # ---- events ---------------------------------------------------------------------------------------------------

    def submitted(self, place: int, ids: int, fresh: Sequence[tuple[str, Request]], now: float) -> list[Decision]:
        """Record that a rank is ready for these names.

        ``ids`` are numbers of names, as bits; ``fresh`` are names without a number, or whose request has changed.
        ``now`` is in seconds, on any monotonic clock.
        """
        if self._gone is not None:
            return []  # every rank has been told, or soon will be
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
        """Record that a rank has no more data, and contributes nothing from now on.

        ``counts`` says whether Average still divides by it.
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
            self._failed.clear()  # ranks that joined instead of calling need not be told any more
            decisions.append(AllJoined(self._ranks[place]))
        return decisions

    def gone(self, place: int, text: str, *, left: bool, done: int | None = None) -> list[Decision]:
        """Record that a rank is gone. Every collective needs all ranks, so nothing runs after this."""
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
                if id is not None:  # so that a late call of the number is looked up in _failed
                    self._thawed |= 1 << id
                if self._pending.pop(name, None) is None:
                    assert id is not None
                    self._clear(1 << id)
                decisions.append(fail)
        return decisions

    # ---- questions ------------------------------------------------------------------------------------------------

    def waiting(self) -> Iterator[tuple[str, float]]:
        """Yield each name that only some ranks are ready for, and since when."""
        if self._gone is not None:
            return
        for name, pending in self._pending.items():
            yield name, pending.since
        for since, ids in self._ages:
            for id in bits(ids):
                yield self._known[id].name, since

    @property
    def has_waiting(self) -> bool:
        """Whether any name is waiting."""
        return self._gone is None and bool(self._pending or self._anyone)

    def missing(self, name: str) -> set[int]:
        """Return the places of the ranks that are not ready for a waiting name."""
        return set(range(len(self._ranks))) - self._joined.keys() - self._ready_for(name)

    def stall_text(self, name: str, now: float) -> str:
        """Return one sentence on who is missing for a waiting name, and what they called last."""
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
        """Return the name with this number."""
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
        """Return those of `ids` that every rank is ready for; ranks that have joined do not count."""
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
        """Turn the state of a number back into the requests it stands for."""
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
            if place in missing:  # the others have had their error already; this rank gets its own now
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
        """Add an entry for which every rank is ready to `entries`, or return its failure."""
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
        return self._learn(name, entry) if seals is None else []  # objects are large and seldom recur

    def _learn(self, name: str, entry: Entry) -> list[Decision]:
        """Number an entry that has come twice in a row. No rank can be about to use the name at this point."""
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
    """Return the request that a number stands for on one rank."""
    request, table = known.request, known.table
    if table is None:
        return request
    if request.kind == "alltoall":
        splits = table[place]
        return request._replace(splits=splits, shapes=[[sum(splits), *request.shapes[0][1:]]])
    shapes = [[rows, *shape[1:]] for rows, shape in zip(table[place], request.shapes, strict=True)]
    return request._replace(shapes=shapes)
