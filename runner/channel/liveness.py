"""Tracks which peers are alive, without a clock. Time for which the listener slept does not count as silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats of a task."""
SILENT_AFTER = 7.0
"""Seconds without a heartbeat after which a task counts as lost. TCP repeats lost data after 0.2, 0.6, 1.4, 3 and
6.2 s, so a run survives a network that is down for five seconds."""
HUB_PATIENCE = 30.0
"""Seconds without an answer from the hub after which a task ends its rank. This is much longer than SILENT_AFTER,
because ranks train without the hub: a driver that is suspended or starved for twenty seconds must not end a healthy
run. Tasks must end their ranks only if a host is cut off permanently, and then it does no harm to wait."""
_AWAKE = 1.0
"""Seconds; if two readings of the time are further apart, the reader was suspended or starved in between."""
_SUSPENDED = 5.0
"""Seconds; only longer gaps postpone the deadlines of others. On a busy machine, gaps of a second or two add up."""


@dataclass(slots=True)
class AwakeClock:
    """A clock, read several times a second, that stands still while its reader is suspended for more than 5 s."""

    _looked: float | None = None
    _slept: float = 0.0

    def at(self, now: float) -> float:
        """Return the time of this clock; called several times a second."""
        if self._looked is not None and now - self._looked > _SUSPENDED:
            self._slept += now - self._looked - _AWAKE
        self._looked = now
        return now - self._slept


@dataclass(slots=True)
class LivenessTracker:
    """Records when each of a listener's peers was last heard. It ignores peers that were never heard."""

    _heard: dict[int, float] = field(default_factory=dict)
    _ticked: float | None = None

    def __contains__(self, peer: int) -> bool:
        return peer in self._heard

    def record_heartbeat(self, peer: int, now: float) -> None:
        """Note that a peer is alive."""
        self._heard[peer] = now

    def forget(self, peer: int) -> None:
        """Stop waiting for a peer."""
        self._heard.pop(peer, None)

    def tick(self, now: float) -> None:
        """Note that the listener is awake; called several times a second."""
        if self._ticked is not None and (slept := now - self._ticked - _AWAKE) > 0:
            # Messages that arrived meanwhile may still be unread, so all peers get this time back.
            self._heard = {peer: min(now, heard + slept) for peer, heard in self._heard.items()}
        self._ticked = now

    def expired(self, seconds: float, now: float) -> dict[int, float]:
        """Return the peers that have been silent for at least ``seconds``, and for how long."""
        return {peer: now - heard for peer, heard in self._heard.items() if now - heard >= seconds}


def describe(silent: Mapping[int, float], hosts: Mapping[int, str]) -> str:
    """Name ranks and hosts: ``ranks 2, 3 on 10.0.0.12 (last heard 7.1 s ago)``.

    ``silent`` has the seconds of each rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank in sorted(silent):
        ranks.setdefault(hosts.get(rank, "an unknown host"), []).append(rank)
    return "; ".join(
        f"rank{'s' if len(of_host) > 1 else ''} {', '.join(map(str, of_host))} on {host} "
        f"(last heard {max(silent[rank] for rank in of_host):.1f} s ago)"
        for host, of_host in ranks.items()
    )
