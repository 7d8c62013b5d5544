"""The hub's decisions as a pure state machine: messages and clock ticks in, messages to ranks out.

The tasks of a run meet in the hub, which does no training work. It passes on the port of rank 0's store, tells all
tasks if a rank has failed or gone silent, and lets all leave together at the end. It runs on the driver, or in rank 0's
task if executors cannot reach the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, ClassVar, Protocol

from spark_hvd.runner.channel.liveness import HEARTBEAT_SECONDS, SILENT_AFTER, LivenessTracker, describe

Message = dict[str, Any]
Kinds = Mapping[str, Mapping[str, type | UnionType]]
"""Kinds of messages, with the types of their fields."""

FALLBACK_AFTER = 10.0
"""Seconds after the latest hello at which the hub no longer waits for missing ranks, and all meet elsewhere."""
FALLBACK_AFTER_HERE = 30.0
"""The same for tasks on the hub's machine, which reach it once they are up."""
ECHO_GRACE = 1.0
"""Seconds to wait for the cause of an error that looks like an echo."""


@dataclass(frozen=True, slots=True)
class Send:
    """Decision: send ``message`` to ``rank``."""

    rank: int
    message: Message


class HubLogic(Protocol):
    """The decisions of a hub: messages and clock ticks in, messages out. It does no I/O, and one thread calls it."""

    KINDS: ClassVar[Kinds]
    """The messages that :meth:`handle` takes."""
    FAREWELL: ClassVar[Message]
    """The message that makes a task stop."""

    @property
    def senders(self) -> range:
        """The numbers that tasks can have."""

    @property
    def most_ranks(self) -> int:
        """How many ranks a world of this run can have."""

    def handle(self, message: Message, now: float) -> list[Send]:
        """Handle one message of a task."""

    def record_heartbeat(self, rank: int, now: float) -> None:
        """Note that a task is alive."""

    def tick(self, now: float) -> list[Send]:
        """Decide what follows from the time; called several times a second."""

    def stop(self, reason: str) -> list[Send]:
        """Tell every task to stop, with the reason."""

    def tell(self, message: Message, rank: int | None = None) -> list[Send]:
        """Send a message to one rank's task, or to all (None), except tasks whose ranks have not started."""

    @property
    def all_gone(self) -> bool:
        """Whether no process of any task is left."""


