"""The coordinator at work on one rank of a process set: its sockets, its clock and its log, on the engine's thread."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from spark_hvd.collectives.messages import Decision, Pong, Request, Run, RunKnown, Tune, bits
from spark_hvd.collectives.queue import NegotiatedQueue
from spark_hvd.engine.channel import CLOSE_GRACE_SECONDS, CoordinatorSockets
from spark_hvd.engine.coordinator import Coordinator
from spark_hvd.world.activity import activity
from spark_hvd.world.config import Config
from spark_hvd.world.words import ranks_text

_log = logging.getLogger("spark_hvd")

_WARNED = 10
"""How many collectives one warning lists."""


class Coordination:
    """Feeds a :class:`Coordinator` from sockets and the clock, and sends out its decisions.

    ``queue`` is the coordinator's own and ``config`` is rank 0's. ``sockets`` is None if there are no other members.
    """

    def __init__(self, queue: NegotiatedQueue, config: Config, sockets: CoordinatorSockets | None) -> None:
        self.queue = queue
        self.sockets = sockets
        self.on_message: Callable[[int, str, Sequence[Any]], None] = lambda place, kind, fields: None
        self._coordinator = Coordinator(
            queue.ranks, config.cache_capacity, config.stall_timeout, horovod=config.is_horovod
        )
        self._coordinator.last_in_memory = queue.memory.last
        self._stall_warning = config.stall_warning
        self._absent = set(range(1, len(queue.ranks)))
        self._without_hello = set(self._absent)
        self.complete = threading.Event()
        """Set when both connections of all members are up."""
        self._held_back: list[Decision] = []
        self._vanished: dict[int, float] = {}
        self._warned: set[tuple[str, float]] = set()
        self._next_check = 0.0

    def read_own(self) -> None:
        """Process what this rank is ready for."""
        ids, fresh = self.queue.take()
        if ids or fresh:
            self.tell(self._submitted(0, ids, fresh))

    def read_requests(self) -> None:
        """Process all messages of the members, and only then decide, so that more is fused."""
        assert self.sockets is not None
        decisions: list[Decision] = []
        while (message := self.sockets.receive()) is not None:
            try:
                decisions += self._handle(*json.loads(message))
            except Exception as error:  # our defect, or another version of spark_hvd
                kind = type(error).__name__
                raise ValueError(f"a member sent an invalid request ({kind}): {message[:100]!r}") from error
        self.tell(decisions)

    def read_presence(self) -> None:
        """Process which members have come and gone."""
        assert self.sockets is not None
        while (news := self.sockets.presence()) is not None:
            place, come = news
            if come:
                self._absent.discard(place)
            else:
                self._vanished.setdefault(place, time.monotonic() + CLOSE_GRACE_SECONDS)
                self._without_hello.discard(place)
        held, self._held_back = self._held_back, []
        self._send(held)
        self._check_complete()

    @property
    def waits(self) -> bool:
        """Whether anything depends on the clock."""
        return bool(self._vanished) or self._coordinator.has_waiting

    def _handle(self, place: int, kind: str, *fields: Any) -> list[Decision]:
        if kind == "ready":
            ids, fresh = fields
            requests = [(name, Request(*request)) for name, request in fresh]
            return self._submitted(place, int(ids, 16), requests)
        if kind == "join":
            return self.joined(place, *fields)
        if kind == "left":
            return self.left(place, *fields)
        if kind == "failed":
            text = f"rank {self.queue.ranks[place]} could not do its part: {fields[0]}"
            return self._coordinator.gone(place, text, left=False)
        if kind == "hello":
            self._without_hello.discard(place)
            self._check_complete()
            return []
        if kind == "ping":
            return [Pong(place, fields[0], time.monotonic_ns())]
        self.on_message(place, kind, fields)
        return []

    def _submitted(self, place: int, ids: int, fresh: list[tuple[str, Request]]) -> list[Decision]:
        if self.queue.tracing.recorder is not None:
            names = [*map(self._coordinator.name_of, bits(ids)), *(name for name, _ in fresh)]
            self.queue.tracing.ready(self.queue.ranks[place], names)
        return self._coordinator.submitted(place, ids, fresh, time.monotonic())

    def joined(self, place: int, counts: bool) -> list[Decision]:
        """Record that a member has no more data."""
        return self._coordinator.joined(place, counts)

    def left(self, place: int, done: int) -> list[Decision]:
        """Record that a member has left, having done its part of so many batches."""
        text = (
            f"{self._who(place)} has left the world (its program has ended, or it called hvd.shutdown()), so no "
            "collective that needs it can run any more."
        )
        return self._coordinator.gone(place, text, left=True, done=done)

    def failed(self, place: int, text: str) -> list[Decision]:
        """Record that a member cannot continue."""
        return self._coordinator.gone(place, text, left=False)

    def leave(self, deadline: float | None) -> None:
        """Leave, and close the sockets; see :meth:`CoordinatorSockets.close`."""
        assert self.sockets is not None
        self.tell(self.left(0, self.queue.done))
        self.sockets.close(deadline)

    def give_up(self, why: str) -> None:
        """Tell all members that this coordinator has failed."""
        self.complete.set()
        self.tell(self._handle(0, "failed", why))

    def tell(self, decisions: Sequence[Decision]) -> None:
        """Tell all members, this rank last."""
        if not decisions:
            return
        decisions = _coalesced(decisions)
        self._send(decisions)
        self.queue.apply(decisions)
        self._coordinator.in_memory = self.queue.memory.ids

    def _send(self, decisions: Sequence[Decision]) -> None:
        if self._absent:  # absent members would miss it; until all are here, the only decisions are about lost members
            self._held_back += decisions
        elif decisions and self.sockets is not None:
            self.sockets.send(decisions)

    def _check_complete(self) -> None:
        if not self._absent and not self._without_hello:
            self.complete.set()

    # ---- time -----------------------------------------------------------------------------------------------------

    def next_check(self) -> float | None:
        """Return when :meth:`check` is due, in seconds of the monotonic clock; None if nothing is waiting."""
        due = min(self._vanished.values(), default=None)
        limits = [limit for limit in (self._stall_warning, self._coordinator.stall_timeout) if limit is not None]
        if limits and self._coordinator.has_waiting:
            due = self._next_check if due is None else min(due, self._next_check)
        return due

    def check(self) -> None:
        """Fail collectives that have waited too long or whose member is gone; warn about stalls."""
        now = time.monotonic()
        decisions: list[Decision] = []
        for place, until in list(self._vanished.items()):
            if now >= until:
                del self._vanished[place]
                self.on_message(place, "traced", ())
                text = (
                    f"{self._who(place)} has ended without notice, or can no longer be reached. See its own output and "
                    "exit code for the cause."
                )
                decisions += self._coordinator.gone(place, text, left=False)
        if now >= self._next_check:
            limits = [limit for limit in (self._stall_warning, self._coordinator.stall_timeout) if limit is not None]
            self._next_check = now + min(max(min(limits, default=1.0) / 5, 0.01), 1.0)
            self._warn(now)
            decisions += self._coordinator.overdue(now)
        self.tell(decisions)

    def _warn(self, now: float) -> None:
        if self._stall_warning is None or activity.watched:
            return
        waiting = {(name, since) for name, since in self._coordinator.waiting()}
        self._warned &= waiting
        late = [item for item in waiting - self._warned if now - item[1] >= self._stall_warning]
        if not late:
            return
        self._warned.update(late)
        late.sort(key=lambda item: item[1])
        lines = [self._coordinator.stall_text(name, now) for name, _ in late[:_WARNED]]
        if len(late) > _WARNED:
            lines.append(f"and {len(late) - _WARNED} more.")
        _log.warning(
            "Some ranks wait for others. Do all ranks call the same collectives, under the same names?\n  %s",
            "\n  ".join(lines),
        )

    def tune(self, config: Config) -> None:
        """Use other values from now on, on all members."""
        self._stall_warning, self._coordinator.stall_timeout = config.stall_warning, config.stall_timeout
        self._coordinator.horovod = config.is_horovod
        self._next_check = 0.0
        self.tell([Tune(config.fusion_threshold, config.is_horovod)])

    def absent_text(self, seconds: float) -> str:
        """Return an error text for the members that have not connected."""
        ranks = [self.queue.ranks[place] for place in sorted(self._absent | self._without_hello)]
        return (
            f"{ranks_text(ranks)} did not connect to the coordinator of the named collectives, rank "
            f"{self.queue.ranks[0]}, within {seconds:.0f} s. See their own errors for the cause."
        )

    def _who(self, place: int) -> str:
        return f"{ranks_text([self.queue.ranks[place]])} (on {self.queue.members.hosts[place]})"


def _coalesced(decisions: Sequence[Decision]) -> list[Decision]:
    """Merge neighbouring decisions to run, so that they are fused."""
    result: list[Decision] = []
    for decision in decisions:
        last = result[-1] if result else None
        if isinstance(decision, RunKnown) and isinstance(last, RunKnown):
            result[-1] = RunKnown(last.ids | decision.ids)
        elif isinstance(decision, Run) and isinstance(last, Run):
            result[-1] = Run([*last.entries, *decision.entries])
        else:
            result.append(decision)
    return result
