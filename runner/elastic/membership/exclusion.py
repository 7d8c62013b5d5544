"""Which hosts get no new workers because workers keep failing there; without a clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(slots=True)
class Exclusion:
    """Counts failures by task and host.

    A task's failures count until a worker of it takes part in a commit: where training goes on, the host is a good one.
    After ``limit`` failures, a host is excluded. ``cooldown`` is the least and the greatest number of seconds that this
    lasts; None: for ever. Each exclusion of a host is twice as long as the one before, and up to a quarter more by
    chance: hosts return apart.
    """

    limit: int
    cooldown: tuple[float, float] | None = None
    random: random.Random = field(default_factory=random.Random)
    _failures: dict[str, dict[int, int]] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)
    _times: dict[str, int] = field(default_factory=dict)

    def failed(self, host: str, task: int, now: float) -> float | None:
        """Count a failure.

        Returns:
            Seconds for which the host is excluded now (infinite for ever); None if it is not.
        """
        counts = self._failures.setdefault(host, {})
        counts[task] = counts.get(task, 0) + 1
        if sum(counts.values()) < self.limit:
            return None
        del self._failures[host]
        seconds = self._seconds(self._times.get(host, 0))
        self._times[host] = self._times.get(host, 0) + 1
        self._until[host] = now + seconds
        return seconds

    def succeeded(self, host: str, task: int) -> None:
        """A worker of this task, on this host, has taken part in a commit."""
        self._failures.get(host, {}).pop(task, None)

    def excluded(self, host: str, now: float) -> bool:
        """Whether the host gets no new workers now."""
        return self._until.get(host, 0.0) > now

    def for_ever(self, host: str) -> bool:
        """Whether the host gets none any more."""
        return self._until.get(host, 0.0) == float("inf")

    def _seconds(self, times: int) -> float:
        if self.cooldown is None:
            return float("inf")
        least, greatest = self.cooldown
        return float(min(greatest, least * 2.0 ** min(times, 32) * (1.0 + self.random.random() / 4)))
