"""Random programs of several ranks through the coordinator: every call ends once, in one order, and never too early."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from random import Random
from typing import Any, NamedTuple

from hypothesis import event, given, settings
from hypothesis import strategies as st

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
    decode,
    encode,
)
from spark_hvd.engine.coordinator import Coordinator
from tests.coordinated import Calls

RANKS = [0, 3, 4, 7, 8]


class Round(NamedTuple):
    """A collective that all ranks call which still have data."""

    name: str
    kind: str
    variant: int
    """Of the shape, alike on all ranks."""
    odd: int | None
    """A rank whose call does not fit the others'."""


class Call(NamedTuple):
    name: str
    request: Request


class Drain(NamedTuple):
    """Wait for all calls."""


class Join(NamedTuple):
    counts: bool


Step = Call | Drain | Join
Program = list[Step]


def request_of(collective: Round, place: int, size: int) -> Request:
    dtype = "int8" if collective.odd == place else "float32"
    rows, columns = place + collective.variant, 2 + collective.variant
    if collective.kind == "allgather":
        return Request("allgather", [dtype] * 2, [[rows, columns], [2 * rows]], "cpu")
    if collective.kind == "alltoall":
        splits = [rows + other for other in range(size)]
        return Request("alltoall", [dtype], [[sum(splits), columns]], "cpu", splits=splits)
    if collective.kind == "barrier":
        return Request("barrier", [], [], "")
    return Request("allreduce", [dtype], [[columns]], "cpu", "AVERAGE")


class Epoch(NamedTuple):
    """What all ranks do until all have joined: collectives in sections, of which a rank does the first few."""

    sections: list[list[Round]]
    lengths: list[int]
    """Sections of each rank."""
    counts: list[bool]
    """Whether Average counts each rank when it has joined."""
    drains: list[list[bool]]
    """Whether each rank waits at the end of a section."""

    def program(self, place: int, size: int, order: Random) -> Program:
        """One rank's. Sections may overlap, so a rank may run ahead until it needs a name that is still in use."""
        steps: Program = []
        for section, drain in zip(self.sections[: self.lengths[place]], self.drains[place], strict=False):
            mine = [Call(each.name, request_of(each, place, size)) for each in section]
            order.shuffle(mine)
            steps += [*mine, Drain()] if drain else mine
        return [*steps, Join(self.counts[place])]

    def outcomes(self, place: int) -> dict[str, list[str]]:
        """What becomes of one rank's calls, by name."""
        found: dict[str, list[str]] = defaultdict(list)
        for number, section in enumerate(self.sections[: self.lengths[place]]):
            here = [other for other, length in enumerate(self.lengths) if length > number]
            for each in section:
                odd = each.odd in here and len(here) > 1 and each.kind != "barrier"
                lacking = each.kind == "alltoall" and len(here) < len(self.lengths)
                found[each.name].append("mismatch" if odd or lacking else "run")
        return found


@st.composite
def epochs(draw: st.DrawFn, size: int) -> Epoch:
    kinds = st.sampled_from(["allreduce", "allgather", "alltoall", "barrier"])
    names = {name: draw(kinds) for name in "abcd"[: draw(st.integers(1, 4))]}
    rarely = st.integers(0, 9).map(lambda number: number == 9)
    odd = st.integers(0, 7 * size).map(lambda number: number - 1 if 0 < number <= size else None)
    sections = [
        [Round(name, kind, int(draw(rarely)), draw(odd)) for name, kind in names.items() if not draw(rarely)]
        for _ in range(draw(st.integers(2, 8)))
    ]

    def each(values: st.SearchStrategy[Any]) -> Any:
        return draw(st.lists(values, min_size=size, max_size=size))

    count = len(sections)
    drains = st.lists(st.booleans(), min_size=count, max_size=count)
    lengths = st.integers(max(0, count - 2), count)
    return Epoch(sections, each(lengths), each(st.booleans()), each(drains))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[Epoch]]:
    size = draw(st.integers(1, 5))
    return size, [draw(epochs(size)) for _ in range(draw(st.integers(1, 2)))]


class Rank(Calls):
    """One rank's program, and what it sends."""

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
        ids, fresh = self.take()
        if ids or fresh:
            self._send("ready", f"{ids:x}", fresh)
        return bool(ids or fresh)

    def end(self, name: str, outcome: Entry | Fail) -> None:
        self.ended[name].append(outcome.error if isinstance(outcome, Fail) else "run")

    def _send(self, *fields: Any) -> None:
        self.sent.append(json.dumps([self.place, *fields]).encode())


