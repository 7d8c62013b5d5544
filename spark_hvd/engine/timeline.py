"""One timeline of all ranks: rank 0 of the world starts and stops the recording, and collects every rank's events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from spark_hvd.collectives.messages import Decision, Pong, Trace
from spark_hvd.collectives.tracing import Tracing
from spark_hvd.engine.links import MemberLink

if TYPE_CHECKING:
    from spark_hvd.timeline.collector import Collector


class WorldTimeline:
    """This rank's part in the timeline.

    ``on_thread`` runs a function on the engine's thread and waits for it. The other methods run on that thread already.
    """

    def __init__(
        self, tracing: Tracing, on_thread: Callable[[Callable[[], None]], None], tell_all: Callable[[Decision], None]
    ) -> None:
        self._tracing = tracing
        self._on_thread = on_thread
        self._tell_all = tell_all
        self._collector: Collector | None = None
        self._recorded_for: MemberLink | None = None

    def start(self, path: str, mark_cycles: bool, hosts: Sequence[str]) -> None:
        """Start recording; call it on rank 0 of the world.

        Raises:
            ValueError: A timeline is being recorded already.
            OSError: The file cannot be written.
        """
        if self._collector is not None:
            raise ValueError(f"a timeline is being recorded to {self._collector.path}; call hvd.stop_timeline() first.")
        from spark_hvd.timeline.collector import Collector  # few worlds need it, and only on rank 0

        collector = self._collector = Collector(path, hosts)

        def start() -> None:
            self._tell_all(Trace(True, mark_cycles))
            self._tracing.start(partial(collector.add, 0), mark_cycles, on_rank0=True)

        self._on_thread(start)

    def stop(self) -> None:
        """Write what all ranks have recorded; call it on rank 0 of the world. Without a recording, do nothing.

        Raises:
            OSError: The file could not be written.
        """
        collector = self._collector
        if collector is None:
            return

        def stop() -> None:
            self._tracing.stop()
            self._tell_all(Trace(False))

        self._on_thread(stop)
        collector.close()
        self._collector = None

    def leave(self) -> None:
        """Send rank 0 the remaining events, if it collects from this rank."""
        if self._recorded_for is not None:
            self._on_thread(self._send_last_events)

    def heard(self, place: int, kind: str, fields: Sequence[Any]) -> None:
        """Add a part of the timeline that a member of the world has sent."""
        if self._collector is None:
            return
        if kind == "trace":
            self._collector.add(place, *fields)
        elif kind == "traced":
            self._collector.done(place)

    def decided(self, member: MemberLink, decisions: Sequence[Decision]) -> None:
        """Handle decisions that concern the timeline."""
        for decision in decisions:
            if isinstance(decision, Trace):
                if decision.on:
                    self._tracing.start(partial(member.send, "trace"), decision.mark_cycles, on_rank0=False)
                    member.send("ping", time.monotonic_ns())
                    self._recorded_for = member
                else:
                    self._send_last_events()
            elif (
                isinstance(decision, Pong)
                and decision.place == member.place
                and self._tracing.answered(decision.asked, decision.answered)
            ):
                member.send("ping", time.monotonic_ns())

    def _send_last_events(self) -> None:
        member, self._recorded_for = self._recorded_for, None
        self._tracing.stop()
        if member is not None:
            member.send("traced")
