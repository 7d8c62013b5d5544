"""When an elastic run begins: with all tasks it asks for, or, once their time is up, with as many as it needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from spark_hvd.runner.elastic.membership.events import Limits

SETTLE = 1.0
"""Seconds that tasks which Spark starts together get to come, when there are enough already."""


class Start(Enum):
    """What to do now."""

    WAIT = "wait"
    GO = "go"
    GO_WITH_FEWER = "go with fewer"
    NEVER = "never"


@dataclass(slots=True)
class StartPolicy:
    """Decides when a run begins; no clock."""

    limits: Limits
    _since: float | None = None
    _enough_since: float | None = None

    def decide(self, there: int, now: float) -> Start:
        """Decide; to be called several times a second.

        ``there`` is how many tasks could have a worker; ``now`` is in seconds, on any clock.
        """
        limits = self.limits
        if self._since is None:
            self._since = now
        if there < limits.num_proc:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        if there >= limits.max_num_proc or (self._enough_since is not None and now - self._enough_since >= SETTLE):
            return Start.GO
        if now - self._since < limits.start_timeout:
            return Start.WAIT
        return Start.GO_WITH_FEWER if there >= limits.min_num_proc else Start.NEVER
