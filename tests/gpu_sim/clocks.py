"""Vector clocks of CUDA streams: whether each use of memory is ordered after the uses that it depends on.

A stream counts its own kernels. It knows another stream's kernels as far as it has waited for that stream, or as
the host has and launches it afterwards. Memory is identified by storage.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

Stream = tuple[int, int]
"""A device and a stream's number there; 0 is the default stream."""


@dataclass(slots=True)
class _Storage:
    owner: Stream  # the stream that was current at the allocation; it may use the memory again once it is freed
    written: tuple[Stream, int] | None = None
    used: dict[Stream, int] = field(default_factory=dict)  # the latest use by each stream
    by: str = ""  # the latest use
    recorded: set[Stream] = field(default_factory=set)


class Clocks:
    """All streams of a process. Every method may be called from any thread.

    Attributes:
        faults: What was not in order, one sentence each.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._lock = threading.RLock()
        self._known: dict[Stream, dict[Stream, int]] = {}
        self._host: dict[Stream, int] = {}
        self._events: list[dict[Stream, int]] = [{}]
        self._storages: dict[int, _Storage] = {}
        self._free: dict[Stream, list[_Storage]] = {}

    def ran(self, name: str, stream: Stream, storages: Sequence[tuple[int, bool]], where: str = "") -> int:
        """Record that a kernel is put on a stream; return its number there.

        Args:
            name: The operator.
            stream: The stream on which it runs.
            storages: The storages that it uses, and whether it writes to them.
            where: The line that called it, for the description of a fault.
        """
        with self._lock:
            known = self._after_host(stream)
            now = known[stream] = known.get(stream, 0) + 1
            for number, writes in storages:
                storage = self._storages.setdefault(number, _Storage(stream))
                if storage.written is not None:
                    self._require(known, stream, storage.written, f"{name} {where}uses", "written")
                if writes:
                    for use in storage.used.items():
                        self._require(known, stream, use, f"{name} {where}writes", "used")
            for number, writes in storages:
                storage = self._storages[number]
                storage.used[stream], storage.by = now, name
                if writes:
                    storage.written = stream, now
            return now

    def knows(self, stream: Stream, use: tuple[Stream, int]) -> bool:
        """Return whether work that is put on a stream now runs after another stream's kernel."""
        with self._lock:
            return self._known.get(stream, {}).get(use[0], 0) >= use[1]

    def allocated(self, storage: int, stream: Stream) -> None:
        """Record that memory was allocated for use on a stream, perhaps memory that this stream had freed."""
        with self._lock:
            known = self._after_host(stream)
            for gone in self._free.pop(stream, []):
                for use in gone.used.items():
                    if use[0] not in gone.recorded:
                        self._require(known, stream, use, f"memory that {gone.by} used last is free for", "used")
            self._storages[storage] = _Storage(stream)

    def freed(self, storage: int) -> None:
        """Record that memory was freed: the stream for which it was allocated may get it again."""
        with self._lock:
            gone = self._storages.pop(storage, None)
            if gone is not None:
                self._free.setdefault(gone.owner, []).append(gone)

    def record_stream(self, storage: int, stream: Stream) -> None:
        """Record that a stream uses memory, which is then kept, once freed, until the stream has come this far."""
        with self._lock:
            if storage in self._storages:
                self._storages[storage].recorded.add(stream)

    def recorded(self, stream: Stream) -> int:
        """Return the number of a new event, at the current end of a stream."""
        with self._lock:
            self._events.append(dict(self._after_host(stream)))
            return len(self._events) - 1

    def waits(self, stream: Stream, event: int) -> None:
        """Record that later work on a stream runs after an event."""
        with self._lock:
            _join(self._known.setdefault(stream, {}), self._events[event])

    def host_waits(self, stream: Stream) -> None:
        """Record that the host waits for a stream, so everything that it launches later runs after it."""
        with self._lock:
            _join(self._host, self._known.get(stream, {}))

    def host_waits_for_event(self, event: int) -> None:
        """Record that the host waits for an event."""
        with self._lock:
            _join(self._host, self._events[event])

    def host_waits_for_device(self, device: int) -> None:
        """Record that the host waits for all streams of a device."""
        with self._lock:
            for stream, known in self._known.items():
                if stream[0] == device:
                    _join(self._host, known)

    def _after_host(self, stream: Stream) -> dict[Stream, int]:
        known = self._known.setdefault(stream, {})
        _join(known, self._host)
        return known

    def _require(self, known: dict[Stream, int], stream: Stream, use: tuple[Stream, int], what: str, how: str) -> None:
        other, count = use
        if other != stream and known.get(other, 0) < count:
            self.faults.append(f"{what} stream {_text(stream)}: it was {how} on stream {_text(other)}, not waited for")


def _join(known: dict[Stream, int], other: dict[Stream, int]) -> None:
    for stream, count in other.items():
        if known.get(stream, 0) < count:
            known[stream] = count


def _text(stream: Stream) -> str:
    return f"{stream[1]} of cuda:{stream[0]}"
