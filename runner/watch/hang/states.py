"""Describes what each rank does while others wait in a collective, from its last record and an examination."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from spark_hvd.runner.channel.examination import Examination
from spark_hvd.runner.tracebacks import place
from spark_hvd.world.vitals import PendingCollective, Vitals

SILENT_SECONDS = 4.0
"""Seconds without a record after which a rank is silent, and not merely late."""
_BATCH_SECONDS = 2.0
"""Minimum seconds for a batch to count as a wait."""
_WORKS = 0.05
"""Minimum share of a core that a working process uses. A process that waits uses less, for its heartbeats."""
_STOPPED = ("stopped", "tracing-stop")


class RankActivity(Enum):
    """What a rank does, relative to one collective."""

    WAITS = "waits in it"
    ELSEWHERE = "waits in another collective"
    JOINED = "has called join()"
    MOVES = "goes through other collectives, or steps"
    DATA = "waits for data"
    WORKS = "uses a CPU or its GPU"
    IDLE = "does nothing"
    STOPPED = "is stopped by a signal"
    SILENT = "no longer reports"
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
        """Whether its process, or one of its child processes, uses a CPU, a disk or the rank's GPU."""
        found = self.examination
        cpu = self.cpu if found is None else found.cpu
        gpu = None if self.vitals is None else self.vitals.gpu_utilization
        return (cpu or 0.0) >= _WORKS or (gpu or 0.0) >= _WORKS or (found is not None and found.status == "disk-sleep")

    @property
    def stacks(self) -> str:
        """The stacks of its threads; empty if unknown."""
        return "" if self.examination is None else self.examination.stacks

    def pending(self) -> tuple[PendingCollective, ...]:
        """Return the collectives that the rank is in."""
        return () if self.vitals is None or self.vitals.ended else self.vitals.pending


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank does.

    Attributes:
        rank: Its number.
        activity: The kind of activity.
        words: A description of the activity, which continues "rank 1 is".
        collective: The name of the relevant collective that it is in; empty if there is none.
        last: Its last collective, if that helps, in words that continue the description.
        works: Whether it uses a CPU, a disk or its GPU.
    """

    rank: int
    activity: RankActivity
    words: str
    collective: str
    last: str
    works: bool


def state_of(seen: RankObservation, name: str, ranks: tuple[int, ...] | None) -> RankState:
    """Describe the state of a rank, relative to the collective ``name`` of ``ranks``."""
    activity = _activity_of(seen, name, ranks)
    outside = activity in (RankActivity.MOVES, RankActivity.WORKS, RankActivity.IDLE, RankActivity.DATA)
    collective = name if activity is RankActivity.WAITS else ""
    if activity is RankActivity.ELSEWHERE:
        collective = seen.pending()[0].name
    last = _last(seen) if outside else ""
    return RankState(seen.rank, activity, _words(activity, seen, name, ranks), collective, last, seen.works)


def entered(seen: RankObservation, name: str, ranks: tuple[int, ...] | None) -> PendingCollective | None:
    """Return the rank's part in a collective; None if it is not in it."""
    return next((one for one in seen.pending() if (one.name, one.ranks) == (name, ranks)), None)


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
    vitals, others = seen.vitals, seen.pending()
    assert vitals is not None
    if any(one.name.startswith("join ") for one in others):  # the rank has no more data, while others have some
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
            first = seen.pending()[0]
            return f"in {first.name} instead, for {first.seconds + seen.age:.0f} s"
        case RankActivity.JOINED:
            return "through with its data (it has called join), and nobody waits for it"
        case RankActivity.MOVES:
            return "continuing outside of it"
        case RankActivity.DATA:
            assert vitals is not None
            assert vitals.fetching is not None
            how = f"is being prepared ({_use(seen)})" if seen.works else "nothing here prepares (no CPU)"
            return f"waiting for its next batch for {vitals.fetching + seen.age:.0f} s, which {how}{at}"
        case RankActivity.WORKS if vitals is None:
            return f"working ({_use(seen)}), but has not reported yet{at}"
        case RankActivity.WORKS if seen.silent:
            return (
                f"busy in native code that holds Python's lock ({_use(seen)}), without any other report for "
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
            silence = "silent from the start" if vitals is None else f"silent for {seen.age:.0f} s"
            if seen.examination is None:
                return f"{silence}, and its task does not answer: is its host up, and can it be reached?"
            if vitals is None:
                return f"{silence}{at}"
            return f"{silence} without using a CPU: something in native code holds Python's lock and waits{at}"


def _at(seen: RankObservation) -> str:
    if seen.examination is None:
        return "" if seen.silent else " (its task did not answer when asked for details)"
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
