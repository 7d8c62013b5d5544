"""Notices that ranks wait, requests an examination of all ranks, and gives a verdict. It does no I/O.

A rank is suspicious if it has been in one collective for longer than ``stall_warning``, or has gone silent. Ranks that
work between collectives, however long, are not suspicious, because nobody waits. A suspicion becomes a verdict only if
the same ranks still wait in the same collectives after all have been examined, some two seconds later.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from spark_hvd.runner.channel.examination import Examination
from spark_hvd.runner.channel.liveness import HEARTBEAT_SECONDS
from spark_hvd.runner.watch.hang.states import SILENT_SECONDS, RankObservation
from spark_hvd.runner.watch.hang.verdict import HangVerdict, Kind, Wait, judge
from spark_hvd.world.vitals import PendingCollective, Vitals
from spark_hvd.world.words import ranks_text

_ANSWER_SECONDS = 2.5
"""Seconds to wait for the examinations of all tasks."""
_RECORD_SECONDS = 2 * HEARTBEAT_SECONDS
"""Seconds to wait for one more record of each rank."""
_LEAST_PATIENCE = 1.0
_SETTLE_SECONDS = 5.0
"""Seconds to wait after a collective ended and no other began: its failure may be about to end the run."""


@dataclass(frozen=True, slots=True)
class Examine:
    """Decision: examine all ranks; the results go to :meth:`HangWatch.examined`."""


@dataclass(slots=True)
class _RankLog:
    """The memory of one rank."""

    vitals: Vitals
    heard: float
    cpu: float | None = None

    def take(self, vitals: Vitals, now: float) -> None:
        before, self.vitals, self.heard = self.vitals, vitals, now
        passed = vitals.clock - before.clock
        if passed > 0:
            self.cpu = max(0.0, vitals.cpu_seconds - before.cpu_seconds) / passed


@dataclass(slots=True)
class _Patience:
    """How long a suspicion must last before the next examination; doubles each time."""

    keys: frozenset[Hashable] = frozenset()
    next_at: float = 0.0
    seen: float = 0.0

    def is_over(self, keys: frozenset[Hashable], age: float, first: float, now: float) -> bool:
        if keys & self.keys:
            self.seen = now
        elif now - self.seen > _SETTLE_SECONDS:  # a record that is slightly late does not end a suspicion
            self.keys, self.next_at = frozenset(), first
        return bool(keys) and age >= self.next_at

    def double(self, keys: frozenset[Hashable], age: float) -> None:
        if keys:
            self.keys, self.next_at = keys, 2 * age


@dataclass(frozen=True, slots=True)
class _ActiveVerdict:
    """The verdict that currently holds."""

    verdict: HangVerdict
    since: float
    what: str
    """What has ended once the verdict no longer holds, in words."""
    keys: frozenset[Hashable]
    positions: Mapping[int, tuple[object, ...]]
    """The positions of the ranks that waited."""
    aloud: bool


@dataclass(slots=True)
class _Inspection:
    """An examination that has not ended."""

    since: float
    waits: frozenset[Hashable]
    silent: frozenset[Hashable]
    before: Mapping[int, Vitals]
    found: dict[int, Examination] = field(default_factory=dict)
    complete_at: float | None = None


class HangWatch:
    """Finds hangs, as the module describes. For one thread only."""

    def __init__(self) -> None:
        self._ranks: dict[int, _RankLog] = {}
        self._generation = -1
        self._size = 0
        self._since = 0.0
        """When the first rank of this generation reported."""
        self._inspection: _Inspection | None = None
        self._active: _ActiveVerdict | None = None
        self._ended_at: float | None = None
        self._waits = _Patience()
        self._silences = _Patience()
        self._straggled = 0.0
        """Seconds of the longest straggling that was reported; the next report comes after twice as long."""

    @property
    def verdict(self) -> HangVerdict | None:
        """The last verdict that still holds."""
        return None if self._active is None else self._active.verdict

    def take(self, vitals: Vitals, now: float) -> None:
        """Take a record of a rank; ``now`` is ``time.monotonic()`` of this process, not of the rank."""
        if vitals.generation < self._generation:
            return
        if vitals.generation > self._generation:
            self._ranks.clear()
            self._generation = vitals.generation
            self._inspection = self._active = self._ended_at = None
        if not self._ranks:
            self._since = now
        self._size = vitals.size
        if (rank := self._ranks.get(vitals.rank)) is None:
            self._ranks[vitals.rank] = _RankLog(vitals, now)
        else:
            rank.take(vitals, now)

    def examined(self, rank: int, examination: Examination, now: float) -> None:
        """Take the examination of a rank. Unrequested and late ones are dropped."""
        if self._inspection is not None:
            self._inspection.found[rank] = examination

    def tick(self, now: float) -> Examine | HangVerdict | None:
        """Decide what to do; called several times a second.

        Returns:
            Examine to examine all ranks; a verdict to report; None if all is well or already reported.
        """
        patience = self._patience()
        if patience is None:
            return None
        waits, silent = self._waiting(patience, now), self._silent(max(patience, SILENT_SECONDS), now)
        if self._inspection is not None:
            if not self._is_complete(self._inspection, now):
                return None
            inspection, self._inspection = self._inspection, None
            return self._judge(inspection, waits, silent, patience, now)
        if self._active is not None and self._is_over(self._active, waits, silent, now):
            ended, self._active = self._active, None
            if ended.aloud:
                seconds = ended.verdict.seconds + (self._ended_at or now) - ended.since
                return HangVerdict(Kind.OVER, f"the run continues: {ended.what} after {seconds:.0f} s", seconds=seconds)
        oldest = max((wait.seconds for wait in waits.values()), default=0.0)
        longest = max(silent.values(), default=0.0)
        over = [
            self._waits.is_over(frozenset(waits), oldest, patience, now),
            self._silences.is_over(frozenset(silent), longest, patience, now),
        ]
        if not any(over):
            return None
        before = {number: rank.vitals for number, rank in self._ranks.items()}
        self._inspection = _Inspection(now, frozenset(waits), frozenset(silent), before)
        return Examine()

    def _is_complete(self, inspection: _Inspection, now: float) -> bool:
        """Tell whether all answers have arrived, followed by another record of every rank.

        Records are up to a second old, and not of the same moment. If a rank is still outside of a collective in a
        record after the answers, the others really wait for that rank.
        """
        if inspection.complete_at is None:
            if len(inspection.found) == self._size or now - inspection.since >= _ANSWER_SECONDS:
                inspection.complete_at = now
            return False
        return now - inspection.complete_at >= _RECORD_SECONDS or all(
            rank.vitals.ended or rank.heard > inspection.complete_at or now - rank.heard > SILENT_SECONDS
            for rank in self._ranks.values()
        )

    def _judge(
        self,
        inspection: _Inspection,
        waits: Mapping[Hashable, Wait],
        silent: Mapping[Hashable, float],
        patience: float,
        now: float,
    ) -> HangVerdict | None:
        self._waits.double(frozenset(waits), max((wait.seconds for wait in waits.values()), default=0.0))
        late = self._silent(SILENT_SECONDS, now)  # all ranks that are silent now have been examined, too
        self._silences.double(frozenset(late), max([patience, *late.values()]))
        lasting = [wait for key, wait in waits.items() if key in inspection.waits]
        if not lasting and not silent.keys() & inspection.silent:
            return None
        observations = {rank: self._observe(rank, inspection, now) for rank in range(self._size)}
        verdict = judge(lasting, observations, patience)
        if verdict is None:
            return None
        aloud = verdict.kind is Kind.HANG or verdict.seconds >= 2 * self._straggled
        if verdict.kind is Kind.STRAGGLER and aloud:
            self._straggled = verdict.seconds
        keys = frozenset(waits) & inspection.waits or frozenset(silent) & inspection.silent
        positions = {wait.rank: _position(self._ranks[wait.rank].vitals) for wait in lasting}
        was_aloud = self._active is not None and self._active.aloud
        oldest = max(lasting, key=lambda wait: wait.seconds, default=None)
        what = f"{ranks_text(verdict.ranks)} reported again" if oldest is None else f"{oldest.name} has ended"
        self._active, self._ended_at = _ActiveVerdict(verdict, now, what, keys, positions, aloud or was_aloud), None
        return verdict if aloud else None

    def _is_over(
        self, active: _ActiveVerdict, waits: Mapping[Hashable, Wait], silent: Mapping[Hashable, float], now: float
    ) -> bool:
        """Tell whether the reported wait has ended, and not only because the run is about to end."""
        if active.keys & (waits.keys() | silent.keys()):
            self._ended_at = None
            return False
        if self._ended_at is None:
            self._ended_at = now
        heard = [self._ranks[rank] for rank in active.positions]
        if any(_position(rank.vitals) != active.positions[rank.vitals.rank] for rank in heard):
            return True
        settled = now - self._ended_at >= _SETTLE_SECONDS
        return settled and all(now - rank.heard < SILENT_SECONDS and not rank.vitals.ended for rank in heard)

    def _patience(self) -> float | None:
        """Return the world's stall_warning; None if it is off or still unknown."""
        if not self._ranks:
            return None
        first = self._ranks[min(self._ranks)].vitals.stall_warning
        return None if first is None else max(first, _LEAST_PATIENCE)

    def _waiting(self, patience: float, now: float) -> dict[Hashable, Wait]:
        """Return the waits in collectives that have lasted too long, by the identity of each collective."""
        found: dict[Hashable, Wait] = {}
        for number, rank in self._ranks.items():
            age = now - rank.heard
            if rank.vitals.ended or age > SILENT_SECONDS:  # a silent rank may have ended, and its last record be lost
                continue
            for key, one in _parts(rank.vitals).items():
                if one.seconds >= patience:
                    found[key] = Wait(number, one.name, one.ranks, one.seconds + age)
        return found

    def _silent(self, patience: float, now: float) -> dict[Hashable, float]:
        """Return the seconds of silence of the ranks that have been silent for too long."""
        found: dict[Hashable, float] = {}
        for number in range(self._size):
            rank = self._ranks.get(number)
            since = self._since if rank is None else rank.heard
            if now - since >= patience and not (rank is not None and rank.vitals.ended):
                found[number, None if rank is None else rank.vitals.clock] = now - since
        return found

    def _observe(self, number: int, inspection: _Inspection, now: float) -> RankObservation:
        rank, examination = self._ranks.get(number), inspection.found.get(number)
        if rank is None:
            return RankObservation(number, None, now - self._since, False, None, examination)
        before = inspection.before.get(number)
        moved = before is None or _position(before) != _position(rank.vitals) or bool(_ended(before, rank.vitals))
        return RankObservation(number, rank.vitals, now - rank.heard, moved, rank.cpu, examination)


def _position(vitals: Vitals) -> tuple[object, ...]:
    return vitals.entered, vitals.stage, vitals.epoch, vitals.total_steps


def _parts(vitals: Vitals) -> dict[Hashable, PendingCollective]:
    """Return the collectives that a rank is in, by an identity that includes the start on the rank's clock.

    Names alone do not identify them, because they recur each step.
    """
    return {(vitals.rank, one.name, one.ranks, round(vitals.clock - one.seconds, 2)): one for one in vitals.pending}


def _ended(before: Vitals, after: Vitals) -> set[Hashable]:
    return _parts(before).keys() - _parts(after).keys()
