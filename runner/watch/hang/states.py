"""What each rank does while others wait in a collective: a pure function of its last words and of a closer look."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from spark_hvd.runner.channel.examination import Examination
from spark_hvd.runner.tracebacks import place
from spark_hvd.world.vitals import Underway, Vitals

SILENT_SECONDS = 4.0
"""Without a record for so long a rank is not merely late with it."""
_BATCH_SECONDS = 2.0
"""A batch that takes less is no wait."""
_WORKS = 0.05
"""Share of a core from which on a process works. One that waits uses less, for its signs of life."""
_STOPPED = ("stopped", "tracing-stop")


class Doing(Enum):
    """What a rank does, seen from one collective."""

    WAITS = "waits in it"
    ELSEWHERE = "waits in another collective"
    JOINED = "has called join()"
    MOVES = "goes through other collectives, or steps"
    DATA = "waits for data"
    WORKS = "uses a processor or its GPU"
    IDLE = "does nothing"
    STOPPED = "is stopped by a signal"
    SILENT = "does not tell anything any more"
    ENDED = "has ended, or left the world"


@dataclass(frozen=True, slots=True)
class Sight:
    """All that is known of one rank at one moment.

    Attributes:
        rank: Whose.
        vitals: Its last record; None if it has sent none.
        age: Seconds since that came.
        moved: Whether it has entered or left a collective, or ended a step, since the look was asked for.
        cpu: Processors used lately, from its records; None where they do not tell.
        examination: The closer look; None if its task did not answer.
    """

    rank: int
    vitals: Vitals | None
    age: float
    moved: bool
    cpu: float | None
    examination: Examination | None

    @property
    def silent(self) -> bool:
        """Whether it has stopped to tell of itself."""
        return self.vitals is None or (self.age > SILENT_SECONDS and not self.vitals.ended)

    @property
    def stopped(self) -> bool:
        """Whether its process is stopped by a signal or a debugger."""
        return self.examination is not None and self.examination.status in _STOPPED

    @property
    def works(self) -> bool:
        """Whether its process, or one that it has started, uses a processor, a disk or the rank's GPU."""
        looked = self.examination
        cpu = self.cpu if looked is None else looked.cpu
        gpu = None if self.vitals is None else self.vitals.gpu_utilization
        return (
            (cpu or 0.0) >= _WORKS or (gpu or 0.0) >= _WORKS or (looked is not None and looked.status == "disk-sleep")
        )

    @property
    def stacks(self) -> str:
        """Of its threads; empty if there are none."""
        return "" if self.examination is None else self.examination.stacks

    def underway(self) -> tuple[Underway, ...]:
        """The collectives that it is in."""
        return () if self.vitals is None or self.vitals.ended else self.vitals.underway


@dataclass(frozen=True, slots=True)
class State:
    """What a rank does, in words that go behind "rank 1 is".

    Attributes:
        rank: Whose.
        doing: The kind of it.
        words: The words.
        collective: The name of the collective that it is in; empty for none that matters.
        last: What it did last in collectives, where that helps; words that go behind the others.
        works: Whether it uses a processor, a disk or its GPU.
    """

    rank: int
    doing: Doing
    words: str
    collective: str
    last: str
    works: bool


def state_of(sight: Sight, name: str, ranks: tuple[int, ...] | None) -> State:
    """What a rank does.

    Args:
        sight: What is known of it.
        name: The collective that others wait in.
        ranks: Which take part in that; None for all.
    """
    doing = _doing(sight, name, ranks)
    last = _last(sight) if doing in (Doing.MOVES, Doing.WORKS, Doing.IDLE, Doing.DATA) else ""
    inside = name if doing is Doing.WAITS else sight.underway()[0].name if doing is Doing.ELSEWHERE else ""
    return State(sight.rank, doing, _words(doing, sight, name, ranks), inside, last, sight.works)


def entered(sight: Sight, name: str, ranks: tuple[int, ...] | None) -> Underway | None:
    """The rank's part in a collective; None if it has none."""
    return next((one for one in sight.underway() if (one.name, one.ranks) == (name, ranks)), None)


