"""One trace of the next steps of several ranks, assembled from their messages."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable, Mapping
from typing import Any

from spark_hvd.world.words import count, ranks_text

MOST_STEPS = 100
_MOST_BYTES = 512 << 20
"""Maximum size of all traces together, compressed."""


class RankTraces:
    """Takes the messages of ranks that profile their next ``steps``, and ignores those with another ``number``."""

    def __init__(self, number: int, ranks: Iterable[int], steps: int) -> None:
        self.number, self.steps = number, steps
        self._waiting = {*ranks}
        self._heard: set[int] = set()
        self._parts: dict[int, list[bytes]] = {}
        self._done: dict[int, bytes] = {}
        self._faults: dict[int, str] = {}
        self._bytes = 0

    def take(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take a message of a rank; the parts of a trace must arrive in order."""
        if message["number"] != self.number or rank not in self._waiting:
            return
        self._heard.add(rank)
        if message["error"] is not None:
            self._fail(rank, message["error"])
        elif message["parts"]:
            parts = self._parts.setdefault(rank, [])
            if message["part"] != len(parts):
                self._fail(rank, "its trace is incomplete: try again")
                return
            parts.append(base64.b64decode(message["data"]))
            self._bytes += len(parts[-1])
            if self._bytes > _MOST_BYTES:
                self._fail(rank, "the traces of all ranks together are too large: ask for fewer steps, or one rank")
                return
            if len(parts) == message["parts"]:
                self._waiting.discard(rank)
                self._done[rank] = b"".join(self._parts.pop(rank))

    def give_up(self, why: str, *, unheard: bool = False) -> None:
        """Stop waiting for all ranks or, with ``unheard``, only for those that have sent nothing."""
        for rank in self._waiting - (self._heard if unheard else set()):
            self._fail(rank, why)

    def _fail(self, rank: int, why: str) -> None:
        self._waiting.discard(rank)
        self._parts.pop(rank, None)
        self._faults[rank] = why

    @property
    def some_done(self) -> bool:
        """Whether the trace of any rank is complete."""
        return bool(self._done)

    @property
    def ended(self) -> bool:
        """Whether all ranks have sent their traces or failed."""
        return not self._waiting

    @property
    def ready(self) -> bool:
        """Whether there is a trace to download, and all ranks have ended."""
        return self.ended and bool(self._done)

    def status(self) -> dict[str, Any]:
        """Return the state of the profile, for the page."""
        texts = [f"profiling {count(self.steps, 'step')} of {ranks_text(sorted(self._waiting))} ..."] * (not self.ended)
        reasons: dict[str, list[int]] = {}
        for rank, why in sorted(self._faults.items()):
            reasons.setdefault(why, []).append(rank)
        texts += [f"{ranks_text(ranks)}: {why}" for why, ranks in reasons.items()]
        return {"number": self.number, "ready": self.ready, "text": "; ".join(texts)}

    def body(self) -> bytes:
        """Return the trace in Chrome's format, compressed. Gzip allows concatenating separately compressed parts."""
        comma = gzip.compress(b",\n")
        head, tail = gzip.compress(b'{"displayTimeUnit": "ms", "traceEvents": [\n'), gzip.compress(b"\n]}\n")
        return head + comma.join(events for _, events in sorted(self._done.items())) + tail