class World:
    """Ranks, the coordinator, and messages under way between them, in an order that `order` chooses."""

    def __init__(self, programs: list[Program], capacity: int, stall_timeout: float | None, order: Random) -> None:
        self.coordinator = Coordinator(RANKS[: len(programs)], capacity, stall_timeout)
        self.ranks = [Rank(place, program) for place, program in enumerate(programs)]
        self.stream: list[bytes] = []
        self.numbered = 0
        self._now = 0.0
        self._order = order
        self._entries: list[Entry] = []
        # What each rank has called and the coordinator has not decided yet.
        self._open = [set[str]() for _ in programs]
        self._counts: dict[int, bool] = {}

    def run(self) -> None:
        """Until nothing can happen any more."""
        paces = [self._order.choice([1, 10, 100]) for _ in self.ranks]
        events = self._step, Rank.post, self._hear, self._read
        idle = 0
        while idle < 100:
            rank = self._order.choices(self.ranks, paces)[0]
            happened = self._order.choice(events)(rank)
            idle = 0 if happened else idle + 1
            if self._order.randrange(20) == 0:
                self._decided(self.coordinator.overdue(self._now))
        # Nothing is overlooked only because it was improbable.
        if any([each(rank) for each in events for rank in self.ranks]):
            self.run()

    def fail_what_waits(self) -> bool:
        """Let the time run out; whether any call waited."""
        waited = self.coordinator.has_waiting
        self._decided(self.coordinator.overdue(1e9))
        return waited

    def _step(self, rank: Rank) -> bool:
        step = rank.program[0] if rank.program else None
        if not rank.step():
            return False
        if isinstance(step, Call):
            self._open[rank.place].add(step.name)
        elif isinstance(step, Join):
            self._counts[rank.place] = step.counts
        return True

    def _hear(self, rank: Rank) -> bool:
        if not rank.sent:
            return False
        self._now += 1
        place, kind, *fields = json.loads(rank.sent.popleft())
        if kind == "join":
            self._decided(self.coordinator.joined(place, fields[0]))
        else:
            fresh = [(name, Request(*request)) for name, request in fields[1]]
            self._decided(self.coordinator.submitted(place, int(fields[0], 16), fresh, self._now))
        return True

    def _read(self, rank: Rank) -> bool:
        if rank.read == len(self.stream):
            return False
        for decision in decode(self.stream[rank.read]):
            rank.take_in(decision)
        rank.read += 1
        return True

    def _decided(self, decisions: list[Decision]) -> None:
        if not decisions:
            return
        self.stream.append(encode(decisions))
        for decision in decisions:
            if isinstance(decision, Learn):
                self._entries[decision.id : decision.id + 1] = [decision.entry]
            elif isinstance(decision, RunKnown):
                self.numbered += 1
                for id in bits(decision.ids):
                    self._check(self._entries[id].name, [])
            elif isinstance(decision, Run):
                for entry in decision.entries:
                    absent = entry.absent or []
                    self._check(entry.name, absent)
                    here = len(self.ranks) - len(absent)
                    divisor = here + sum(self._counts[place] for place in absent)
                    assert entry.divisor == (divisor if absent else None)
            elif isinstance(decision, Fail):
                places = range(len(self.ranks)) if decision.places is None else decision.places
                for name in decision.names:
                    self._check(name, [place for place in range(len(self.ranks)) if place not in places], decision)
            elif isinstance(decision, AllJoined):
                assert len(self._counts) == len(self.ranks)
                self._counts.clear()

    def _check(self, name: str, absent: list[int], fail: Fail | None = None) -> None:
        """All ranks but `absent` have called it, and of those that are absent all have joined, unless it stalls."""
        for place, calls in enumerate(self._open):
            if place not in absent and (name in calls or fail is None or fail.error == "stall"):
                calls.remove(name)
            elif fail is None or fail.error != "stall":
                assert place in self._counts
                assert name not in calls


CAPACITIES = st.sampled_from([1024, 2, 1, 0])


@settings(max_examples=100)
@given(worlds(), CAPACITIES, st.integers(0, 2**32))
def test_every_call_ends_as_it_must(world: tuple[int, list[Epoch]], capacity: int, seed: int) -> None:
    size, parts = world
    order = Random(seed)
    programs = [[step for part in parts for step in part.program(place, size, order)] for place in range(size)]
    simulated = World(programs, capacity, None, order)
    simulated.run()
    event(f"runs by number: {min(simulated.numbered, 3)}")
    assert not simulated.coordinator.has_waiting
    for rank in simulated.ranks:
        expected: dict[str, list[str]] = defaultdict(list)
        for part in parts:
            for name, outcomes in part.outcomes(rank.place).items():
                expected[name] += outcomes
        assert rank.ended == expected
        assert not rank.calls
        assert rank.joins == len(parts)


@settings(max_examples=100)
@given(worlds(), CAPACITIES, st.integers(1, 20), st.integers(0, 2**32))
def test_every_call_ends_once_when_some_come_too_late(
    world: tuple[int, list[Epoch]], capacity: int, stall_timeout: float, seed: int
) -> None:
    size, parts = world
    order = Random(seed)
    programs = [[step for part in parts for step in part.program(place, size, order)] for place in range(size)]
    calls = [sum(isinstance(step, Call) for step in program) for program in programs]
    simulated = World(programs, capacity, stall_timeout, order)
    simulated.run()
    while simulated.fail_what_waits():
        simulated.run()
    for rank, count in zip(simulated.ranks, calls, strict=True):
        assert not rank.calls
        assert sum(map(len, rank.ended.values())) == count
        assert rank.joins == len(parts)
    event(f"stalls: {any('stall' in outcomes for rank in simulated.ranks for outcomes in rank.ended.values())}")