def has_joined(one: Underway) -> bool:
    """Whether this is a rank that has no more data and waits for the others' (``hvd.join``)."""
    return one.name.startswith("join ")


def _doing(sight: Sight, name: str, ranks: tuple[int, ...] | None) -> Doing:
    if sight.vitals is not None and sight.vitals.ended:
        return Doing.ENDED
    if sight.stopped:
        return Doing.STOPPED
    if sight.silent and sight.examination is None:
        return Doing.SILENT
    if entered(sight, name, ranks) is not None:
        return Doing.WAITS
    if sight.silent:
        return Doing.WORKS if sight.works else Doing.SILENT
    vitals, others = sight.vitals, sight.underway()
    assert vitals is not None
    if any(map(has_joined, others)):
        return Doing.JOINED
    if sight.moved:
        return Doing.MOVES
    if others:
        return Doing.ELSEWHERE
    if vitals.fetching is not None and vitals.fetching + sight.age >= _BATCH_SECONDS:
        return Doing.DATA
    return Doing.WORKS if sight.works else Doing.IDLE


def _words(doing: Doing, sight: Sight, name: str, ranks: tuple[int, ...] | None) -> str:
    vitals, at = sight.vitals, _at(sight)
    match doing:
        case Doing.WAITS:
            mine = entered(sight, name, ranks)
            assert mine is not None
            return f"in {name} for {mine.seconds + sight.age:.0f} s"
        case Doing.ELSEWHERE:
            first = sight.underway()[0]
            return f"in {first.name} instead, for {first.seconds + sight.age:.0f} s"
        case Doing.JOINED:
            return "through with its data (it has called join), and nobody waits for it"
        case Doing.MOVES:
            return "going on outside of it"
        case Doing.DATA:
            assert vitals is not None
            assert vitals.fetching is not None
            how = f"being prepared ({_use(sight)})" if sight.works else "not being prepared by anything here (no CPU)"
            return f"waiting for its next batch for {vitals.fetching + sight.age:.0f} s, which is {how}{at}"
        case Doing.WORKS if vitals is None:
            return f"working ({_use(sight)}), and not heard of so far{at}"
        case Doing.WORKS if sight.silent:
            return (
                f"busy in native code that holds Python's lock ({_use(sight)}), nothing else heard of it for "
                f"{sight.age:.0f} s{at}"
            )
        case Doing.WORKS:
            return f"working ({_use(sight)}){at}"
        case Doing.IDLE:
            return f"idle (no CPU) outside of collectives{at}"
        case Doing.ENDED:
            return "out of the world: its function has ended, or it has called hvd.shutdown()"
        case Doing.STOPPED:
            return "stopped by a signal (SIGSTOP) or a debugger"
        case Doing.SILENT:
            heard = "never heard of" if vitals is None else f"silent for {sight.age:.0f} s"
            if sight.examination is None:
                return f"{heard}, and its task does not answer: is its host up, and can it be reached?"
            if vitals is None:
                return f"{heard} so far{at}"
            return f"{heard} without using a CPU: something in native code holds Python's lock and waits{at}"


def _at(sight: Sight) -> str:
    if sight.examination is None:
        return "" if sight.silent else " (its task did not answer when it was asked for more)"
    where = place(sight.stacks)
    return f", at {where}" if where else ""


def _last(sight: Sight) -> str:
    vitals = sight.vitals
    if vitals is None or not vitals.last:
        return ""
    return f"; its last collective was {vitals.last}, {vitals.last_seconds + sight.age:.0f} s ago"


def _use(sight: Sight) -> str:
    cpu = sight.cpu if sight.examination is None else sight.examination.cpu
    gpu = None if sight.vitals is None else sight.vitals.gpu_utilization
    parts = [f"{100 * (cpu or 0.0):.0f} % of a core"]
    if gpu is not None:
        parts.append(f"{100 * gpu:.0f} % of its GPU")
    if sight.examination is not None and sight.examination.status == "disk-sleep":
        parts.append("waiting for a disk")
    return ", ".join(parts)
