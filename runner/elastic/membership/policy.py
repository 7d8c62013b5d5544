"""Decides, without a clock, when an elastic run begins and when it must end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from spark_hvd.runner.elastic.membership import texts
from spark_hvd.runner.elastic.membership.events import End, Limits, Loss, Verdict
from spark_hvd.runner.elastic.membership.records import GenerationRecord, Worker
from spark_hvd.runner.elastic.membership.roster import Roster
from spark_hvd.world.words import count

SETTLE = 1.0
"""Seconds to wait for more tasks, which Spark starts together, once there are enough."""


class Start(Enum):
    """Whether a run should start now."""

    WAIT = "wait"
    GO = "go"
    GO_WITH_FEWER = "go with fewer"
    NEVER = "never"


@dataclass(slots=True)
class StartPolicy:
    """Begins a run with all tasks that it asked for or, after ``start_timeout``, with as many as it needs."""

    limits: Limits
    _since: float | None = None
    _enough_since: float | None = None

    def decide(self, available: int, now: float) -> Start:
        """Decide whether to start; call this several times a second.

        ``available`` is the number of tasks that could have a worker; ``now`` is in seconds, on any clock.
        """
        limits = self.limits
        if self._since is None:
            self._since = now
        if available < limits.num_proc:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        if available >= limits.max_num_proc or (self._enough_since is not None and now - self._enough_since >= SETTLE):
            return Start.GO
        if now - self._since < limits.start_timeout:
            return Start.WAIT
        return Start.GO_WITH_FEWER if available >= limits.min_num_proc else Start.NEVER


@dataclass(slots=True)
class FailurePolicy:
    """Ends a run that has too few ranks, too many failures, no progress or no state.

    Methods return the verdict that ends the run, or None.

    Attributes:
        resets: Generations that have failed.
        commits: The highest number of commits that any worker has reported; -1 before the first sync.
    """

    limits: Limits
    resets: int = 0
    commits: int = -1
    _no_progress: int = 0  # generations in a row that failed without a commit
    _short_since: float | None = None  # since when there are too few workers
    _apart_since: float | None = None  # since when there are enough workers, but they do not reach each other
    _culprit: int | None = None  # the worker lost last
    _error: str = "no rank has failed"

    def committed(self, commits: int) -> None:
        """Note the number of commits that a worker has reported."""
        if commits > max(self.commits, 0):
            self._no_progress = 0
        self.commits = max(self.commits, commits)

    def lost(self, worker: Worker, error: str) -> None:
        """Note the loss of a worker, which a verdict may name."""
        self._culprit, self._error = worker.number, error

    def enough(self) -> None:
        """Note that there are enough workers for a generation."""
        self._short_since = None

    def too_few(self, available: int, first: int, roster: Roster, now: float) -> Verdict | None:
        """Decide what follows if only ``available`` workers can take part, fewer than a generation needs.

        If fn has returned on some, it has no elastic function. Then all ``first`` workers have to return.
        """
        limits, returned = self.limits, len(roster.returned())
        if self._short_since is None:
            self._short_since = now
        unschedulable = roster.unschedulable()
        agents = len(roster.agents)
        if agents >= limits.max_num_proc and agents - len(unschedulable) < (first if returned else limits.min_num_proc):
            end, template = End.FAILED, texts.ALL_EXCLUDED
        elif now - self._short_since >= limits.elastic_timeout:
            end, template = End.TOO_FEW, texts.NOT_REPLACED if returned else texts.TOO_FEW
        else:
            return None
        left = texts.RETURNED_ON if returned else texts.LEFT
        text = template.format(
            left=left.format(ranks=count(returned or available, "rank"), first=first, limits=limits),
            ranks=count(available, "rank"),
            hosts=", ".join(sorted({agent.host for agent in unschedulable})),
            limits=limits,
            last=self._error,
        )
        return Verdict(end, text, self._culprit)

    def too_many_resets(self, last: GenerationRecord) -> Verdict | None:
        """Decide whether the failure of generation ``last`` was one too many."""
        limit = self.limits.reset_limit
        if limit is None or self.resets <= limit:
            return None
        text = texts.RESET_LIMIT.format(resets=self.resets, limits=self.limits, last=last.over or "")
        return Verdict(End.RESET_LIMIT, text, last.culprit)

    def futile(self, last: GenerationRecord, roster: Roster, now: float) -> Verdict | None:
        """Decide whether another generation is pointless; call this once before each is formed."""
        return self._no_commit(last, roster) or self._not_met(last, now)

    def _no_commit(self, last: GenerationRecord, roster: Roster) -> Verdict | None:
        failures = [number for number in last.members if roster.workers[number].loss is Loss.FAILED]
        if not failures or self.commits > max(last.commits, 0):
            return None
        self._no_progress += 1
        if self._no_progress < self.limits.no_progress_limit:
            return None
        return Verdict(End.FAILED, texts.NO_PROGRESS.format(times=self._no_progress), failures[0])

    def _not_met(self, last: GenerationRecord, now: float) -> Verdict | None:
        if last.met:
            self._apart_since = None
        elif self._apart_since is None:
            self._apart_since = now
        elif now - self._apart_since >= self.limits.elastic_timeout:
            culprit = last.members[0] if last.culprit is None else last.culprit
            return Verdict(End.FAILED, texts.NEVER_MET.format(limits=self.limits, last=last.over or ""), culprit)
        return None

    def state_lost(self, chosen: list[Worker]) -> Verdict | None:
        """Decide whether the members chosen for the next generation lack the state."""
        if self.commits <= 0 or any(worker.commits >= 0 for worker in chosen):
            return None
        text = texts.STATE_LOST.format(commits=self.commits, last=texts.brief(self._error))
        return Verdict(End.STATE_LOST, text, self._culprit)