@dataclass(slots=True)
class HubState(HubLogic):
    """The state of a static run's hub.

    Ranks may run for ``timeout`` seconds after all have met; None means no limit. With ``may_fall_back``, they can meet
    elsewhere if some cannot reach this hub. If the pickled values together exceed ``max_result_bytes``, ranks send them
    here rather than through the heap of Spark's driver; None means no limit.
    """

    KINDS: ClassVar[Kinds] = {
        "hello": {"attempt": int, "host": str | None},
        "alive": {},
        "ready": {"store": list | None},
        "ended": {"ok": bool, "bytes": int | None, "echo": bool | None},
        "relay": {"to": int, "body": dict},
        "value": {"part": int, "parts": int},
        "gone": {},
    }
    FAREWELL: ClassVar[Message] = {"type": "stop", "reason": "the hub failed", "culprit": None}

    size: int
    timeout: float | None = None
    may_fall_back: bool = False
    max_result_bytes: int | None = None
    attempts: dict[int, int] = field(default_factory=dict)
    store: tuple[str, int] | None = None  # the address of rank 0's store
    ready: set[int] = field(default_factory=set)
    ended_ok: dict[int, int] = field(default_factory=dict)  # rank -> bytes of its value
    values: dict[int, bytes] = field(default_factory=dict)  # those that did not go through Spark
    failed: list[int] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    hosts: dict[int, str] = field(default_factory=dict)
    lost: dict[int, float] = field(default_factory=dict)  # rank -> seconds of silence
    liveness: LivenessTracker = field(default_factory=LivenessTracker)
    stopped: str | None = None
    fallback_after: float = FALLBACK_AFTER
    _last_hello: float | None = None
    _going_since: float | None = None
    _stop_at: float | None = None
    fell_back: bool = False
    _released: bool = False
    _parts: dict[int, list[bytes]] = field(default_factory=dict)

    def handle(self, message: Message, now: float) -> list[Send]:
        rank = message["rank"]
        self.record_heartbeat(rank, now)
        match message["type"]:
            case "hello":
                if message.get("host"):  # the task sends heartbeats from now on
                    self.hosts[rank] = message["host"]
                    self.liveness.record_heartbeat(rank, now)
                return self._hello(rank, message["attempt"], now)
            case "alive":
                if rank not in self.gone:
                    self.liveness.record_heartbeat(rank, now)
                return []
            case "ready":
                self.ready.add(rank)
                self.store = message.get("store") or self.store
                return self._maybe_go(now)
            case "ended":
                return self._ended(rank, message=message, now=now)
            case "relay":
                return [Send(message["to"], message["body"])] if message["to"] in self.attempts else []
            case "value":
                parts = self._parts.setdefault(rank, [])
                parts.append(message["payload"])
                if len(parts) < message["parts"]:
                    return []
                self.values[rank] = b"".join(self._parts.pop(rank))
                return [Send(rank, {"type": "kept"})] if rank in self.attempts else []
            case "gone":
                self.gone.add(rank)
                self.liveness.forget(rank)
                return []
            case other:
                raise AssertionError(f"unknown message {other!r}")

    def record_heartbeat(self, rank: int, now: float) -> None:
        if rank in self.liveness:
            self.liveness.record_heartbeat(rank, now)

    def tick(self, now: float) -> list[Send]:
        self.liveness.tick(now)
        if not self.fell_back and self.liveness.expired(SILENT_AFTER, now):
            return self._lose(now)
        if self._stop_at is not None and now >= self._stop_at and self.stopped is None:
            return self.stop("peer")
        if self._over(now):
            return self.stop("timeout")
        if self._someone_cannot_reach_us(now):
            self.fell_back = True
            return self._to_all({"type": "fallback"})
        return []

    def stop(self, reason: str) -> list[Send]:
        """See base class; ``reason`` is "peer", "timeout", "interrupt", "start" or "lost"."""
        if self.stopped is not None:
            return []
        self.stopped = reason
        message: Message = {"type": "stop", "reason": reason, "culprit": self.failed[0] if self.failed else None}
        if self.lost:
            message["lost"] = self.describe_lost()
        return self._to_all(message)

    def tell(self, message: Message, rank: int | None = None) -> list[Send]:
        if self._going_since is None:  # tasks and ranks still wait for "met" or "go", and expect no other message
            return []
        return [send for send in self._to_all(message) if rank in (None, send.rank)]

    def describe_lost(self) -> str:
        """Name the ranks that have gone silent, with hosts and times."""
        return describe(self.lost, self.hosts)

    @property
    def senders(self) -> range:
        return range(self.size)

    @property
    def most_ranks(self) -> int:
        return self.size

    @property
    def all_met(self) -> bool:
        """Whether every rank has sent hello."""
        return len(self.attempts) == self.size

    @property
    def all_gone(self) -> bool:
        return self.gone | self.lost.keys() >= self.attempts.keys()

    @property
    def done(self) -> bool:
        """Whether every rank has ended, well or badly."""
        return len(self.ended_ok) + len(self.failed) == self.size

    def _lose(self, now: float) -> list[Send]:
        # The ranks of a host send heartbeats at different moments, so also name those that will exceed the limit
        # within a heartbeat or two.
        for rank, seconds in self.liveness.expired(SILENT_AFTER - 2 * HEARTBEAT_SECONDS, now).items():
            self.lost[rank] = seconds
            self.liveness.forget(rank)
        return self.stop("lost")

    def _over(self, now: float) -> bool:
        if self._going_since is None or self.timeout is None or self.stopped is not None or self.done:
            return False
        return now - self._going_since >= self.timeout

    def _someone_cannot_reach_us(self, now: float) -> bool:
        if not self.may_fall_back or self.fell_back or self.all_met or self.stopped is not None:
            return False
        return self._last_hello is not None and now - self._last_hello >= self.fallback_after

    def _hello(self, rank: int, attempt: int, now: float) -> list[Send]:
        known = self.attempts.setdefault(rank, attempt)
        if known != attempt:
            # Spark started this task again. The first attempt may have trained for hours, so do not run fn twice.
            return [Send(rank, {"type": "refuse", "first_attempt": known})]
        self._last_hello = now  # the latest, because many tasks on few cores start one after the other
        if self.stopped is not None:
            return [Send(rank, {"type": "stop", "reason": self.stopped, "culprit": None})]
        if self.fell_back:
            return [Send(rank, {"type": "fallback"})]
        return self._to_all({"type": "met"}) if self.all_met else []

    def _maybe_go(self, now: float) -> list[Send]:
        if self._going_since is not None or self.store is None or len(self.ready) < self.size or self.stopped:
            return []
        self._going_since = now
        return self._to_all({"type": "go", "store": self.store})

    def _ended(self, rank: int, message: Message, now: float) -> list[Send]:
        if message["ok"]:
            self.ended_ok[rank] = message["bytes"]
        elif rank not in self.failed:
            self.failed.append(rank)
            if not message["echo"]:
                return self.stop("peer")
            if self._stop_at is None:
                self._stop_at = now + ECHO_GRACE
        if self.done and not self._released:
            self._released = True
            return self._release()
        return []

    def _release(self) -> list[Send]:
        # Larger values would exhaust the driver's Java heap and end the application.
        too_large = self.max_result_bytes is not None and sum(self.ended_ok.values()) > self.max_result_bytes
        return self._to_all({"type": "release", "hand_over": too_large})

    def _to_all(self, message: Message) -> list[Send]:
        return [Send(rank, message) for rank in sorted(self.attempts)]
