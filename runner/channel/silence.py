"""Which peers have been silent for how long, without a clock. Time in which the listener slept does not count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BEAT = 1.0
"""Seconds between two signs of life of a task."""
SILENT_AFTER = 7.0
"""Seconds without a sign of life after which a task counts as lost. They travel over TCP, which sends again after 0.2,
0.6, 1.4, 3 and 6.2 s what a broken network has swallowed: an interruption of five seconds is survived."""
HUB_PATIENCE = 30.0
"""Seconds without an answer of the hub after which a task ends its rank. Much longer than the hub's own patience, since
ranks train without the hub: a driver that is suspended or starved for twenty seconds must not end a healthy run. Only
once a host is cut off for good is somebody needed who ends its ranks, and then nothing is lost by waiting."""
_AWAKE = 1.0
"""Who looks less often than this has been suspended, or starved, in between."""
_SUSPENDED = 5.0
"""Only for longer gaps do the deadlines of others wait: on a busy machine gaps of a second or two add up."""


@dataclass(slots=True)
class AwakeClock:
    """A clock, read several times a second, that stands still while its reader is suspended for more than 5 s."""

    _looked: float | None = None
    _slept: float = 0.0

    def at(self, now: float) -> float:
        """The time now; called several times a second."""
        if self._looked is not None and now - self._looked > _SUSPENDED:
            self._slept += now - self._looked - _AWAKE
        self._looked = now
        return now - self._slept


@dataclass(slots=True)
class LivenessTracker:
    """When each of a listener's peers was last heard; peers that were never heard are not waited for."""

    _heard: dict[int, float] = field(default_factory=dict)
    _ticked: float | None = None

    def __contains__(self, peer: int) -> bool:
        return peer in self._heard

    def record_heartbeat(self, peer: int, now: float) -> None:
        """Note a sign of life."""
        self._heard[peer] = now

    def forget(self, peer: int) -> None:
        """Stop waiting for a peer."""
        self._heard.pop(peer, None)

    def tick(self, now: float) -> None:
        """Note that the listener is awake; called several times a second."""
        if self._ticked is not None and (slept := now - self._ticked - _AWAKE) > 0:
            # What was sent meanwhile may still lie in the kernel, so everybody gets the time back.
            self._heard = {peer: min(now, heard + slept) for peer, heard in self._heard.items()}
        self._ticked = now

    def expired(self, seconds: float, now: float) -> dict[int, float]:
        """The peers that have been silent for at least ``seconds``, and for how long."""
        return {peer: now - heard for peer, heard in self._heard.items() if now - heard >= seconds}


def describe(silent: Mapping[int, float], hosts: Mapping[int, str]) -> str:
    """Name ranks and hosts: ``ranks 2, 3 on 10.0.0.12 (last heard 7.1 s ago)``.

    ``silent`` has the seconds of each rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank in sorted(silent):
        ranks.setdefault(hosts.get(rank, "an unknown host"), []).append(rank)
    return "; ".join(
        f"rank{'s' if len(there) > 1 else ''} {', '.join(map(str, there))} on {host} "
        f"(last heard {max(silent[rank] for rank in there):.1f} s ago)"
        for host, there in ranks.items()
    )
