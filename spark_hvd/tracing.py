"""This process' timeline, while one is recorded: what the lanes tell it, and how its events get to rank 0's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spark_hvd.trace import (
    CYCLE_START,
    MEMCPY_IN_FUSION_BUFFER,
    Event,
    Recorder,
    negotiate_phase,
    wire_phase,
)

if TYPE_CHECKING:
    from spark_hvd.named_handle import NamedHandle

_PINGS = 8
"""Questions for rank 0's time; the answer that came back the quickest tells the most."""


class Tracing:
    """Shared by all lanes of a process.

    Args:
        wake: Wakes the engine; from any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.recorder: Recorder | None = None
        self._called: dict[str, int] = {}
        self._answers: list[tuple[int, int]] = []

    # ---- what happens to collectives ------------------------------------------------------------------------------

    def called(self, handle: NamedHandle[Any]) -> None:
        """A collective was called."""
        self._called[handle.name] = time.monotonic_ns()

    def ran(self, handles: Sequence[NamedHandle[Any]], started_ns: int, packed_ns: int) -> None:
        """A batch has ended now."""
        recorder, now = self.recorder, time.monotonic_ns()
        if recorder is None:
            return
        for handle in handles:
            kind = handle.request.kind
            called = self._called.pop(handle.name, started_ns)
            recorder.span(handle.name, negotiate_phase(kind), called, started_ns)
            recorder.span(
                handle.name,
                kind.upper(),
                started_ns,
                now,
                dtype=",".join(dict.fromkeys(handle.request.dtypes)),
                shapes=handle.request.shapes,
                fused=len(handles),
            )
            if len(handles) > 1 or len(handle.request.shapes) > 1:
                recorder.span(handle.name, MEMCPY_IN_FUSION_BUFFER, started_ns, packed_ns)
            backend = "nccl" if handle.request.device == "cuda" else "gloo"
            if handle.request.shapes:
                recorder.span(handle.name, wire_phase(backend, kind), packed_ns, now)

    def cycle(self) -> None:
        """Decisions have come."""
        if self.recorder is not None and self.recorder.mark_cycles:
            self.recorder.instant("cycles", CYCLE_START, time.monotonic_ns())

    # ---- on and off -----------------------------------------------------------------------------------------------

    def start(self, ship: Callable[[list[Event]], None], mark_cycles: bool) -> None:
        """Record from now on."""
        self._called.clear()
        self._answers.clear()
        self.recorder = Recorder(ship, mark_cycles)

    def stop(self) -> None:
        """Record no more, and ship what there is."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.flush()

    # ---- the clock of rank 0 --------------------------------------------------------------------------------------

    def answered(self, asked_ns: int, rank0_ns: int) -> bool:
        """Rank 0 has told its time; returns whether to ask again."""
        now = time.monotonic_ns()
        # As in NTP: the answer was given half-way, give or take half of the round trip.
        self._answers.append((now - asked_ns, rank0_ns - (asked_ns + now) // 2))
        return len(self._answers) < _PINGS

    @property
    def offset_ns(self) -> int:
        """What to add to this rank's times to have rank 0's."""
        return min(self._answers)[1] if self._answers else 0
