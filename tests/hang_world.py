"""Ranks that work, wait or are silent, on a clock that the test controls, for tests of the hang watch."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from spark_hvd.runner.channel.examination import Examination
from spark_hvd.runner.watch.hang.verdict import HangVerdict, Kind
from spark_hvd.runner.watch.hang.watch import Examine, HangWatch
from spark_hvd.world.vitals import PendingCollective, Vitals

WARNING = 60.0
TICK = 0.5
STACK = """\
Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/x.py", line 5 in wait
  File "/home/u/train.py", line {line} in {function}
  File "/home/u/train.py", line 9 in train
"""


@dataclass(frozen=True)
class Work:
    """Work between collectives."""

    seconds: float
    cpu: float = 1.0
    fetching: bool = False
    steps: bool = False


@dataclass(frozen=True)
class Collective:
    """A collective, which ends just after all its ranks have entered it."""

    name: str
    ranks: tuple[int, ...] | None = None
    seconds: float = 0.01


Action = Work | Collective
Program = Callable[[int], Generator[Action, None, None]]
FOREVER = 1e9


@dataclass
class Rank:
    program: Generator[Action, None, None]
    doing: Action | None = None
    since: float = 0.0
    entered: int = 0
    last: str = ""
    last_at: float = 0.0
    steps: int = 0
    cpu: float = 0.0
    frozen: bool = False
    silent: bool = False
    answers: bool = True
    ended: bool = False
    next_record: float = 0.0


@dataclass
class World:
    """Ranks that run programs of work and collectives, and a watch that gets their records once a second."""

    size: int
    program: Program
    warning: float | None = WARNING
    generation: int = 0
    now: float = 5000.0
    offset: float = 77.0
    watch: HangWatch = field(default_factory=HangWatch)
    told: list[HangVerdict] = field(default_factory=list)
    looks: int = 0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.ranks = [Rank(self.program(rank), next_record=self.now + rank * 0.13) for rank in range(self.size)]
        self.answers: list[tuple[float, int]] = []
        for rank in self.ranks:
            self._next(rank)

    def go_on(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            for rank in self.ranks:
                if not rank.frozen and not rank.ended:
                    rank.cpu += TICK * self._cpu(rank)
                    self._advance(rank)
            for number, rank in enumerate(self.ranks):
                if self.now >= rank.next_record and not (rank.frozen or rank.silent or rank.ended):
                    rank.next_record = self.now + 1.0
                    self.watch.take(self.record(number), self.now)
            for due, number in self.answers.copy():
                if self.now >= due:
                    self.answers.remove((due, number))
                    self.watch.examined(number, self.look(number), self.now)
            match self.watch.tick(self.now):
                case Examine():
                    self.looks += 1
                    self.answers = [(self.now + 1.4, n) for n, rank in enumerate(self.ranks) if rank.answers]
                case HangVerdict() as verdict:
                    self.told.append(verdict)

    @property
    def kinds(self) -> list[Kind]:
        return [verdict.kind for verdict in self.told]

    def record(self, number: int) -> Vitals:
        rank, doing = self.ranks[number], self.ranks[number].doing
        pending = ()
        if isinstance(doing, Collective):
            pending = (PendingCollective(doing.name, self.now - rank.since, doing.ranks),)
        return Vitals(
            rank=number,
            size=self.size,
            generation=self.generation,
            clock=self.now + self.offset * number,
            entered=rank.entered,
            last=rank.last,
            last_seconds=self.now - rank.last_at if rank.last else 0.0,
            pending=pending,
            total_steps=rank.steps,
            cpu_seconds=rank.cpu,
            fetching=self.now - rank.since if isinstance(doing, Work) and doing.fetching else None,
            stall_warning=self.warning,
            ended=rank.ended,
        )

    def look(self, number: int) -> Examination:
        rank = self.ranks[number]
        if rank.frozen:
            return Examination(0.0, "stopped", "")
        function, line = ("allreduce", 12) if isinstance(rank.doing, Collective) else ("load", 31)
        return Examination(self._cpu(rank), "sleeping", STACK.format(function=function, line=line))

    def _cpu(self, rank: Rank) -> float:
        return rank.doing.cpu if isinstance(rank.doing, Work) else 0.004

    def _next(self, rank: Rank) -> None:
        rank.since = self.now
        rank.doing = next(rank.program, None)
        if rank.doing is None:
            rank.ended = True
            self.watch.take(self.record(next(n for n, one in enumerate(self.ranks) if one is rank)), self.now)
        elif isinstance(rank.doing, Collective):
            rank.entered += 1
            rank.last, rank.last_at = rank.doing.name, self.now

    def _advance(self, rank: Rank) -> None:
        doing, lasted = rank.doing, self.now - rank.since
        if isinstance(doing, Work):
            rank.steps += doing.steps
            if lasted >= doing.seconds:
                self._next(rank)
        elif isinstance(doing, Collective):
            members = range(self.size) if doing.ranks is None else doing.ranks
            if all(self._inside(self.ranks[member], doing) for member in members) and lasted >= doing.seconds:
                for member in members:
                    self._next(self.ranks[member])

    @staticmethod
    def _inside(rank: Rank, one: Collective) -> bool:
        return isinstance(rank.doing, Collective) and (rank.doing.name, rank.doing.ranks) == (one.name, one.ranks)


def steps(*, work: float = 1.0, count: int = 10**6, name: str = "bucket 2 of 5 of the gradients") -> Program:
    def program(rank: int) -> Generator[Action, None, None]:
        for _ in range(count):
            yield Work(work)
            yield Collective(name)

    return program


def one_differs(number: int, *actions: Action, name: str = "allreduce 'loss'") -> Program:
    """Return a program in which one rank does something else after some steps."""

    def program(rank: int) -> Generator[Action, None, None]:
        yield from steps(count=5)(rank)
        yield from actions if rank == number else [Collective(name)]
        yield from steps()(rank)

    return program
