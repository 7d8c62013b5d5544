"""When an elastic run is not worth going on with: too few ranks, too many failures, no progress, no state."""

from __future__ import annotations

from dataclasses import dataclass

from spark_hvd.runner.elastic.membership import texts
from spark_hvd.runner.elastic.membership.events import End, Limits, Loss, Verdict
from spark_hvd.runner.elastic.membership.records import GenerationRecord, Worker
from spark_hvd.runner.elastic.membership.roster import Roster


@dataclass(slots=True)
class FailurePolicy:
    """Each method gives the verdict that ends the run, or None if it may go on; no clock.

    Attributes:
        resets: Generations that have failed.
        commits: The highest number of commits that any worker has told of; -1 before the first sync.
    """

    limits: Limits
    resets: int = 0
    commits: int = -1
    _no_progress: int = 0
    _short_since: float | None = None  # of workers
    _apart_since: float | None = None  # workers enough, who do not reach each other
    _culprit: int | None = None
    _error: str = "no rank has failed"

    def committed(self, commits: int) -> None:
        """A worker has told of its commits."""
        if commits > max(self.commits, 0):
            self._no_progress = 0
        self.commits = max(self.commits, commits)

    def lost(self, worker: Worker, error: str) -> None:
        """A worker was lost."""
        self._culprit, self._error = worker.number, error

    def enough(self) -> None:
        """There are enough workers for a generation."""
        self._short_since = None

    def too_few(self, there: int, roster: Roster, now: float) -> Verdict | None:
        """There are fewer workers than a generation needs."""
        limits = self.limits
        if self._short_since is None:
            self._short_since = now
        unschedulable = roster.unschedulable()
        agents = len(roster.agents)
        if agents >= limits.max_num_proc and agents - len(unschedulable) < limits.min_num_proc:
            hosts = [agent.host for agent in unschedulable]
            return Verdict(End.FAILED, texts.all_excluded(there, limits, hosts, self._error), self._culprit)
        if now - self._short_since >= limits.elastic_timeout:
            return Verdict(End.TOO_FEW, texts.too_few(there, limits, self._error), self._culprit)
        return None

    def too_many_resets(self, last: GenerationRecord) -> Verdict | None:
        """A generation has failed, and why is known."""
        limit = self.limits.reset_limit
        if limit is None or self.resets <= limit:
            return None
        return Verdict(End.RESET_LIMIT, texts.reset_limit(self.resets, self.limits, last.over or ""), last.culprit)

    def futile(self, last: GenerationRecord, roster: Roster, now: float) -> Verdict | None:
        """The next generation is about to be formed; to be called once for each."""
        return self._no_commit(last, roster) or self._not_met(last, now)

    def _no_commit(self, last: GenerationRecord, roster: Roster) -> Verdict | None:
        failures = [number for number in last.members if roster.workers[number].loss is Loss.FAILED]
        if not failures or self.commits > max(last.commits, 0):
            return None
        self._no_progress += 1
        if self._no_progress < self.limits.no_progress_limit:
            return None
        return Verdict(End.FAILED, texts.no_progress(self._no_progress), failures[0])

    def _not_met(self, last: GenerationRecord, now: float) -> Verdict | None:
        if last.met:
            self._apart_since = None
        elif self._apart_since is None:
            self._apart_since = now
        elif now - self._apart_since >= self.limits.elastic_timeout:
            return Verdict(End.FAILED, texts.never_met(self.limits, last.over or ""), last.culprit)
        return None

    def state_lost(self, chosen: list[Worker]) -> Verdict | None:
        """These are to be the next generation."""
        if self.commits <= 0 or any(worker.commits >= 0 for worker in chosen):
            return None
        return Verdict(End.STATE_LOST, texts.state_lost(self.commits, self._error), self._culprit)
