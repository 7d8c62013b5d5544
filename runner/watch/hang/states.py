"""What each rank does while others wait in a collective: a pure function of its last record and an examination."""

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


class RankActivity(Enum):
    """What a rank does, relative to one collective."""

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
class RankObservation:
    """Everything known about one rank at one moment.

    Attributes:
        rank: Its number.
        vitals: Its last record; None if it has sent none.
        age: Seconds since that record arrived.
        moved: Whether it has entered or left a collective, or ended a step, since the examination was requested.
        cpu: Cores used recently, from its records; None if unknown.
        examination: The examination of its process; None if its task did not answer.
    """

    rank: int
    vitals: Vitals | None
    age: float
    moved: bool
    cpu: float | None
    examination: Examination | None

    @property
    def silent(self) -> bool:
        """Whether its records have stopped."""
        return self.vitals is None or (self.age > SILENT_SECONDS and not self.vitals.ended)

    @property
    def stopped(self) -> bool:
        """Whether its process is stopped by a signal or a debugger."""
        return self.examination is not None and self.examination.status in _STOPPED

    @property
    def works(self) -> bool:
        """Whether its process, or one of its child processes, uses a processor, a disk or the rank's GPU."""
        looked = self.examination
        cpu = self.cpu if looked is None else looked.cpu
        gpu = None if self.vitals is None else self.vitals.gpu_utilization
        return (
            (cpu or 0.0) >= _WORKS or (gpu or 0.0) >= _WORKS or (looked is not None and looked.status == "disk-sleep")
        )

    @property
    def stacks(self) -> str:
        """The stacks of its threads; empty if unknown."""
        return "" if self.examination is None else self.examination.stacks

    def underway(self) -> tuple[Underway, ...]:
        """The collectives that it is in."""
        return () if self.vitals is None or self.vitals.ended else self.vitals.underway


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank does, in words that follow "rank 1 is".

    Attributes:
        rank: Its number.
        activity: Kind of activity.
        words: Its description.
        collective: The name of the relevant collective that it is in; empty if there is none.
        last: Its last collective, if that helps, in words that follow the others.
        works: Whether it uses a processor, a disk or its GPU.
    """

    rank: int
    activity: RankActivity
    words: str
    collective: str
    last: str
    works: bool


def state_of(seen: RankObservation, name: str, ranks: tuple[int, ...] | None) -> RankState:
    """The state of a rank."""
    activity = _activity_of(seen, name, ranks)
    last = (
        _last(seen)
        if activity in (RankActivity.MOVES, RankActivity.WORKS, RankActivity.IDLE, RankActivity.DATA)
        else ""
    )
    inside = (
        name
        if activity is RankActivity.WAITS
        else seen.underway()[0].name
        if activity is RankActivity.ELSEWHERE
        else ""
    )
    return RankState(seen.rank, activity, _words(activity, seen, name, ranks), inside, last, seen.works)


def entered(seen: RankObservation, name: str, ranks: tuple[int, ...] | None) -> Underway | None:
    """The rank's part in a collective; None if it has none."""
    return next((one for one in seen.underway() if (one.name, one.ranks) == (name, ranks)), None)


def _activity_of(seen: RankObservation, name: str, ranks: tuple[int, ...] | None) -> RankActivity:
    if seen.vitals is not None and seen.vitals.ended:
        return RankActivity.ENDED
    if seen.stopped:
        return RankActivity.STOPPED
    if seen.silent and seen.examination is None:
        return RankActivity.SILENT
    if entered(seen, name, ranks) is not None:
        return RankActivity.WAITS
    if seen.silent:
        return RankActivity.WORKS if seen.works else RankActivity.SILENT
    vitals, others = seen.vitals, seen.underway()
    assert vitals is not None
    if any(one.name.startswith("join ") for one in others):  # it has no more data, and waits for the others'
        return RankActivity.JOINED
    if seen.moved:
        return RankActivity.MOVES
    if others:
        return RankActivity.ELSEWHERE
    if vitals.fetching is not None and vitals.fetching + seen.age >= _BATCH_SECONDS:
        return RankActivity.DATA
    return RankActivity.WORKS if seen.works else RankActivity.IDLE


def _words(activity: RankActivity, seen: RankObservation, name: str, ranks: tuple[int, ...] | None) -> str:
    vitals, at = seen.vitals, _at(seen)
    match activity:
        case RankActivity.WAITS:
            mine = entered(seen, name, ranks)
            assert mine is not None
            return f"in {name} for {mine.seconds + seen.age:.0f} s"
        case RankActivity.ELSEWHERE:
            first = seen.underway()[0]
            return f"in {first.name} instead, for {first.seconds + seen.age:.0f} s"
        case RankActivity.JOINED:
            return "through with its data (it has called join), and nobody waits for it"
        case RankActivity.MOVES:
            return "going on outside of it"
        case RankActivity.DATA:
            assert vitals is not None
            assert vitals.fetching is not None
            how = f"being prepared ({_use(seen)})" if seen.works else "not being prepared by anything here (no CPU)"
            return f"waiting for its next batch for {vitals.fetching + seen.age:.0f} s, which is {how}{at}"
        case RankActivity.WORKS if vitals is None:
            return f"working ({_use(seen)}), and not heard of so far{at}"
        case RankActivity.WORKS if seen.silent:
            return (
                f"busy in native code that holds Python's lock ({_use(seen)}), nothing else heard of it for "
                f"{seen.age:.0f} s{at}"
            )
        case RankActivity.WORKS:
            return f"working ({_use(seen)}){at}"
        case RankActivity.IDLE:
            return f"idle (no CPU) outside of collectives{at}"
        case RankActivity.ENDED:
            return "out of the world: its function has ended, or it has called hvd.shutdown()"
        case RankActivity.STOPPED:
            return "stopped by a signal (SIGSTOP) or a debugger"
        case RankActivity.SILENT:
            heard = "never heard of" if vitals is None else f"silent for {seen.age:.0f} s"
            if seen.examination is None:
                return f"{heard}, and its task does not answer: is its host up, and can it be reached?"
            if vitals is None:
                return f"{heard} so far{at}"
            return f"{heard} without using a CPU: something in native code holds Python's lock and waits{at}"


def _at(seen: RankObservation) -> str:
    if seen.examination is None:
        return "" if seen.silent else " (its task did not answer when it was asked for more)"
    where = place(seen.stacks)
    return f", at {where}" if where else ""


def _last(seen: RankObservation) -> str:
    vitals = seen.vitals
    if vitals is None or not vitals.last:
        return ""
    return f"; its last collective was {vitals.last}, {vitals.last_seconds + seen.age:.0f} s ago"


def _use(seen: RankObservation) -> str:
    cpu = seen.cpu if seen.examination is None else seen.examination.cpu
    gpu = None if seen.vitals is None else seen.vitals.gpu_utilization
    parts = [f"{100 * (cpu or 0.0):.0f} % of a core"]
    if gpu is not None:
        parts.append(f"{100 * gpu:.0f} % of its GPU")
    if seen.examination is not None and seen.examination.status == "disk-sleep":
        parts.append("waiting for a disk")
    return ", ".join(parts)
