"""A coordinator's decisions, computed in a simple way: sets of names and ranks, and no numbers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from spark_hvd.collectives.messages import Entry, Request
from spark_hvd.engine.agreement import disagreement
from spark_hvd.world.words import ranks_text


class Waiting(NamedTuple):
    """A name that some ranks have called and others have not."""

    since: float
    requests: dict[int, Request]


class Reference:
    """Follows what ranks report, and returns what must be decided at once.

    Args:
        ranks: The members' ranks in the world.
        capacity: Maximum number of names that get a number.
        remembered: Names whose last entry is remembered although they have no number.
        stall_timeout: Seconds after which a name fails; None: never.
        horovod: Whether errors are Horovod's.

    Attributes:
        waiting: Waiting names.
        told: When each rank last called something, and the names then.
        numbers: Numbers of the names that have one.
    """

    def __init__(
        self, ranks: Sequence[int], capacity: int, remembered: int, stall_timeout: float | None, *, horovod: bool
    ) -> None:
        self._ranks, self._capacity, self._remembered = ranks, capacity, remembered
        self._stall_timeout, self._horovod = stall_timeout, horovod
        self.waiting: dict[str, Waiting] = {}
        self.told: list[tuple[float, set[str]] | None] = [None] * len(ranks)
        self.numbers: dict[str, int] = {}
        self.by_request: set[str] = set()
        """Names with a number whose round is decided by requests: some ranks have not called it by its number."""
        self._joined: dict[int, bool] = {}
        self._late: dict[str, set[int]] = {}
        self._last: OrderedDict[str, Entry] = OrderedDict()

    def submitted(self, place: int, known: dict[str, Request], fresh: dict[str, Request], now: float) -> set[str]:
        """A rank is ready for names with a number, and for others; return those whose failure it gets now."""
        if known or fresh:
            self.told[place] = now, {*known, *fresh}
        self.by_request |= fresh.keys() & self.numbers.keys()
        failed = set()
        for name, request in {**known, **fresh}.items():
            late = self._late.get(name, set())
            if place in late and (name in fresh or name in self.by_request):
                late.discard(place)
                failed.add(name)
            else:
                self.waiting.setdefault(name, Waiting(now, {})).requests[place] = request
        return failed

    def joined(self, place: int, *, counts: bool) -> None:
        """A rank joins: it has no more data."""
        self._joined[place] = counts

    def all_joined(self) -> bool:
        """Return whether all have joined; then none has any more."""
        over = len(self._joined) == len(self._ranks)
        if over:
            self._joined.clear()
            self._late.clear()
        return over

    def complete(self) -> dict[str, Entry | str]:
        """Return the names for which no rank is missing any more: what to run, or why it cannot run."""
        names = [name for name in self.waiting if not self.missing(name)]
        return {name: self._decided(name, self.waiting.pop(name).requests) for name in names}

    def runs_by_number(self, name: str) -> bool:
        """Return whether a complete name needs only its number."""
        return name in self.numbers and name not in self.by_request and not self._joined

    def learns(self, name: str, entry: Entry) -> int | None:
        """Return the number that a name gets, because it was called twice in a row."""
        if entry.absent or entry.seals:
            return None
        if self._last.get(name) != entry:
            self._last[name] = entry
            self._last.move_to_end(name)
            if len(self._last) > self._remembered:
                self._last.popitem(last=False)
            return None
        number = self.numbers.get(name, len(self.numbers))
        if number >= self._capacity:
            return None
        del self._last[name]
        self.numbers[name] = number
        return number

    def overdue(self, now: float) -> dict[str, tuple[str, list[int]]]:
        """Return the names that have waited for too long: the message about each, and the ranks that get it now."""
        if self._stall_timeout is None:
            return {}
        late = [name for name, waiting in self.waiting.items() if now - waiting.since >= self._stall_timeout]
        failed = {name: (self.stall_text(name, now), sorted(self.waiting[name].requests)) for name in late}
        for name in late:
            self._late[name] = self.missing(name)
            del self.waiting[name]
        self.by_request |= set(late) & self.numbers.keys()
        return failed

    def missing(self, name: str) -> set[int]:
        """Return the places for which a name waits."""
        return set(range(len(self._ranks))) - self.waiting[name].requests.keys() - self._joined.keys()

    def stall_text(self, name: str, now: float) -> str:
        """Return the message about a waiting name; LAST stands for the ranks' last calls, see :meth:`did`."""
        waiting = self.waiting[name]
        missing = sorted(self.missing(name))
        did = "; ".join(f"rank {self._ranks[place]} LAST" for place in missing[:6])
        more = f"; and {len(missing) - 6} more" if len(missing) > 6 else ""
        kind = next(iter(waiting.requests.values())).kind
        ready = ranks_text([self._ranks[place] for place in sorted(waiting.requests)])
        who = ranks_text([self._ranks[place] for place in missing])
        return f"{kind} {name!r} has waited {now - waiting.since:.1f} s for {who} ({did}{more}); ready: {ready}."

    def did(self, rank: int, now: float) -> set[str]:
        """Return what may be said about a rank's last call."""
        told = self.told[self._ranks.index(rank)]
        if told is None:
            return {"has called nothing yet"}
        return {f"last called {name!r}, {now - told[0]:.1f} s ago" for name in told[1]}

    def _decided(self, name: str, requests: dict[int, Request]) -> Entry | str:
        places = range(len(self._ranks))
        here, absent = sorted(requests), [place for place in places if place not in requests]
        by_rank = {self._ranks[place]: requests[place] for place in here}
        fault = disagreement(name, by_rank, [self._ranks[place] for place in absent], horovod=self._horovod)
        if fault is not None:
            return fault
        first = requests[here[0]]
        table, seals = None, None
        if first.kind == "allgather":
            of_absent = [0] * len(first.shapes)
            table = [
                [shape[0] if shape else 1 for shape in requests[place].shapes] if place in requests else of_absent
                for place in places
            ]
        elif first.kind == "alltoall":
            table = [requests[place].splits or [] for place in places]
        if any(request.seal is not None for request in requests.values()):
            seals = [requests[place].seal if place in requests else None for place in places]
        divisor = len(here) + sum(self._joined[place] for place in absent)
        if not absent:
            return Entry(name, first, table, seals=seals)
        return Entry(name, first, table, absent, divisor, seals, self._horovod)
