"""The coordinator among ranks that run programs, with messages in transit; compared with the reference each time."""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from itertools import pairwise
from random import Random
from typing import Any

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
    decode,
    encode,
)
from spark_hvd.engine.coordinator import Coordinator
from tests.coordinated import Calls
from tests.world.programs import RANKS, Call, Drain, Join, Program
from tests.world.reference import Reference


class Rank(Calls):
    """One rank's program, and its messages."""

    def __init__(self, place: int, program: Program) -> None:
        super().__init__(place)
        self.program = deque(program)
        self.ended: dict[str, list[str]] = defaultdict(list)
        self.sent: deque[bytes] = deque()
        self.read = 0

    def step(self) -> bool:
        """Take the program's next step, if it need not wait."""
        if not self.program or self.joining:
            return False
        step = self.program[0]
        if self.calls if isinstance(step, Drain) else isinstance(step, Call) and step.name in self.calls:
            return False
        self.program.popleft()
        if isinstance(step, Call):
            self.submit(step.name, step.request)
        elif isinstance(step, Join):
            self.joining = True
            self.post()
            self._send("join", step.counts)
        return True

    def post(self) -> bool:
        """Send pending messages."""
        ids, fresh = self.take()
        if ids or fresh:
            self._send("ready", f"{ids:x}", fresh)
        return bool(ids or fresh)

    def end(self, name: str, outcome: Entry | Fail) -> None:
        self.ended[name].append(outcome.error if isinstance(outcome, Fail) else "run")

    def _send(self, *fields: Any) -> None:
        self.sent.append(json.dumps([self.place, *fields]).encode())


