"""Rank 0's end of a timeline: the file, and who has not sent the last of its events yet."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

from spark_hvd.timeline.recorder import Event, TraceWriter, is_event
from spark_hvd.world.words import ranks_text

_log = logging.getLogger("spark_hvd")

_LAST_EVENTS_SECONDS = 10.0


class Collector:
    """Writes the events of all ranks, in a separate thread: encoding them would hold up the engine.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: str, hosts: Sequence[str]) -> None:
        self.path = path
        self._writer = TraceWriter(path, hosts)
        self._waiting = set(range(1, len(hosts)))
        self._complete = threading.Event()
        self._batches: queue.SimpleQueue[tuple[int, int, list[Event]] | None] = queue.SimpleQueue()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._write, name="spark_hvd-timeline", daemon=True)
        self._thread.start()

    def add(self, rank: int, offset_ns: int, events: list[Event]) -> None:
        """Take events; from any thread."""
        self._batches.put((rank, offset_ns, events))

    def done(self, rank: int) -> None:
        """Note that a rank has sent its last events."""
        self._waiting.discard(rank)
        if not self._waiting:
            self._complete.set()

    def close(self) -> None:
        """Wait for the last events, and complete the file.

        Raises:
            OSError: The file could not be written.
        """
        if self._waiting and not self._complete.wait(_LAST_EVENTS_SECONDS):
            _log.warning("The timeline %s lacks the last events of %s.", self.path, ranks_text(sorted(self._waiting)))
        self._batches.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _write(self) -> None:
        odd = set[int]()
        while (batch := self._batches.get()) is not None:
            if self._failure is None:
                rank, offset_ns, events = batch
                try:
                    whole = [event for event in events if is_event(event)]
                    self._writer.add(rank, whole, offset_ns)
                    lost = len(events) - len(whole)
                    fault = f"{lost} of {len(events)} were malformed" if lost else None
                except OSError as error:  # a full disk ends the timeline, not the training
                    self._failure = error
                    _log.warning("The timeline %s ends here: %s", self.path, error)
                    continue
                except Exception as error:  # what a member sends ends neither this thread nor others' events
                    fault = f"{type(error).__name__}: {error}"
                if fault is not None and rank not in odd:
                    odd.add(rank)
                    _log.warning("The timeline %s lacks events that rank %d sent: %s.", self.path, rank, fault)
        try:
            self._writer.close()
        except OSError as error:
            self._failure = self._failure or error
