"""One timeline of all ranks: rank 0 of the world says when to record, and collects what the others have recorded."""

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
    """This rank's part in it.

    ``on_thread`` runs a function on the engine's thread and waits for it; the rest here runs there anyway.
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
        """Record; to be called on rank 0 of the world.

        Raises:
            ValueError: One is being recorded.
            OSError: The file cannot be written.
        """
        if self._collector is not None:
            raise ValueError(f"a timeline is being recorded to {self._collector.path}; call hvd.stop_timeline() first.")
        from spark_hvd.timeline.collector import Collector  # of few worlds, and of rank 0 only

        collector = self._collector = Collector(path, hosts)

        def start() -> None:
            self._tell_all(Trace(True, mark_cycles))
            self._tracing.start(partial(collector.add, 0), mark_cycles, on_rank0=True)

        self._on_thread(start)

    def stop(self) -> None:
        """Write what all ranks have recorded; to be called on rank 0 of the world. Does nothing if nothing is recorded.

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
        """Send rank 0 what was not sent yet, if it collects from this rank."""
        if self._recorded_for is not None:
            self._on_thread(self._send_last_events)

    def heard(self, place: int, kind: str, fields: Sequence[Any]) -> None:
        """A member of the world has sent a part of the timeline."""
        if self._collector is None:
            return
        if kind == "trace":
            self._collector.add(place, *fields)
        elif kind == "traced":
            self._collector.done(place)

    def decided(self, member: MemberLink, decisions: Sequence[Decision]) -> None:
        """Decisions that are no queue's business."""
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