class Collectives:
    """See the module's description.

    Args:
        programs: The ranks' programs.
        order: Decides what happens when.
        capacity, stall_timeout, remembered, horovod: See :class:`Reference`.
        leaves: Whether a rank leaves at some moment.
    """

    def __init__(
        self,
        programs: list[Program],
        order: Random,
        capacity: int,
        stall_timeout: float | None,
        remembered: int,
        *,
        horovod: bool,
        leaves: bool,
    ) -> None:
        ranks = RANKS[: len(programs)]
        self.coordinator = Coordinator(ranks, capacity, stall_timeout, horovod=horovod)
        self.reference = Reference(ranks, capacity, remembered, stall_timeout, horovod=horovod)
        self.ranks = [Rank(place, program) for place, program in enumerate(programs)]
        self._stream: list[bytes] = []
        self._now, self._order = 10.0, order
        self._goes_at = order.randint(0, 200) if leaves else None
        self.gone: Gone | None = None
        self._error = "horovod mismatch" if horovod else "mismatch"
        self._entries: list[Entry] = []
        self._stalled: dict[str, str] = {}
        self._in_memory, self._in_memory_last = 0, dict[int, tuple[float, str]]()
        self.coordinator.last_in_memory = self._in_memory_last.get

    def run(self) -> None:
        """Run until nothing more can happen."""
        paced = [rank for rank in self.ranks for _ in range(self._order.choice([1, 10, 100]))]
        events = self._step, Rank.post, self._hear, self._read
        idle, number = 0, self._order.random  # its overhead exceeds the time of the events
        while idle < 30:
            rank = paced[int(number() * len(paced))]
            happened = events[int(number() * len(events))](rank)
            idle = 0 if happened else idle + 1
            if number() < 1 / 20:
                self._look(self._now)
            if number() < 1 / 40 and self._entries:
                self._in_memory_last[rank.place] = self._now, self._order.choice(self._entries).name
            if self._goes_at is not None:
                self._goes_at -= 1
                if self._goes_at < 0:
                    self._go(rank)
        # Rare events must not be missed only because they are improbable.
        if any([each(rank) for each in events for rank in self.ranks]):
            self.run()

    def fail_what_waits(self) -> bool:
        """Let the time run out; return whether any call waited."""
        waited = self.coordinator.has_waiting
        self._now += 1e6
        self._look(self._now)
        return waited

    # ---- events -----------------------------------------------------------------------------------------------------

    def _step(self, rank: Rank) -> bool:
        return rank.step()

    def _hear(self, rank: Rank) -> bool:
        if not rank.sent:
            return False
        self._now += self._order.choice([0.0, 0.5, 1.0])
        place, kind, *fields = json.loads(rank.sent.popleft())
        reference, failed = self.reference, set[str]()
        before = self._told_by_number()
        if kind == "join":
            decisions = self.coordinator.joined(place, fields[0])
            if self.gone is None:
                reference.joined(place, counts=fields[0])
        else:
            ids, fresh = int(fields[0], 16), [(name, Request(*request)) for name, request in fields[1]]
            known = {self.coordinator.name_of(id): rank.calls[self.coordinator.name_of(id)] for id in bits(ids)}
            decisions = self.coordinator.submitted(place, ids, fresh, self._now)
            if self.gone is None:
                failed = reference.submitted(place, known, dict(fresh), self._now)
        if self.gone is not None:
            assert decisions == []
            return True
        by_number = {name for name in reference.waiting if reference.runs_by_number(name)}
        self._decided(decisions, failed, [place], by_number)
        newly = self._in_memory if kind == "join" else self._in_memory & self._told_by_number() & ~before
        assert [each for each in decisions if isinstance(each, Recall)] == ([Recall(newly)] if newly else [])
        assert not newly or isinstance(decisions[0], Recall)
        self._tell(decisions)
        return True

    def _told_by_number(self) -> int:
        """Return the numbers of the names that some rank has called here, as bits."""
        numbers = self.reference.numbers
        told = {name for name in self.reference.waiting if name in numbers} | self.reference.by_request
        return sum(1 << numbers[name] for name in told)

    def _look(self, now: float) -> None:
        if self.gone is not None:
            assert self.coordinator.overdue(now) == []
            return
        expected = self.reference.overdue(now)
        decisions = self.coordinator.overdue(now)
        assert len(decisions) == len(expected)
        for fail in decisions:
            assert isinstance(fail, Fail)
            (name,) = fail.names
            text, places = expected[name]
            assert fail.error == "stall"
            assert fail.places == places
            self._check_stall(fail.text, text, now)
            self._stalled[name] = fail.text
        self._tell(decisions)

    def _check_stall(self, text: str, expected: str, now: float) -> None:
        parts = expected.split(" LAST")
        assert re.fullmatch(".*?".join(map(re.escape, parts)), text), (text, expected)
        at = 0
        for part, following in pairwise(parts):
            at = text.index(part, at) + len(part)
            did = text[at : text.index(following, at)].strip()
            rank = int(part.rsplit(" ", 1)[1])
            memory = self._in_memory_last.get(RANKS.index(rank))
            told = self.reference.told[RANKS.index(rank)]
            allowed = self.reference.did(rank, now)
            if memory is not None:
                in_memory = {f"last called {memory[1]!r}, {now - memory[0]:.1f} s ago"}
                allowed = in_memory if told is None or memory[0] > told[0] else allowed
                allowed |= in_memory if told is not None and memory[0] == told[0] else set()
            assert did in allowed, (did, allowed)

    def _read(self, rank: Rank) -> bool:
        if rank.read == len(self._stream):
            return False
        for decision in decode(self._stream[rank.read]):
            if not isinstance(decision, Recall | Gone):
                rank.take_in(decision)
        rank.read += 1
        return True

    def _go(self, rank: Rank) -> None:
        left = self._order.random() < 0.5
        decisions = self.coordinator.gone(rank.place, f"{rank.place} goes", left=left, done=3 if left else None)
        if self.gone is None:
            self.gone = Gone(RANKS[rank.place], f"{rank.place} goes", left, 3 if left else None)
            assert decisions == [self.gone]
            self._goes_at = 5
        else:
            assert decisions == []
            self._goes_at = None
        assert not self.coordinator.has_waiting
        assert list(self.coordinator.waiting()) == []

    # ---- what is decided --------------------------------------------------------------------------------------------

    def _decided(self, decisions: list[Decision], late: set[str], places: list[int], by_number: set[str]) -> None:
        """Check that exactly these decisions were made."""
        reference = self.reference
        expected, learned = reference.complete(), dict[str, int]()
        for decision in decisions:
            if isinstance(decision, Learn):
                learned[decision.entry.name] = decision.id
                self._entries[decision.id : decision.id + 1] = [decision.entry]
                assert _alike(decision.entry, expected[decision.entry.name])
        runs = [entry for each in decisions if isinstance(each, Run) for entry in each.entries]
        known = [self._entries[id] for each in decisions if isinstance(each, RunKnown) for id in bits(each.ids)]
        fails = [each for each in decisions if isinstance(each, Fail)]
        told = [entry.name for entry in (*runs, *known)]
        for entry in runs:
            assert _alike(entry, expected.pop(entry.name)), entry
            assert entry.name not in by_number
            assert reference.learns(entry.name, entry) == learned.pop(entry.name, None)
        for entry in known:
            assert _alike(entry, expected.pop(entry.name)), entry
            assert entry.name in by_number
        for fail in fails:
            (name,) = fail.names
            if fail.error == "stall":
                assert (fail.places, fail.text) == (places, self._stalled[name])
                late.remove(name)
            else:
                told.append(name)
                assert (fail.error, fail.text, fail.places) == (self._error, expected.pop(name), None)
        reference.by_request -= {name for name in told if name not in reference.waiting}
        assert expected == {}
        assert late == set()
        assert learned == {}
        joined = [each for each in decisions if isinstance(each, AllJoined)]
        assert joined == ([AllJoined(RANKS[places[0]])] if reference.all_joined() else [])

    def _tell(self, decisions: list[Decision]) -> None:
        if decisions:
            self._stream.append(encode(decisions))
        if self._order.random() < 0.5:  # as slots are assigned at a decision
            entries = list(enumerate(self._entries))
            self._in_memory = sum(1 << id for id, entry in entries if entry.request.kind == "allreduce")
            self.coordinator.in_memory = self._in_memory
        waiting = {(name, waiting.since) for name, waiting in self.reference.waiting.items()}
        assert set(self.coordinator.waiting()) == waiting
        assert self.coordinator.has_waiting == bool(waiting)
        for name, _ in waiting:
            assert self.coordinator.missing(name) == self.reference.missing(name)


def _alike(entry: Entry, expected: Entry | str) -> bool:
    """Return whether two entries are equal; a tensor without dimensions counts as one row."""
    if isinstance(expected, str):
        return False
    rows = [[shape or [1] for shape in each.request.shapes] for each in (entry, expected)]
    plain = [
        each._replace(request=each.request._replace(shapes=shapes))
        for each, shapes in zip((entry, expected), rows, strict=True)
    ]
    return plain[0] == plain[1]
