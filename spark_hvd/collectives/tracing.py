"""This process's timeline: takes events from the queues, and converts their times to rank 0's clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spark_hvd.collectives.messages import AUTO
from spark_hvd.timeline.recorder import (
    CYCLE_START,
    MEMCPY_IN_FUSION_BUFFER,
    MEMCPY_OUT_FUSION_BUFFER,
    QUEUE,
    RANK_READY,
    SHARED_MEMORY,
    Event,
    Recorder,
    negotiate_phase,
    wire_phase,
)
from spark_hvd.transport.mpi import backend as mpi_backend

if TYPE_CHECKING:
    from spark_hvd.collectives.handle import NamedHandle

_log = logging.getLogger("spark_hvd")

_PINGS = 8
"""Number of requests for rank 0's time; the fastest answer is the most accurate."""
_AUTO_ROWS = 16
"""Rows for calls without a name, whose generated names would otherwise take a row each."""


class Tracing:
    """Events of all queues of a process. ``wake`` wakes the engine; any thread calls it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.recorder: Recorder | None = None
        self._called: dict[str, int] = {}
        self._answers: list[tuple[int, int]] = []
        self._send: Callable[[int, list[Event]], None] = lambda offset_ns, events: None
        self._settled = self._failed = False
        self._held: list[Event] = []

    # ---- what happens to collectives ------------------------------------------------------------------------------

    def called(self, handle: NamedHandle[Any]) -> None:
        """Record that a collective was called."""
        self._called[handle.name] = time.monotonic_ns()

    def ready(self, rank: int, names: Sequence[str]) -> None:
        """Record that a rank is ready, as the coordinator has been told."""
        recorder, now = self.recorder, time.monotonic_ns()
        if recorder is not None:
            for name in names:
                recorder.instant(_row(name), RANK_READY, now, rank=rank)

    def ran(
        self, handles: Sequence[NamedHandle[Any]], queued_ns: int, started_ns: int, packed_ns: int, staged: bool
    ) -> None:
        """Record a batch that has just ended, with the times in between; `staged`: it went through shared memory."""
        recorder, now = self.recorder, time.monotonic_ns()
        if recorder is None:
            return
        try:
            for handle in handles:
                kind, row = handle.request.kind, _row(handle.name)
                recorder.span(row, negotiate_phase(kind), self._called.pop(handle.name, queued_ns), queued_ns)
                dtype = ",".join(dict.fromkeys(handle.request.dtypes))
                facts = {"dtype": dtype, "shapes": handle.request.shapes, "fused": len(handles)}
                recorder.span(row, kind.upper(), queued_ns, now, **facts)
                recorder.span(row, QUEUE, queued_ns, started_ns)
                if len(handles) > 1 or len(handle.request.shapes) > 1:
                    recorder.span(row, MEMCPY_IN_FUSION_BUFFER, started_ns, packed_ns)
                if handle.request.shapes:
                    backend = mpi_backend.carrier(handle.request.on_gpu)
                    recorder.span(row, SHARED_MEMORY if staged else wire_phase(backend, kind), packed_ns, now)
        except Exception as error:  # must not keep the batch from being completed
            self._give_up(error)

    def finished(self, handle: NamedHandle[Any], started_ns: int) -> None:
        """Record that the waiting thread has unpacked a batch."""
        if self.recorder is not None:
            self.recorder.span(_row(handle.name), MEMCPY_OUT_FUSION_BUFFER, started_ns, time.monotonic_ns())

    def cycle(self) -> None:
        """Record that the engine woke up."""
        if self.recorder is not None and self.recorder.mark_cycles:
            self.recorder.instant("cycles", CYCLE_START, time.monotonic_ns())

    # ---- on and off -----------------------------------------------------------------------------------------------

    def start(self, send: Callable[[int, list[Event]], None], mark_cycles: bool, *, on_rank0: bool) -> None:
        """Start to record.

        ``send`` takes events, and nanoseconds to add to all times, the same in every call. ``mark_cycles`` records
        when the engine wakes up. ``on_rank0`` makes this rank's clock the reference.
        """
        self._called.clear()
        self._answers.clear()
        self._held.clear()
        self._send = send
        self._settled, self._failed = on_rank0, False
        self.recorder = Recorder(self._ship, mark_cycles)

    def stop(self) -> None:
        """Stop recording, and send the remaining events."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            self._settle()
            recorder.flush()

    def answered(self, asked_ns: int, rank0_ns: int) -> bool:
        """Process rank 0's answer to a request for its time; return whether to ask again."""
        now = time.monotonic_ns()
        # As in NTP, assume that the answer was given half-way: the error is at most half of the round trip.
        self._answers.append((now - asked_ns, rank0_ns - (asked_ns + now) // 2))
        if len(self._answers) == _PINGS:
            self._settle()
        return len(self._answers) < _PINGS

    def _ship(self, events: list[Event]) -> None:
        if self._settled:
            try:
                self._send(min(self._answers)[1] if self._answers else 0, events)
            except Exception as error:  # the caller is in the middle of a collective or of the engine's turn
                self._give_up(error)
        else:  # the offset may still change, and nested spans must stay nested
            self._held += events

    def _give_up(self, error: Exception) -> None:
        """Stop recording after an error: observing a run must not end it."""
        self.recorder = None
        if not self._failed:
            self._failed = True
            _log.warning(
                "The timeline lacks this rank's latest events and all later ones: %s: %s",
                type(error).__name__,
                error,
            )

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            held, self._held = self._held, []
            if held:
                self._ship(held)


def _row(name: str) -> str:
    kind, auto, number = name.partition(AUTO)
    return f"{kind}{AUTO}{int(number) % _AUTO_ROWS}" if auto and number.isdecimal() else name
